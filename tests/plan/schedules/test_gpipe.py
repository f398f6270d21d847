from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import draw
from pipeswift_lightning.plan.schedules import gpipe
from pipeswift_lightning.plan.validate import validate


def test_three_stages_four_micro_batches() -> None:
    assert draw(gpipe(3, 4)) == dedent(
        """\
        F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
        .  .  F0 F1 F2 F3 B0 B1 B2 B3"""
    )


def test_order_holds_for_forward_and_backward() -> None:
    assert draw(gpipe(1, 3, order=[2, 0, 1])) == "F2 F0 F1 B2 B0 B1"


@given(p=st.integers(1, 5), m=st.integers(1, 8))
def test_all_micro_batches_are_in_flight(p: int, m: int) -> None:
    assert validate(lower(gpipe(p, m))).peak_in_flight == (m,) * p
