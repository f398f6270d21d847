import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.evaluator import Evaluator, OrderCosts, check_fits, evaluator_for
from pipeswift_lightning.plan.instructions import Backward, Forward, Schedule, ScheduleError
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s, simulate
from pipeswift_lightning.plan.timeline import EventKind

NAMES = ("1f1b", "gpipe", "forward_only")


def random_costs(random: np.random.Generator, stages: int, m: int) -> StepCosts:
    return StepCosts(
        forward_s=random.exponential(size=(stages, m)),
        backward_s=random.exponential(size=(stages, m)),
        activation_bytes=random.exponential(size=(stages - 1, m)) if stages > 1 else None,
    )


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    stages=st.integers(1, 5),
    m=st.integers(1, 7),
    deep=st.booleans(),
    latency_s=st.sampled_from([0.0, 0.3]),
    bandwidth=st.sampled_from([0.7, 5.0, float("inf")]),
    overlap=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_times_to_the_last_bit_what_the_simulator_does(
    name, stages, m, deep, latency_s, bandwidth, overlap, seed
) -> None:
    random = np.random.default_rng(seed)
    costs = random_costs(random, stages, m)
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    warm_up = 2.0 if deep and name == "1f1b" else None
    orders = np.array([random.permutation(m) for _ in range(5)])
    evaluator = evaluator_for(name, stages, m, warm_up=warm_up)
    prepared = OrderCosts.of(costs, link=link, overlap=overlap)
    makespans = prepared.makespans_s(evaluator, orders)
    completions = prepared.completions_s(evaluator, orders)
    for order, makespan, completion in zip(orders.tolist(), makespans, completions, strict=True):
        schedule = build_schedule(name, stages, m, warm_up=warm_up, order=order)
        assert makespan == makespan_s(schedule, costs, link=link, overlap=overlap)
        timeline = simulate(schedule, costs, link=link, overlap=overlap)
        ends = [
            event.end_s
            for event in timeline.events
            if event.kind is EventKind.FORWARD and event.stage == stages - 1
        ]
        assert completion == pytest.approx(sum(ends) / m, rel=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), overlap=st.booleans())
def test_stages_that_share_a_rank_hand_over_for_free(seed: int, overlap: bool) -> None:
    looped = (
        (Forward(0, 0), Forward(2, 0), Backward(2, 0), Backward(0, 0)),
        (Forward(1, 0), Forward(3, 0), Backward(3, 0), Backward(1, 0)),
    )
    adjacent = (
        (Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)),
        (Forward(2, 0), Backward(2, 0)),
    )
    random = np.random.default_rng(seed)
    link = Link(latency_s=0.2, bandwidth_bytes_per_s=2.0)
    for rows, stages in ((looped, 4), (adjacent, 3)):
        schedule = Schedule(rows, num_stages=stages)
        costs = random_costs(random, stages, 1)
        prepared = OrderCosts.of(costs, link=link, overlap=overlap)
        timed = prepared.makespans_s(Evaluator.of(schedule), np.array([[0]]))
        assert timed[0] == makespan_s(schedule, costs, link=link, overlap=overlap)


def test_more_candidates_than_fit_at_once() -> None:
    evaluator = evaluator_for("1f1b", 2, 3)
    scales = np.linspace(1.0, 2.0, 3 * evaluator.part_size + 7)
    makespans = evaluator.makespans_s(np.ones((12, 1)) * scales)
    np.testing.assert_allclose(makespans, 8 * scales)


def test_a_schedule_that_never_finishes() -> None:
    rows = ((Backward(0, 0), Forward(0, 0)), (Forward(1, 0), Backward(1, 0)))
    with pytest.raises(ScheduleError, match="never finishes"):
        Evaluator.of(Schedule(rows, num_stages=2))


def test_costs_of_another_step() -> None:
    costs = StepCosts.uniform(2, 3, forward_s=1.0, backward_s=2.0)
    with pytest.raises(CostError, match="2 stages and 3 micro-batches, the schedule has 2 and 4"):
        check_fits(evaluator_for("1f1b", 2, 4), costs)
