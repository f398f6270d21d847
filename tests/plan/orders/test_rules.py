import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.orders.rules import ORDER_RULES, seeds

weights = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def costs_of(values: list[int]) -> StepCosts:
    return StepCosts(forward_s=[values], backward_s=[[2 * v for v in values]])


@given(values=weights)
def test_every_rule_and_seed_is_a_permutation(values: list[int]) -> None:
    orders = [rule(costs_of(values)) for rule in ORDER_RULES.values()]
    starts = seeds(costs_of(values)).tolist()
    for order in [*orders, *starts]:
        assert sorted(order) == list(range(len(values)))
    assert {*orders} <= {*map(tuple, starts)}
    assert len({*map(tuple, starts)}) == len(starts)


@given(values=weights)
def test_a_hill_rises_and_falls_once(values: list[int]) -> None:
    heights = np.array(values)[list(ORDER_RULES["hill"](costs_of(values)))]
    top = heights.argmax()
    assert (np.diff(heights[: top + 1]) >= 0).all()
    assert (np.diff(heights[top:]) <= 0).all()


def test_equal_costs_keep_the_order_of_the_data() -> None:
    for name in ("fifo", "lightest_first", "shortest_first"):
        assert ORDER_RULES[name](costs_of([5] * 6)) == (0, 1, 2, 3, 4, 5)
