"""The plan of a step: what all ranks agree on before they compute."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.notation import draw
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.validate import validate

__all__ = ["Plan", "PlanError", "make_plan"]


class PlanError(ValueError):
    """Parts that make no plan together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Partition, micro-batches and schedule that belong together.

    Args:
        partition: Layers of each stage.
        micro_batches: Samples of each micro-batch.
        schedule: Lowered schedule for these stages and micro-batches.
        schedule_name: Its name in ``SCHEDULES``.

    Attributes:
        digest: Hexadecimal SHA-256 of the plan as text; equal on two ranks if and only if they
            would carry out the same plan.

    Raises:
        PlanError: The schedule is not lowered, or has other numbers of stages or micro-batches.
    """

    partition: Partition
    micro_batches: MicroBatches
    schedule: Schedule
    schedule_name: str
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        have = self.schedule.num_stages, self.schedule.num_micro_batches
        need = self.partition.num_stages, self.micro_batches.num_micro_batches
        if have != need:
            message = (
                f"the schedule has {have[0]} stages and {have[1]} micro-batches, partition and "
                f"micro-batches have {need[0]} and {need[1]}: build all from the same numbers"
            )
            raise PlanError(message)
        if not self.schedule.is_lowered:
            message = (
                f"schedule {self.schedule_name!r} has no communication, so it cannot be carried "
                "out: lower() it first"
            )
            raise PlanError(message)
        object.__setattr__(self, "digest", hashlib.sha256(self._text().encode()).hexdigest())

    def describe(self) -> str:
        """Return the plan in a few lines for people.

        Example:
            >>> plan = make_plan(partition=Partition((0, 3), 5), micro_batches=MicroBatches((2, 2)))
            >>> print(plan.describe())  # doctest: +ELLIPSIS
            1f1b: 2 stages on 2 ranks, 2 micro-batches, plan ...
            layers of each stage: 0-2 3-4
            samples of each micro-batch: 2 2
            F0 F1 .  B0 .  B1
            .  F0 B0 F1 B1
        """
        stages = " ".join(f"{r.start}-{r.stop - 1}" for r in self.partition.ranges)
        return "\n".join(
            (
                f"{self.schedule_name}: {self.partition.num_stages} stages on "
                f"{self.schedule.num_ranks} ranks, {self.micro_batches.num_micro_batches} "
                f"micro-batches, plan {self.digest[:12]}",
                f"layers of each stage: {stages}",
                f"samples of each micro-batch: {' '.join(map(str, self.micro_batches.sizes))}",
                draw(self.schedule.compute_only()),
            )
        )

    def summary(self) -> dict[str, object]:
        """Return the plan as plain values, for a log or a table.

        Example:
            >>> plan = make_plan(partition=Partition((0, 3), 5), micro_batches=MicroBatches((2, 2)))
            >>> plan.summary()["schedule"], plan.summary()["layers"]
            ('1f1b', [3, 2])
        """
        return {
            "schedule": self.schedule_name,
            "stages": self.partition.num_stages,
            "micro_batches": self.micro_batches.num_micro_batches,
            "sizes": list(self.micro_batches.sizes),
            "layers": [len(layers) for layers in self.partition.ranges],
            "digest": self.digest[:12],
        }

    def _text(self) -> str:
        return "\n".join(
            (
                f"partition {self.partition.starts} of {self.partition.num_layers}",
                f"micro-batches {self.micro_batches.sizes}",
                f"schedule {self.schedule_name}",
                draw(self.schedule),
            )
        )


def make_plan(
    *,
    partition: Partition,
    micro_batches: MicroBatches,
    schedule_name: str = "1f1b",
    warm_up: Sequence[int] | float | None = None,
    order: Sequence[int] | None = None,
    training: bool = True,
    receive_window: int | None = None,
) -> Plan:
    """Return the plan, lowered and validated. It is asked for at each step, so results are kept.

    Args:
        partition: Layers of each stage; one stage a rank.
        micro_batches: Samples of each micro-batch.
        schedule_name: A key of ``SCHEDULES``. Without ``training`` it is forward-only instead.
        warm_up: Depth of 1F1B's warm-up; see ``one_f_one_b``. Without ``training`` unused.
        order: ``order[position] = micro-batch id``; None keeps 0, 1, 2, ...
        training: Whether there is a backward pass.
        receive_window: How far ahead receives are posted; see ``lower``.

    Raises:
        ScheduleError: No schedule has that name, it takes no ``warm_up``, or it is not valid.
        WarmUpError: ``warm_up`` does not fit.
        OrderError: ``order`` does not fit.

    Example:
        >>> plan = make_plan(partition=Partition((0, 2), 4), micro_batches=MicroBatches((3, 2)))
        >>> plan.schedule_name, plan.schedule.num_ranks, len(plan.digest)
        ('1f1b', 2, 64)
    """
    return _make_plan(
        partition,
        micro_batches,
        schedule_name if training else "forward_only",
        warm_up=_hashable(warm_up) if training else None,
        order=None if order is None else tuple(order),
        receive_window=receive_window,
    )


def _hashable(warm_up: Sequence[int] | float | None) -> tuple[int, ...] | float | None:
    return warm_up if warm_up is None or isinstance(warm_up, int | float) else tuple(warm_up)


@lru_cache(maxsize=64)
def _make_plan(
    partition: Partition,
    micro_batches: MicroBatches,
    schedule_name: str,
    *,
    warm_up: tuple[int, ...] | float | None,
    order: tuple[int, ...] | None,
    receive_window: int | None,
) -> Plan:
    schedule = _ready_schedule(
        schedule_name,
        partition.num_stages,
        micro_batches.num_micro_batches,
        warm_up=warm_up,
        order=order,
        receive_window=receive_window,
    )
    return Plan(
        partition=partition,
        micro_batches=micro_batches,
        schedule=schedule,
        schedule_name=schedule_name,
    )


# Apart from the plan's own cache: sizes may change at every step while the schedule stays.
@lru_cache(maxsize=64)
def _ready_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    warm_up: tuple[int, ...] | float | None,
    order: tuple[int, ...] | None,
    receive_window: int | None,
) -> Schedule:
    compute = build_schedule(name, num_stages, num_micro_batches, warm_up=warm_up, order=order)
    schedule = lower(compute, receive_window=receive_window)
    validate(schedule, training=name != "forward_only")
    return schedule
