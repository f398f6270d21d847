from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.schedules import gpipe, one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline, TimelineError
from tests.helpers.schedules import compute_schedules

times = st.floats(-1e6, 1e6)


@st.composite
def events(draw: st.DrawFn) -> Event:
    start_s, end_s = sorted((draw(times), draw(times)))
    micro_batch = draw(st.none() | st.integers(0, 9))
    kind = draw(st.sampled_from(EventKind))
    return Event(
        draw(st.integers(0, 3)), draw(st.integers(0, 5)), micro_batch, kind, start_s, end_s
    )


timelines = st.lists(events(), max_size=12).map(lambda e: Timeline(tuple(e), 4))


def timeline(p: int = 2, m: int = 3) -> Timeline:
    return simulate(one_f_one_b(p, m), StepCosts.uniform(p, m, forward_s=1.0, backward_s=2.0))


@given(timeline=timelines)
def test_json_round_trip(timeline: Timeline) -> None:
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(timeline=timelines)
def test_anything_can_be_drawn_and_walked(timeline: Timeline) -> None:
    assert len(timeline.draw(width=30).splitlines()) == 4
    path = timeline.critical_path()
    assert len(path) <= len(timeline.events)
    assert all(event.is_compute for event in path)


def test_busy_and_idle() -> None:
    t = timeline()
    assert t.makespan_s == 12.0
    assert [t.busy_s(rank) for rank in range(2)] == [9.0, 9.0]
    assert [t.idle_s(rank) for rank in range(2)] == [3.0, 3.0]
    assert t.bubble(0) == t.bubble_ratio == 0.25
    assert t.stage_busy_s == (9.0, 9.0)


def test_only_computation_is_busy_and_sets_the_makespan() -> None:
    other = Event(0, 0, None, EventKind.OPTIMIZER, 12.0, 20.0)
    t = Timeline((*timeline().events, other), 2)
    assert t.makespan_s == 12.0
    assert t.busy_s(0) == 9.0


def test_nothing_happened() -> None:
    t = Timeline((), 2)
    assert (t.makespan_s, t.bubble_ratio, t.stage_busy_s, t.critical_path()) == (0.0, 0.0, (), ())
    assert t.draw(width=4) == "rank 0 |    | bubble   0.0 %\nrank 1 |    | bubble   0.0 %"


def test_picture() -> None:
    assert timeline().draw(width=36) == dedent(
        """\
        rank 0 |F0=F1=......B0####F2=B1####...B2####| bubble  25.0 %
        rank 1 |...F0=B0####F1=B1####F2=B2####      | bubble  25.0 %"""
    )


def test_a_narrow_picture_drops_the_micro_batch_first() -> None:
    assert timeline().draw(width=12).splitlines()[0] == "rank 0 |FF..B0FB1.B2| bubble  25.0 %"


def test_critical_path_of_unequal_stages() -> None:
    costs = StepCosts(forward_s=[[1, 1], [5, 5]], backward_s=[[1, 1], [5, 5]])
    path = simulate(gpipe(2, 2), costs).critical_path()
    assert [(e.kind.name[0], e.stage, e.micro_batch) for e in path] == [
        ("F", 0, 0),
        ("F", 1, 0),
        ("F", 1, 1),
        ("B", 1, 0),
        ("B", 1, 1),
        ("B", 0, 1),
    ]


@given(schedule=compute_schedules(max_stages=4, max_micro_batches=6), seed=st.randoms())
def test_critical_path_has_no_gap_without_a_wire(schedule, seed) -> None:
    shape = range(schedule.num_stages), range(schedule.num_micro_batches)
    forward_s, backward_s = (
        [[seed.randint(1, 9) for _ in shape[1]] for _ in shape[0]] for _ in "fb"
    )
    t = simulate(schedule, StepCosts(forward_s=forward_s, backward_s=backward_s))
    path = t.critical_path()
    assert sum(event.duration_s for event in path) == t.makespan_s
    assert all(a.end_s == b.start_s for a, b in pairwise(path))


def test_shift_and_merge() -> None:
    t = timeline()
    halves = [Timeline(tuple(e for e in t.events if e.rank == r), 2) for r in range(2)]
    late = halves[1].shifted(5.0)
    assert late.start_s == halves[1].start_s + 5.0
    merged = Timeline.merge([halves[0], late.shifted(-5.0)])
    assert merged == t
    assert Timeline.merge([]) == Timeline((), 0)


def test_impossible_events() -> None:
    with pytest.raises(TimelineError, match=r"ends at 1.0 s before its start at 2.0 s"):
        Event(0, 0, 0, EventKind.FORWARD, 2.0, 1.0)
    with pytest.raises(TimelineError, match="event on rank 2, but num_ranks=2"):
        Timeline((Event(2, 0, 0, EventKind.FORWARD, 0.0, 1.0),), 2)
