from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.instructions import Backward, Forward, Free, Schedule, SendActivation
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import ParseError, draw, parse
from pipeswift_lightning.plan.schedules import gpipe
from tests.helpers.schedules import compute_schedules

numbers = st.integers(0, 12)


@st.composite
def any_rows(draw: st.DrawFn) -> Schedule:
    """Instructions without rhyme or reason, stages anywhere, rows stuck or empty."""
    num_stages = draw(st.integers(1, 5))
    owner = [draw(st.integers(0, 3)) for _ in range(num_stages)]
    rows = [
        [Forward(stage, 0) for stage in range(num_stages) if owner[stage] == rank]
        for rank in range(max(owner) + 1)
    ]
    for stage in draw(st.lists(st.integers(0, num_stages - 1), max_size=12)):
        kind = draw(st.sampled_from([Forward, Backward, Free, SendActivation]))
        more = (draw(numbers),) if kind is SendActivation else ()
        rows[owner[stage]].insert(0, kind(stage, draw(numbers), *more))
    return Schedule(tuple(map(tuple, rows)), num_stages)


@given(schedule=any_rows())
def test_round_trip_of_any_rows(schedule: Schedule) -> None:
    assert parse(draw(schedule)) == schedule


@given(schedule=compute_schedules(max_micro_batches=12), window=st.integers(1, 2))
def test_round_trip_of_real_schedules(schedule: Schedule, window: int) -> None:
    assert parse(draw(schedule)) == schedule
    lowered = lower(schedule, receive_window=window)
    assert parse(draw(lowered)) == lowered


def test_columns_are_as_wide_as_the_widest_cell() -> None:
    assert draw(gpipe(2, 11)).splitlines()[1].startswith(".   F0  F1  F2")


def test_stage_is_shown_where_it_is_not_the_rank() -> None:
    schedule = parse("F0 F0@2\n. F0")
    assert schedule.rows[0] == (Forward(0, 0), Forward(2, 0))
    assert draw(schedule) == dedent(
        """\
        F0   .    F0@2
        .    F0"""
    )


def test_a_stuck_rank_is_drawn_too() -> None:
    assert draw(parse("B0 F0\n. F0 B0")) == "B0 F0\nF0 B0"


def test_lowered_cells() -> None:
    text = "F0 sa0>1 rg0<1 B0 x0\nra0<0 F0 B0 sg0>0 x0"
    assert draw(parse(text)) == text


@pytest.mark.parametrize("cell", ["G0", "F", "F0@", "sa0", "sa0<1", "ra0>1", "F0>1", "-", "F0F1"])
def test_a_bad_cell_is_named(cell: str) -> None:
    with pytest.raises(ParseError, match=r"line 3, cell 2: '.*' is no instruction; write F0"):
        parse(f"F0 B0\n\nF0 {cell}")
