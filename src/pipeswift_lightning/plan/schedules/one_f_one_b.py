"""1F1B: one forward, one backward in turn (PipeDream-Flush; Narayanan et al., ICML '21)."""

import itertools
import math
from collections.abc import Sequence

from pipeswift_lightning.plan.instructions import Backward, Forward, Instruction, Schedule
from pipeswift_lightning.plan.ordering import micro_batch_order

__all__ = ["WarmUpError", "one_f_one_b"]


class WarmUpError(ValueError):
    """A warm-up depth with which 1F1B cannot finish."""


def one_f_one_b(
    num_stages: int,
    num_micro_batches: int,
    *,
    warm_up: Sequence[int] | float | None = None,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Return the 1F1B schedule, one stage a rank, compute-only.

    Stage ``r`` runs ``w_r`` forwards, then a backward and a forward in turn, then the remaining
    backwards; so at most ``w_r`` micro-batches are in flight on it. Bubble with equal costs:
    ``(p-1)/(m+p-1)``. Unequal micro-batches need a deeper warm-up or a good order, or it is slower
    than GPipe.

    Args:
        num_stages: ``p``, 1 or more.
        num_micro_batches: ``m``, 1 or more.
        warm_up: Depth ``w_r`` of each stage, not increasing along the stages; shape
            ``[num_stages]``; depths above ``m`` mean ``m``. A number ``k`` in [1, 2] means
            ``ceil(k (p-1-r)) + 1``: 2 hides link latency, at up to twice the activations.
            None means the least, ``min(m, p-r)``, as ``k = 1`` does.
        order: ``order[position] = micro-batch id``; None keeps 0, 1, 2, ...

    Raises:
        WarmUpError: ``warm_up`` has another length, a depth below 1 or an increase, or ``k`` is
            not in [1, 2].
        OrderError: ``order`` is not a permutation, or ``m`` is below 1.
        ScheduleError: ``num_stages`` is below 1.

    Example:
        >>> from pipeswift_lightning.plan.notation import draw
        >>> print(draw(one_f_one_b(2, 3)))
        F0 F1 .  B0 F2 B1 .  B2
        .  F0 B0 F1 B1 F2 B2
    """
    ids = micro_batch_order(order, num_micro_batches)
    depths = _depths(warm_up, num_stages)
    rows = tuple(_row(stage, ids, depth) for stage, depth in enumerate(depths))
    return Schedule(rows, num_stages)


def _row(stage: int, ids: tuple[int, ...], depth: int) -> tuple[Instruction, ...]:
    row: list[Instruction] = [Forward(stage, i) for i in ids[:depth]]
    for position, i in enumerate(ids):
        row.append(Backward(stage, i))
        row.extend(Forward(stage, j) for j in ids[position + depth : position + depth + 1])
    return tuple(row)


def _depths(warm_up: Sequence[int] | float | None, num_stages: int) -> tuple[int, ...]:
    if warm_up is None:
        warm_up = 1.0
    if isinstance(warm_up, int | float):
        if not 1.0 <= warm_up <= 2.0:
            message = (
                f"warm_up={warm_up} is no factor of the depth. Rule: it must lie in [1, 2], from "
                "the standard depth to the deepest that gains. Remedy: warm_up=2, say, or a list "
                "with a depth for each stage to go further"
            )
            raise WarmUpError(message)
        # Rounded first: 1.1 * 10 is 11.000000000000002, and its ceiling one too deep.
        return tuple(
            math.ceil(round(warm_up * (num_stages - 1 - r), 9)) + 1 for r in range(num_stages)
        )
    depths = tuple(warm_up)
    falls = all(a >= b for a, b in itertools.pairwise(depths))
    if len(depths) != num_stages or min(depths, default=0) < 1 or not falls:
        message = (
            f"warm_up={list(depths)} does not fit. Rule: it must give each of {num_stages} stages "
            "a depth of 1 or more that never increases, or the pipeline waits for itself. Remedy: "
            f"try {[num_stages - r for r in range(num_stages)]}"
        )
        raise WarmUpError(message)
    return depths
