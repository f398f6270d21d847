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

    Each value is right by itself: `PipeSwiftStrategy` has looked at it.

    Raises:
        OptionError: Two of them do not go together.
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

    def __post_init__(self) -> None:
        if self.compile is not None and self.recompute:
            # A recompiled layer keeps other tensors than it did in its first run.
            msg = (
                f"compile={dict(self.compile)!r} and recompute={self.recompute!r} are not allowed "
                "together. Rule: a layer is compiled or computed again. Remedy: leave out one"
            )
            raise OptionError(msg)
        if self.warm_up is not None and self.schedule_name != "1f1b":
            msg = (
                f"warm_up={self.warm_up!r} is not allowed with schedule={self.schedule!r}. Rule: "
                'it is a setting of 1f1b. Remedy: leave it out, or schedule="1f1b"'
            )
            raise OptionError(msg)

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
    ) -> "PipelineOptions":
        """Freeze what the user gave."""
        counts: int | tuple[int, ...] | None
        if micro_batches is None or isinstance(micro_batches, str):
            counts = None
        elif isinstance(micro_batches, Sequence):
            counts = tuple(map(int, micro_batches))
        else:
            counts = int(micro_batches)
        return cls(
            stages=None if stages is None else int(stages),
            micro_batches=counts,
            schedule=schedule,
            warm_up=tuple(map(int, warm_up)) if isinstance(warm_up, Sequence) else warm_up,
            partition=(
                None
                if partition is None or isinstance(partition, str)
                else tuple(map(int, partition))
            ),
            uniform=isinstance(partition, str),
            dynamic_shapes=dynamic_shapes,
            loss=LossScope(loss),
            loss_weight=LossWeight(loss_weight),
            receive_window=None if receive_window is None else int(receive_window),
            network=(network,) if isinstance(network, str) else tuple(network) if network else None,
            compile=_compile_settings(compile),
            recompute=(
                tuple(map(int, recompute)) if isinstance(recompute, Sequence) else recompute
            ),
            costs=None if costs is None else str(costs),
            trim=trim,
            memory_limit=_bytes(memory_limit),
        )

    def check_stages(self, num_stages: int) -> None:
        """Check that what lists a number for each stage lists as many as there are.

        With one stage such lists are of no account: see `for_stages`.

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

    def for_stages(self, num_stages: int) -> "PipelineOptions":
        """Return what holds for so many stages.

        With one, a configuration made for several can be tried: what lists a number for each stage
        is left out, but for ``recompute``, whose layers are then all in this stage.

        Example:
            >>> many = PipelineOptions(partition=(1, 3), warm_up=(2, 1), recompute=(0, 2))
            >>> one = many.for_stages(1)
            >>> one.partition, one.warm_up, one.recompute, many.for_stages(2) == many
            (None, None, 2, True)
        """
        if num_stages > 1:
            return self
        warm_up, limit, wanted = self.warm_up, self.memory_limit, self.recompute
        return replace(
            self,
            partition=None,
            warm_up=None if isinstance(warm_up, tuple) else warm_up,
            memory_limit=None if isinstance(limit, tuple) else limit,
            recompute=sum(wanted) if isinstance(wanted, tuple) else wanted,
        )

    def num_recomputed(self, stage: int, num_layers: int) -> int:
        """Return how many of a stage's layers are recomputed in backward."""
        wanted = self.recompute
        if isinstance(wanted, bool):
            return num_layers if wanted else 0
        return min(wanted[stage] if isinstance(wanted, tuple) else wanted, num_layers)

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


def _bytes(limit: Sequence[float] | float | None) -> tuple[float, ...] | float | None:
    if limit is None:
        return None
    return tuple(map(float, limit)) if isinstance(limit, Sequence) else float(limit)


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
