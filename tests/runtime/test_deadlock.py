from pipeswift_lightning.runtime.deadlock import find_deadlock
from pipeswift_lightning.runtime.progress import Stamp


def _chain(start: int, stamps: dict[int, Stamp]) -> list[int] | None:
    found = find_deadlock(start, stamps.__getitem__, still_s=5.0)
    return None if found is None else [rank for rank, _ in found]


def _waits(peer: int | None, still_s: float = 6.0, *, is_done: bool = False) -> Stamp:
    return Stamp(beat=1, still_s=still_s, waiting_for=peer, is_done=is_done)


def test_a_ring_seen_from_outside() -> None:
    assert _chain(3, {3: _waits(0), 0: _waits(1), 1: _waits(0)}) == [3, 0, 1]


def test_a_rank_that_computes_may_still_move() -> None:
    assert _chain(0, {0: _waits(1), 1: _waits(2), 2: _waits(None, 600.0)}) is None


def test_a_wait_that_has_only_begun_is_no_deadlock() -> None:
    assert _chain(0, {0: _waits(1), 1: _waits(0, 0.1)}) is None


def test_no_one_waits_for_a_rank_that_has_ended() -> None:
    assert _chain(0, {0: _waits(1), 1: _waits(None, 0.0, is_done=True)}) == [0, 1]
