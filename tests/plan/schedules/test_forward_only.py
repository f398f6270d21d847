from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import draw
from pipeswift_lightning.plan.schedules import forward_only
from pipeswift_lightning.plan.validate import validate


def test_three_stages_four_micro_batches() -> None:
    assert draw(forward_only(3, 4, order=[3, 0, 1, 2])) == dedent(
        """\
        F3 F0 F1 F2
        .  F3 F0 F1 F2
        .  .  F3 F0 F1 F2"""
    )


@given(p=st.integers(1, 5), m=st.integers(1, 8))
def test_one_micro_batch_is_in_flight(p: int, m: int) -> None:
    assert validate(lower(forward_only(p, m)), training=False).peak_in_flight == (1,) * p
