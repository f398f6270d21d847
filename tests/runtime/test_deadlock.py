import pytest

from pipeswift_lightning.runtime.deadlock import find_deadlock, find_parting
from pipeswift_lightning.runtime.progress import EVERYONE, Stamp


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


def test_ranks_in_one_collective_have_not_parted_however_long_it_takes() -> None:
    together = [Stamp(beat=1, still_s=99.0, waiting_for=EVERYONE, doing="saving")] * 3
    assert find_parting(together, still_s=5.0) is None


@pytest.mark.parametrize(
    "third",
    [
        Stamp(beat=1, still_s=99.0, doing="computing"),
        Stamp(beat=1, still_s=1.0, waiting_for=EVERYONE, doing="at the barrier"),
        Stamp(beat=1, still_s=99.0, waiting_for=EVERYONE, doing="at the barrier", is_done=True),
    ],
    ids=["computes", "has just come", "has ended"],
)
def test_ranks_that_may_still_meet_have_not_parted(third: Stamp) -> None:
    waiting = [Stamp(beat=1, still_s=9.0, waiting_for=EVERYONE, doing="comparing")] * 2
    assert find_parting([*waiting, third], still_s=5.0) is None


def test_a_chain_through_a_collective_is_left_to_the_look_at_all() -> None:
    stamps = {0: Stamp(beat=1, still_s=9.0, waiting_for=1), 1: Stamp(beat=1, still_s=9.0)}
    stamps[1] = Stamp(beat=1, still_s=9.0, waiting_for=EVERYONE)
    assert find_deadlock(0, stamps.__getitem__, still_s=5.0) is None
    assert find_parting([stamps[0], stamps[1]], still_s=5.0) is None  # both say nothing of where
