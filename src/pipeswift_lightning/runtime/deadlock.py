"""Find ranks that wait for each other, for a rank that has ended, or in different places."""

from collections.abc import Callable, Sequence

from pipeswift_lightning.runtime.progress import EVERYONE, Stamp

__all__ = ["find_deadlock", "find_parting"]


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
        if stamp.waiting_for in (None, EVERYONE) or stamp.still_s < still_s:
            return None
        rank = stamp.waiting_for
    return list(chain.items())


def find_parting(stamps: Sequence[Stamp], still_s: float) -> dict[str, list[int]] | None:
    """Return where the ranks wait if all of them wait, and not all at the same place.

    They have parted: some in one collective, the others in another or in a transfer. Collectives
    cannot be followed as transfers can, since a rank does not know which of the others it misses;
    but a run in which nobody computes will never move again, unless all are in one collective.

    Args:
        stamps: Every rank's.
        still_s: Seconds without progress after which a wait counts.

    Returns:
        The ranks by what they do, the fewest first; ``None`` if someone may still move.

    Example:
        >>> stamps = [Stamp(beat=9, still_s=9.0, waiting_for=EVERYONE, doing=doing)
        ...           for doing in ("comparing", "comparing", "at the barrier")]
        >>> find_parting(stamps, still_s=5.0)
        {'at the barrier': [2], 'comparing': [0, 1]}
    """
    places: dict[str, list[int]] = {}
    for rank, stamp in enumerate(stamps):
        if stamp.is_done:
            continue
        if stamp.waiting_for is None or stamp.still_s < still_s:
            return None
        places.setdefault(stamp.doing, []).append(rank)
    if len(places) < 2:
        return None
    return dict(sorted(places.items(), key=lambda item: (len(item[1]), -item[1][0])))
