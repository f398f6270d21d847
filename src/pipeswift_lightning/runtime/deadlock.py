"""Find ranks that wait for each other, or for a rank that has ended."""

from collections.abc import Callable

from pipeswift_lightning.runtime.progress import Stamp

__all__ = ["find_deadlock"]


def find_deadlock(
    start: int, read: Callable[[int], Stamp], still_s: float
) -> list[tuple[int, Stamp]] | None:
    """Follow who waits for whom from ``start``; return the chain if it can never move again.

    One read a hop, so at most as many as the pipeline has stages. A chain that ends in a rank
    that computes, or has not stood still for ``still_s``, is no deadlock, however long it waits.

    Args:
        start: The rank whose wait is in question.
        read: Gives a rank's stamp.
        still_s: Seconds without progress after which a wait counts.

    Returns:
        The ranks from ``start`` on with their stamps: the last is either awaited by a rank that
        is itself in the chain, or has ended. ``None`` if someone may still move.

    Example:
        >>> waits = {0: Stamp(beat=9, still_s=9.0, waiting_for=1),
        ...          1: Stamp(beat=9, still_s=9.0, waiting_for=0)}
        >>> [rank for rank, _ in find_deadlock(0, waits.__getitem__, still_s=5.0)]
        [0, 1]
    """
    chain: dict[int, Stamp] = {}
    rank = start
    while rank not in chain:
        stamp = chain[rank] = read(rank)
        if stamp.is_done:
            break
        if stamp.waiting_for is None or stamp.still_s < still_s:
            return None
        rank = stamp.waiting_for
    return list(chain.items())
