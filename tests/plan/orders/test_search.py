import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import OrderCosts, evaluator_for
from pipeswift_lightning.plan.ordering import OrderError
from pipeswift_lightning.plan.orders import ORDERS, find_order
from pipeswift_lightning.plan.orders.warm_up import find_order_and_warm_up, standard_depths
from pipeswift_lightning.plan.schedules.one_f_one_b import WarmUpError, one_f_one_b
from pipeswift_lightning.plan.simulator import makespan_s


def lognormal(seed: int, stages: int, m: int, *, noise: float = 0.2) -> StepCosts:
    random = np.random.default_rng(seed)
    forward = np.exp(random.normal(size=m)) * random.uniform(1 - noise, 1 + noise, (stages, m))
    return StepCosts(forward_s=forward, backward_s=2 * forward)


def all_orders(m: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(m))))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    stages=st.integers(1, 5),
    m=st.integers(1, 7),
    deep=st.booleans(),
    overlap=st.booleans(),
)
def test_finds_the_best_of_all_orders(seed, stages, m, deep, overlap) -> None:
    costs, link = lognormal(seed, stages, m), Link(latency_s=0.05)
    evaluator = evaluator_for("1f1b", stages, m, warm_up=2.0 if deep else None)
    found = find_order(evaluator, costs, link=link, overlap=overlap)
    timed = OrderCosts.of(costs, link=link, overlap=overlap).makespans_s(evaluator, all_orders(m))
    assert found.value == timed.min()
    schedule = one_f_one_b(stages, m, warm_up=2.0 if deep else None, order=found.order)
    assert found.value == makespan_s(schedule, costs, link=link, overlap=overlap)


@pytest.mark.parametrize(("stages", "m"), [(4, 16), (8, 32)])
def test_many_micro_batches_gain_a_tenth_over_random_order(stages: int, m: int) -> None:
    costs = lognormal(m, stages, m, noise=0.0)
    evaluator = evaluator_for("1f1b", stages, m)
    random = np.random.default_rng(0)
    orders = np.array([random.permutation(m) for _ in range(200)])
    mean = OrderCosts.of(costs).makespans_s(evaluator, orders).mean()
    values = {name: find_order(evaluator, costs, method=name).value for name in ORDERS}
    assert values["searched"] < 0.9 * mean
    assert values["searched"] == min(values.values())
    assert values["hill"] < mean


def test_a_larger_budget_is_never_worse() -> None:
    costs, evaluator = lognormal(3, 4, 24), evaluator_for("1f1b", 4, 24)
    values = [
        find_order(evaluator, costs, evaluations=budget).value for budget in (0, 500, 2000, 8000)
    ]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


def test_without_backwards_the_shortest_come_first() -> None:
    costs = lognormal(4, 3, 7, noise=0.0)
    evaluator = evaluator_for("forward_only", 3, 7)
    values = {name: find_order(evaluator, costs, method=name).value for name in ORDERS}
    assert values["shortest_first"] == values["searched"] == min(values.values())
    assert values["heaviest_first"] == max(values.values())
    timed = OrderCosts.of(costs).completions_s(evaluator, all_orders(7))
    assert values["searched"] == timed.min()


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=15)
def test_sessions_keep_their_order(seed, data) -> None:
    m = data.draw(st.integers(2, 16))
    sessions = data.draw(st.lists(st.integers(0, 3), min_size=m, max_size=m))
    evaluator = evaluator_for("1f1b", 3, m)
    for method in ("searched", "heaviest_first"):
        found = find_order(
            evaluator, lognormal(seed, 3, m), method=method, sessions=sessions, evaluations=500
        )
        for session in set(sessions):
            ids = [i for i in found.order if sessions[i] == session]
            assert ids == sorted(ids)
        assert sorted(found.order) == list(range(m))


def test_one_session_leaves_first_come_first_served() -> None:
    found = find_order(evaluator_for("1f1b", 2, 5), lognormal(0, 2, 5), sessions=["a"] * 5)
    assert found.order == (0, 1, 2, 3, 4)


def test_sessions_of_another_number() -> None:
    with pytest.raises(OrderError, match=r"names 2 sessions. Rule: one for each of the 5"):
        find_order(evaluator_for("1f1b", 2, 5), lognormal(0, 2, 5), sessions=["a", "b"])


def test_unknown_order() -> None:
    with pytest.raises(OrderError, match=r"'random' is not known. Rule: one of fifo"):
        find_order(evaluator_for("1f1b", 2, 5), lognormal(0, 2, 5), method="random")


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_order_and_warm_up_are_the_best_of_all_pairs(seed, data) -> None:
    stages, m, link = 3, 5, Link(latency_s=0.1)
    costs = lognormal(seed, stages, m)
    limits = data.draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    found = find_order_and_warm_up(costs, limits, link=link)
    best = min(
        OrderCosts.of(costs, link=link)
        .makespans_s(evaluator_for("1f1b", stages, m, warm_up=depths), all_orders(m))
        .min()
        for depths in itertools.product(*(range(1, min(limit, m) + 1) for limit in limits))
        if list(depths) == sorted(depths, reverse=True)
    )
    assert found.makespan_s == best
    assert all(depth <= limit for depth, limit in zip(found.warm_up, limits, strict=True))
    schedule = one_f_one_b(stages, m, warm_up=found.warm_up, order=found.order)
    assert makespan_s(schedule, costs, link=link) == best


def test_many_depths_are_searched_near_the_standard_ones() -> None:
    costs, link = lognormal(1, 6, 12), Link(latency_s=0.2)
    found = find_order_and_warm_up(costs, [12] * 6, link=link)
    standard = evaluator_for("1f1b", 6, 12, warm_up=standard_depths(6, 12))
    assert found.makespan_s < find_order(standard, costs, link=link).value
    assert list(found.warm_up) == sorted(found.warm_up, reverse=True)


def test_a_limit_for_each_stage() -> None:
    with pytest.raises(WarmUpError, match=r"in_flight_limit=\[2\] does not fit 3 stages"):
        find_order_and_warm_up(lognormal(0, 3, 4), [2])
