"""Forward-only: validation, test and prediction."""

from collections.abc import Sequence

from pipeswift_lightning.plan.instructions import Forward, Schedule
from pipeswift_lightning.plan.ordering import micro_batch_order

__all__ = ["forward_only"]


def forward_only(
    num_stages: int, num_micro_batches: int, *, order: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule without backwards, one stage a rank, compute-only.

    With equal stages it ends after ``sum + (p-1) * max`` of one stage's times, in any order.

    Args:
        num_stages: ``p``, 1 or more.
        num_micro_batches: ``m``, 1 or more.
        order: ``order[position] = micro-batch id``; None keeps 0, 1, 2, ...

    Raises:
        OrderError: ``order`` is not a permutation, or ``m`` is below 1.
        ScheduleError: ``num_stages`` is below 1.

    Example:
        >>> from pipeswift_lightning.plan.notation import draw
        >>> print(draw(forward_only(2, 3)))
        F0 F1 F2
        .  F0 F1 F2
    """
    ids = micro_batch_order(order, num_micro_batches)
    rows = tuple(tuple(Forward(stage, i) for i in ids) for stage in range(num_stages))
    return Schedule(rows, num_stages)
