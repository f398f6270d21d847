"""The order in which a pipeline takes the micro-batches."""

from collections.abc import Sequence

__all__ = ["OrderError", "micro_batch_order"]


class OrderError(ValueError):
    """An order that is not a permutation of the micro-batches."""


def micro_batch_order(order: Sequence[int] | None, num_micro_batches: int) -> tuple[int, ...]:
    """Return the micro-batch id at each position; first come, first served when ``order`` is None.

    Args:
        order: ``order[position] = micro-batch id``. Shape ``[num_micro_batches]``.
        num_micro_batches: At least 1.

    Raises:
        OrderError: ``num_micro_batches`` is below 1 or ``order`` is not a permutation.

    Example:
        >>> micro_batch_order(None, 3), micro_batch_order([2, 0, 1], 3)
        ((0, 1, 2), (2, 0, 1))
    """
    if num_micro_batches < 1:
        message = f"num_micro_batches={num_micro_batches} must be 1 or more: a step needs data"
        raise OrderError(message)
    ids = tuple(range(num_micro_batches))
    if order is None:
        return ids
    if tuple(sorted(order)) != ids:
        message = (
            f"order={list(order)} must name each micro-batch 0..{num_micro_batches - 1} once: "
            "pass a permutation, or None for first come, first served"
        )
        raise OrderError(message)
    return tuple(order)
