"""What a user may choose about the pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeswift_lightning.plan.microbatches import (
    MicroBatches,
    choose_num_micro_batches,
    sizes_for,
    split_batch_size,
)
from pipeswift_lightning.plan.orders import ORDERS
from pipeswift_lightning.plan.schedules import build_schedule

__all__ = ["LossScope", "LossWeight", "OptionError", "PipelineOptions"]


class OptionError(ValueError):
    """An argument of the strategy does not make sense."""


class LossScope(StrEnum):
    """What the user's loss sees at a time: see `PipeSwiftStrategy`'s ``loss``."""

    AUTO = "auto"
    PER_SAMPLE = "per_sample"
    WHOLE_BATCH = "whole_batch"
    TRANSPARENT = "transparent"


class LossWeight(StrEnum):
    """What a micro-batch's loss counts by: see `PipeSwiftStrategy`'s ``loss_weight``."""

    AUTO = "auto"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The arguments of `PipeSwiftStrategy` that shape the plan; see there.

    Raises:
        OptionError: A value is out of its range.
    """

    stages: int | None = None
    micro_batches: int | tuple[int, ...] | None = None
    schedule: str = "auto"
    warm_up: tuple[int, ...] | float | None = None
    partition: tuple[int, ...] | None = None
    uniform: bool = False
    dynamic_shapes: bool = False
    loss: LossScope = LossScope.AUTO
    loss_weight: LossWeight = LossWeight.AUTO
    receive_window: int | None = None
    network: tuple[str, ...] | None = None
    recompute: bool | tuple[int, ...] | int = False
    compile: tuple[tuple[str, Any], ...] | None = None
    costs: str | None = None
    trim: bool | str = "auto"
    memory_limit: tuple[float, ...] | float | None = None
    order: str = "searched"
    buckets: tuple[int, ...] | int | None = None

    def __post_init__(self) -> None:
        if self.stages is not None and self.stages < 1:
            _refuse("stages", self.stages, "1 or more, or None for one stage a device")
        counts = self.micro_batches
        if isinstance(counts, int) and counts < 1:
            _refuse("micro_batches", counts, 'at least 1, or "auto"')
        if isinstance(counts, tuple) and (not counts or min(counts) < 1):
            _refuse("micro_batches", counts, "samples of each micro-batch, 1 or more each")
        if self.partition is not None and (not self.partition or min(self.partition) < 1):
            _refuse("partition", self.partition, "layers of each stage, 1 or more each")
        if self.receive_window is not None and self.receive_window < 1:
            _refuse("receive_window", self.receive_window, "1 or more")
        counts = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)
        if not counts or min(counts) < 0:
            rule = "true, false, a number of layers a stage, or a list of them, 0 or more each"
            _refuse("recompute", self.recompute, rule)
        if self.compile is not None and self.recompute:
            # A recompiled layer keeps other tensors than it did in its first run.
            _refuse("compile", dict(self.compile), "not set together with recompute")
        self._check_planning()
        # Builds a small one, so that a misspelt name or a wrong warm-up fails at once.
        stages = self.stages or (len(self.partition) if self.partition else 2)
        warm_up = self.warm_up if isinstance(self.warm_up, float | int) else None
        build_schedule(self.schedule_name, stages, 2 * stages, warm_up=warm_up)

    def _check_planning(self) -> None:
        """Check what matters with costs only."""
        if self.trim not in (True, False, "auto"):
            _refuse("trim", self.trim, 'true, false, or "auto"')
        limits = self.memory_limit if isinstance(self.memory_limit, tuple) else (self.memory_limit,)
        if any(limit is not None and limit <= 0 for limit in limits):
            _refuse("memory_limit", self.memory_limit, "bytes of a stage, or of each, above 0")
        if self.order not in ORDERS:
            _refuse("order", self.order, f"one of {', '.join(ORDERS)}")
        buckets = self.buckets if isinstance(self.buckets, tuple) else (self.buckets,)
        if not buckets or any(bucket is not None and bucket < 1 for bucket in buckets):
            _refuse("buckets", self.buckets, "a number of tokens, or a list of them, 1 or more")

    @property
    def schedule_name(self) -> str:
        """The schedule where no costs choose it."""
        return "1f1b" if self.schedule == "auto" else self.schedule

    @classmethod
    def of(  # noqa: PLR0913 -- the user's own arguments, one by one
        cls,
        *,
        stages: int | None,
        micro_batches: int | str | Sequence[int] | None,
        schedule: str,
        warm_up: Sequence[int] | float | None,
        partition: Sequence[int] | str | None,
        dynamic_shapes: bool,
        loss: str,
        loss_weight: str,
        receive_window: int | None,
        network: str | Sequence[str] | None,
        recompute: Sequence[int] | int | bool,
        compile: bool | str | Mapping[str, Any],
        costs: str | Path | None,
        trim: bool | str,
        memory_limit: Sequence[float] | float | None,
        order: str,
        buckets: Sequence[int] | int | None,
    ) -> "PipelineOptions":
        """Check and freeze what the user gave."""
        if isinstance(micro_batches, str) and micro_batches != "auto":
            _refuse("micro_batches", micro_batches, 'an integer, a list of sizes, or "auto"')
        uniform = isinstance(partition, str)
        if uniform and partition != "uniform":
            _refuse("partition", partition, 'layers of each stage, or "uniform"')
        if loss not in list(LossScope):
            _refuse("loss", loss, " or ".join(map(repr, map(str, LossScope))))
        if loss_weight not in list(LossWeight):
            _refuse("loss_weight", loss_weight, " or ".join(map(repr, map(str, LossWeight))))
        counts: int | tuple[int, ...] | None
        if micro_batches is None or isinstance(micro_batches, str):
            counts = None
        elif isinstance(micro_batches, int):
            counts = micro_batches
        else:
            counts = tuple(int(size) for size in micro_batches)
        depth = warm_up if warm_up is None or isinstance(warm_up, int | float) else tuple(warm_up)
        return cls(
            stages=stages,
            micro_batches=counts,
            schedule=schedule,
            warm_up=depth,
            partition=None if partition is None or isinstance(partition, str) else tuple(partition),
            uniform=uniform,
            dynamic_shapes=dynamic_shapes,
            loss=LossScope(loss),
            loss_weight=LossWeight(loss_weight),
            receive_window=receive_window,
            network=(network,) if isinstance(network, str) else tuple(network) if network else None,
            compile=_compile_settings(compile),
            recompute=recompute if isinstance(recompute, int) else tuple(recompute),
            costs=None if costs is None else str(costs),
            trim=trim,
            memory_limit=_bytes(memory_limit),
            order=order,
            buckets=buckets
            if buckets is None or isinstance(buckets, int)
            else tuple(sorted(buckets)),
        )

    def check_stages(self, num_stages: int) -> None:
        """Check that what lists a number for each stage lists as many as there are.

        With one stage such lists are of no account, so that a configuration can be tried there.

        Raises:
            OptionError: ``partition``, ``warm_up``, ``recompute`` or ``memory_limit`` does not.
        """
        for name in ("partition", "warm_up", "recompute", "memory_limit"):
            value = getattr(self, name)
            if num_stages > 1 and isinstance(value, tuple) and len(value) != num_stages:
                msg = (
                    f"{name}={list(value)} has {len(value)} entries. Rule: one for each of the "
                    f"{num_stages} stages. Remedy: list {num_stages}, or set stages={len(value)}"
                )
                raise OptionError(msg)

    def num_recomputed(self, stage: int, num_layers: int, num_stages: int) -> int:
        """Return how many of a stage's layers are recomputed in backward.

        Raises:
            OptionError: ``recompute`` lists another number of stages.
        """
        wanted = self.recompute
        if isinstance(wanted, bool):
            return num_layers if wanted else 0
        if isinstance(wanted, tuple):
            if len(wanted) != num_stages:
                _refuse(
                    "recompute", list(wanted), f"one number a stage, and there are {num_stages}"
                )
            wanted = wanted[stage]
        return min(wanted, num_layers)

    def sizes(self, batch_size: int, num_stages: int, *, may_be_smaller: bool) -> MicroBatches:
        """Return the micro-batches of a batch.

        Args:
            batch_size: Its number of samples.
            num_stages: Number of stages.
            may_be_smaller: Whether the batch may be too small for the micro-batches asked for:
                true for an epoch's last batch and in evaluation, where fewer are used then.

        Raises:
            OptionError: The batch is smaller than the number of micro-batches.
        """
        wanted = self.micro_batches
        if wanted is None:
            count = choose_num_micro_batches(batch_size, num_stages)
            return MicroBatches(split_batch_size(batch_size, count))
        if isinstance(wanted, tuple):
            return self._listed_sizes(wanted, batch_size, may_be_smaller=may_be_smaller)
        if batch_size < wanted and not may_be_smaller:
            _too_small(batch_size, wanted)
        return MicroBatches(split_batch_size(batch_size, min(wanted, batch_size)))

    def call_sizes(self, num_samples: int, num_stages: int) -> MicroBatches:
        """Return the micro-batches of one call of a network, which may see any number of samples.

        Listed sizes hold for calls of as many samples; others get as many micro-batches.

        Example:
            >>> PipelineOptions(micro_batches=(3, 1)).call_sizes(8, num_stages=2).sizes
            (4, 4)
        """
        wanted = self.micro_batches
        if isinstance(wanted, tuple) and num_samples > sum(wanted):
            wanted = len(wanted)
        return replace(self, micro_batches=wanted).sizes(
            num_samples, num_stages, may_be_smaller=True
        )

    @staticmethod
    def _listed_sizes(
        wanted: tuple[int, ...], batch_size: int, *, may_be_smaller: bool
    ) -> MicroBatches:
        if batch_size < len(wanted) and not may_be_smaller:
            _too_small(batch_size, len(wanted))
        if batch_size > sum(wanted):
            msg = (
                f"micro_batches={list(wanted)} hold {sum(wanted)} samples, but the batch has "
                f"{batch_size}. Rule: the sizes add up to the batch size (a smaller batch fills "
                "them in order). Remedy: make them add up, or give a number of micro-batches"
            )
            raise OptionError(msg)
        return MicroBatches(sizes_for(batch_size, wanted))


def _too_small(batch_size: int, wanted: int) -> None:
    msg = (
        f"a batch of {batch_size} samples cannot be split into {wanted} micro-batches. Rule: each "
        "micro-batch has a sample (only an epoch's last batch may be smaller). Remedy: "
        f'micro_batches={batch_size} (or "auto"), or a batch_size of {wanted} or more'
    )
    raise OptionError(msg)


def _refuse(name: str, value: object, rule: str) -> None:
    msg = f"{name}={value!r} is not allowed. Rule: {name} is {rule}"
    raise OptionError(msg)


def _bytes(limit: Sequence[float] | float | None) -> tuple[float, ...] | float | None:
    if limit is None:
        return None
    return float(limit) if isinstance(limit, int | float) else tuple(map(float, limit))


def _compile_settings(
    wanted: bool | str | Mapping[str, Any],  # noqa: FBT001 -- the user's own argument
) -> tuple[tuple[str, Any], ...] | None:
    match wanted:
        case bool():
            return () if wanted else None
        case str():
            return (("backend", wanted),)
        case _:
            return tuple(sorted(wanted.items()))
