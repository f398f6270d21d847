from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.instructions import ScheduleError
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import draw
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.schedules.one_f_one_b import WarmUpError
from pipeswift_lightning.plan.validate import validate

stages = st.integers(1, 6)
micro_batches = st.integers(1, 12)


def peaks(schedule) -> tuple[int, ...]:
    return validate(lower(schedule), training=True).peak_in_flight


def test_three_stages_four_micro_batches() -> None:
    assert draw(one_f_one_b(3, 4)) == dedent(
        """\
        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        .  .  F0 B0 F1 B1 F2 B2 F3 B3"""
    )


def test_deepest_warm_up_in_another_order() -> None:
    assert draw(one_f_one_b(3, 5, warm_up=2, order=[4, 3, 2, 1, 0])) == dedent(
        """\
        F4 F3 F2 F1 F0 B4 .  B3 .  B2 .  B1 .  B0
        .  F4 F3 F2 B4 F1 B3 F0 B2 .  B1 .  B0
        .  .  F4 B4 F3 B3 F2 B2 F1 B1 F0 B0"""
    )


@given(p=stages, m=micro_batches)
def test_stage_s_holds_p_minus_s_micro_batches(p: int, m: int) -> None:
    assert peaks(one_f_one_b(p, m)) == tuple(min(m, p - s) for s in range(p))


@given(p=stages, m=micro_batches, data=st.data())
def test_depth_is_the_peak_in_flight(p: int, m: int, data: st.DataObject) -> None:
    depth = st.integers(1, m + 2)
    warm_up = sorted(data.draw(st.lists(depth, min_size=p, max_size=p)), reverse=True)
    assert peaks(one_f_one_b(p, m, warm_up=warm_up)) == tuple(min(m, w) for w in warm_up)


@pytest.mark.parametrize(
    ("factor", "depths"), [(1, (4, 3, 2, 1)), (1.5, (6, 4, 3, 1)), (2.0, (7, 5, 3, 1))]
)
def test_a_number_sets_all_depths(factor: float, depths: tuple[int, ...]) -> None:
    assert peaks(one_f_one_b(4, 20, warm_up=factor)) == depths


def test_rounding_does_not_deepen_the_warm_up() -> None:
    assert peaks(one_f_one_b(11, 30, warm_up=1.1))[0] == 12


@pytest.mark.parametrize("warm_up", [[1, 2], [1], [2, 1, 1], [1, 0], []])
def test_impossible_depths(warm_up: list[int]) -> None:
    with pytest.raises(WarmUpError, match=r"must give each of 2 stages .* try \[2, 1\]"):
        one_f_one_b(2, 4, warm_up=warm_up)


@pytest.mark.parametrize("warm_up", [0.9, 3, float("nan")])
def test_impossible_factor(warm_up: float) -> None:
    with pytest.raises(WarmUpError, match=r"must lie in \[1, 2\]"):
        one_f_one_b(2, 4, warm_up=warm_up)


def test_a_pipeline_has_a_stage() -> None:
    with pytest.raises(ScheduleError, match="num_stages=0"):
        one_f_one_b(0, 4)
