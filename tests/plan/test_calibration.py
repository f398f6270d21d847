"""A stage's factor is found again from a step that it has slowed down."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.calibration import WINDOW, counts, differ, is_due, slowdown_of
from pipeswift_lightning.plan.cost_model import Shape
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.partition import explicit_partition
from tests.helpers.planned import LAYERS, costs

factors = st.tuples(*[st.floats(0.2, 5.0)] * 2)
SHAPES = [Shape.packed([3, 8]), Shape.packed([5]), Shape.packed([1, 1, 1])]
HALVES = explicit_partition(LAYERS, starts=[0, LAYERS // 2])


@given(really=factors, planned_with=st.none() | factors, overhead_s=st.sampled_from([0.0, 2e-3]))
def test_a_factor_is_found_whatever_the_step_was_planned_with(
    really: tuple[float, float], planned_with: tuple[float, float] | None, overhead_s: float
) -> None:
    model = replace(costs(), overhead_s=overhead_s)
    ran = costs().step_costs(HALVES, SHAPES, slowdown=really)  # layers alone
    planned = model.step_costs(HALVES, SHAPES, slowdown=planned_with)
    for stage, factor in enumerate(really):
        busy_s = sum(ran.forward_s[stage]) + sum(ran.backward_s[stage])
        found = slowdown_of(
            busy_s, planned, stage, planned_with=planned_with, overhead_s=overhead_s
        )
        assert found == pytest.approx(factor)


def test_a_stage_without_costs_has_no_factor() -> None:
    nothing = StepCosts(forward_s=[[0.5, 0.5]], backward_s=[[0.5, 0.5]])
    assert slowdown_of(3.0, nothing, 0, overhead_s=0.5) == 1.0
    assert slowdown_of(0.0, nothing, 0) == 1.0


@given(steps=st.integers(0, 10_000))
def test_the_steps_before_a_change_count_for_it(steps: int) -> None:
    seen = [step for step in range(max(0, steps - WINDOW) + 1, steps + 1) if counts(step)]
    assert (len(seen) == WINDOW and not counts(steps - WINDOW)) == is_due(steps)


def test_a_small_change_is_none() -> None:
    assert not differ((1.5, 1.0), (1.52, 0.99))
    assert differ((1.5, 1.0), (1.55, 1.0))
