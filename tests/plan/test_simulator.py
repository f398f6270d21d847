from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.instructions import Backward, Forward, Schedule, ScheduleError
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import parse
from pipeswift_lightning.plan.schedules import forward_only, gpipe, one_f_one_b
from pipeswift_lightning.plan.simulator import makespan_s, simulate
from pipeswift_lightning.plan.timeline import EventKind
from tests.helpers.schedules import compute_schedules

stages = st.integers(1, 6)
micro_batches = st.integers(1, 12)
ticks = st.integers(1, 5)


@dataclass
class Wire:
    """A directed link that carries one message at a time."""

    free_at: int = 0
    queue: list = field(default_factory=list)
    flying: list = field(default_factory=list)


def tick_by_tick(schedule, costs, latency, bandwidth, *, overlap):  # noqa: PLR0912 -- one story
    """Watch the pipeline tick by tick, with no thought of critical paths. Whole ticks only."""
    rows = [list(row) for row in schedule.rows]
    running, blocked = [None] * len(rows), [False] * len(rows)
    there, starts, wires, now = set(), {}, {}, 0
    last = schedule.num_stages - 1
    gradients = costs.gradient_bytes or costs.activation_bytes
    while any(rows) or any(running) or any(blocked):
        for rank, job in enumerate(running):
            if job is None or job[1] > now:
                continue
            compute, running[rank] = job[0], None
            there.add(compute)
            forward = isinstance(compute, Forward)
            if compute.stage == (last if forward else 0):
                continue
            boundary = compute.stage if forward else compute.stage - 1
            sizes = costs.activation_bytes if forward else gradients
            size = sizes[boundary][compute.micro_batch] if sizes else 0
            wire = wires.setdefault((forward, boundary), Wire())
            wire.queue.append((compute, int(size / bandwidth), rank))
            blocked[rank] = not overlap
        for wire in wires.values():
            while wire.queue and wire.free_at <= now:
                compute, occupied, rank = wire.queue.pop(0)
                wire.free_at = now + occupied
                wire.flying.append((now + occupied + latency, compute, rank))
            for arrives, compute, rank in wire.flying:
                if arrives == now:
                    step = 1 if isinstance(compute, Forward) else -1
                    there.add(("at", type(compute), compute.stage + step, compute.micro_batch))
                    blocked[rank] = False
        for rank, row in enumerate(rows):
            if not row or running[rank] or blocked[rank]:
                continue
            compute = row[0]
            key = (compute.stage, compute.micro_batch)
            forward = isinstance(compute, Forward)
            if forward:
                ready = compute.stage == 0 or ("at", Forward, *key) in there
            else:
                own = Forward(*key) in there
                ready = own and (compute.stage == last or ("at", Backward, *key) in there)
            if ready:
                table = costs.forward_s if forward else costs.backward_s
                running[rank] = (row.pop(0), now + int(table[key[0]][key[1]]))
                starts[compute] = now
        now += 1
        assert now < 100_000
    return starts


@st.composite
def whole_costs(draw, schedule):
    def table(num_rows, low, high):
        row = st.lists(
            st.integers(low, high),
            min_size=schedule.num_micro_batches,
            max_size=schedule.num_micro_batches,
        )
        return draw(st.lists(row, min_size=num_rows, max_size=num_rows))

    p, bandwidth = schedule.num_stages, draw(st.sampled_from([1, 2]))
    sizes = [
        None if draw(st.booleans()) else [[bandwidth * b for b in r] for r in table(p - 1, 0, 5)]
        for _ in range(2)
    ]
    costs = StepCosts(
        forward_s=table(p, 1, 6),
        backward_s=table(p, 1, 9),
        activation_bytes=sizes[0],
        gradient_bytes=sizes[1],
    )
    return costs, Link(latency_s=draw(st.integers(0, 4)), bandwidth_bytes_per_s=bandwidth)


@given(
    schedule=compute_schedules(max_stages=5, max_micro_batches=8),
    data=st.data(),
    overlap=st.booleans(),
)
def test_agrees_with_watching_tick_by_tick(schedule: Schedule, data, overlap: bool) -> None:
    costs, link = data.draw(whole_costs(schedule))
    want = tick_by_tick(
        schedule, costs, int(link.latency_s), link.bandwidth_bytes_per_s, overlap=overlap
    )
    timeline = simulate(schedule, costs, link=link, overlap=overlap)
    kinds = {EventKind.FORWARD: Forward, EventKind.BACKWARD: Backward}
    got = {
        kinds[e.kind](e.stage, e.micro_batch): e.start_s for e in timeline.events if e.is_compute
    }
    assert got == want
    assert makespan_s(schedule, costs, link=link, overlap=overlap) == timeline.makespan_s


@given(
    schedule=compute_schedules(max_stages=4, max_micro_batches=6),
    data=st.data(),
    overlap=st.booleans(),
)
def test_a_rank_is_always_computing_waiting_or_done(schedule: Schedule, data, overlap) -> None:
    costs, link = data.draw(whole_costs(schedule))
    timeline = simulate(lower(schedule), costs, link=link, overlap=overlap)
    assert timeline == simulate(schedule, costs, link=link, overlap=overlap)
    for rank in range(timeline.num_ranks):
        now = 0.0
        for event in timeline.events:
            if event.rank == rank:
                assert event.start_s == now
                now = event.end_s
    if overlap:
        assert all(event.kind is not EventKind.SEND_WAIT for event in timeline.events)


@given(p=stages, m=micro_batches, f=ticks, b=ticks)
def test_equal_costs_have_the_textbook_bubble(p: int, m: int, f: int, b: int) -> None:
    costs = StepCosts.uniform(p, m, forward_s=f, backward_s=b)
    for schedule in (one_f_one_b(p, m), gpipe(p, m), one_f_one_b(p, m, warm_up=2)):
        timeline = simulate(schedule, costs)
        assert timeline.makespan_s == (m + p - 1) * (f + b)
        assert timeline.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    speeds=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    data=st.data(),
)
def test_forward_only_takes_sum_and_tail_in_any_order(sizes, speeds, data) -> None:
    # Stage times in proportion to the micro-batches; the slowest stage sets the pace, and the
    # largest micro-batch passes the other stages once.
    p, m = len(speeds), len(sizes)
    forward_s = [[speed * size for size in sizes] for speed in speeds]
    costs = StepCosts(forward_s=forward_s, backward_s=forward_s)
    order = data.draw(st.permutations(range(m)))
    slow = max(speeds)
    got = makespan_s(forward_only(p, m, order=order), costs)
    if len(set(speeds)) == 1:
        assert got == slow * (sum(sizes) + (p - 1) * max(sizes))
    else:
        assert got <= slow * (sum(sizes) + (p - 1) * max(sizes))


def test_without_overlap_the_sender_is_blocked() -> None:
    costs = StepCosts(
        forward_s=[[1, 1], [5, 1]], backward_s=[[0, 0]] * 2, activation_bytes=[[2, 2]]
    )
    link = Link(latency_s=1, bandwidth_bytes_per_s=1)
    overlapped = simulate(forward_only(2, 2), costs, link=link).draw(width=10)
    assert overlapped.splitlines()[0] == "rank 0 |FF        | bubble  80.0 %"
    picture = simulate(forward_only(2, 2), costs, link=link, overlap=False).draw(width=10)
    assert picture.splitlines()[0] == "rank 0 |F>>>F>>>  | bubble  80.0 %"


def test_the_last_part_of_a_step_may_be_missing_from_the_costs() -> None:
    costs = StepCosts.uniform(2, 3, forward_s=1, backward_s=1)
    assert makespan_s(gpipe(2, 2), costs) == 6  # A smaller batch than measured is no error.
    with pytest.raises(CostError, match="costs are for 2 stages and 3 micro-batches, the schedule"):
        simulate(gpipe(2, 4), costs)
    with pytest.raises(CostError, match="has 3 and 3"):
        simulate(gpipe(3, 3), costs)


def test_a_deadlock_is_an_error() -> None:
    costs = StepCosts.uniform(2, 2, forward_s=1, backward_s=1)
    with pytest.raises(ScheduleError, match=r"rank 0 at computation 1, B0@0; rank 1 .* 1, F1@1"):
        simulate(parse("F0 B0 F1 B1\nF0 F1 B0 B1"), costs)
