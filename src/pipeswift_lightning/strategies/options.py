"""What a user may choose about the pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pipeswift_lightning.plan.microbatches import (
    MicroBatches,
    choose_num_micro_batches,
    sizes_for,
    split_batch_size,
)

__all__ = ["MEASURE", "LossScope", "LossWeight", "OptionError", "PipelineOptions"]

MEASURE = "measure"  # in place of a file of costs


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
    order: str = "searched"
    buckets: tuple[int, ...] | int | None = None

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
    def of(cls, **given: Any) -> "PipelineOptions":
        """Freeze what the user gave: arguments of `PipeSwiftStrategy`, by their names there."""
        frozen = {name: _FROZEN.get(name, _same)(value) for name, value in given.items()}
        return cls(**frozen, uniform=isinstance(given.get("partition"), str))

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


def _same(value: Any) -> Any:
    return value


def _counts(value: Sequence[int] | int | str | None) -> tuple[int, ...] | int | None:
    """Return a number, or several; a word, such as "auto", says none."""
    if value is None or isinstance(value, str):
        return None
    return tuple(map(int, value)) if isinstance(value, Sequence) else int(value)


def _names(value: Sequence[str] | str | None) -> tuple[str, ...] | None:
    return (value,) if isinstance(value, str) else tuple(value) if value else None


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


_FROZEN: Mapping[str, Callable[[Any], Any]] = {
    "stages": _counts,
    "micro_batches": _counts,
    "warm_up": lambda value: tuple(map(int, value)) if isinstance(value, Sequence) else value,
    "partition": _counts,
    "loss": LossScope,
    "loss_weight": LossWeight,
    "receive_window": _counts,
    "network": _names,
    "compile": _compile_settings,
    "recompute": lambda value: value if isinstance(value, bool) else _counts(value),
    "costs": lambda value: None if value is None else str(value),
    "memory_limit": _bytes,
    "buckets": _counts,
}
