"""GPipe: all forwards, then all backwards (Huang et al., NeurIPS '19)."""

from collections.abc import Sequence

from pipeswift_lightning.plan.instructions import Backward, Forward, Instruction, Schedule
from pipeswift_lightning.plan.ordering import micro_batch_order

__all__ = ["gpipe"]


def gpipe(
    num_stages: int, num_micro_batches: int, *, order: Sequence[int] | None = None
) -> Schedule:
    """Return the GPipe schedule, one stage a rank, compute-only.

    Simplest, and the only one that gives the loss of the whole batch before any backward; but each
    rank holds all ``m`` micro-batches. The backwards run in the order of the forwards.
    Bubble with equal costs: ``(p-1)/(m+p-1)``.

    Args:
        num_stages: ``p``, 1 or more.
        num_micro_batches: ``m``, 1 or more.
        order: ``order[position] = micro-batch id``; None keeps 0, 1, 2, ...

    Raises:
        OrderError: ``order`` is not a permutation, or ``m`` is below 1.
        ScheduleError: ``num_stages`` is below 1.

    Example:
        >>> from pipeswift_lightning.plan.notation import draw
        >>> print(draw(gpipe(2, 3)))
        F0 F1 F2 .  .  B0 B1 B2
        .  F0 F1 F2 B0 B1 B2
    """
    ids = micro_batch_order(order, num_micro_batches)
    rows: list[tuple[Instruction, ...]] = []
    for stage in range(num_stages):
        forwards = [Forward(stage, i) for i in ids]
        backwards = [Backward(stage, i) for i in ids]
        rows.append((*forwards, *backwards))
    return Schedule(tuple(rows), num_stages)
