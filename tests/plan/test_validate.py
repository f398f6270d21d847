import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeswift_lightning.plan.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    ScheduleError,
)
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import draw, parse
from pipeswift_lightning.plan.schedules import forward_only, gpipe, one_f_one_b
from pipeswift_lightning.plan.validate import ScheduleReport, validate
from tests.helpers.interpreter import WrongError, interpret
from tests.helpers.schedules import compute_schedules

GOOD = "F0 sa0>1 rg0<1 B0 x0\nra0<0 F0 B0 sg0>0 x0"

small = compute_schedules(max_stages=4, max_micro_batches=5).map(lower)


def replaced(schedule: Schedule, rank: int, row: list[Instruction]) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return Schedule(tuple(rows), schedule.num_stages)


def pick(schedule: Schedule, data: st.DataObject) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.rows[rank]) - 1))


def is_right(schedule: Schedule, *, training: bool) -> bool:
    try:
        interpret(schedule, training=training)
    except WrongError:
        return False
    return True


def is_accepted(schedule: Schedule, *, training: bool) -> bool:
    try:
        validate(schedule, training=training)
    except ScheduleError:
        return False
    return True


def test_report() -> None:
    assert validate(lower(one_f_one_b(3, 8), receive_window=1)) == ScheduleReport(
        peak_in_flight=(3, 2, 1), peak_receives=(2, 3, 2), num_messages=32
    )


def test_peaks_count_all_stages_of_a_rank() -> None:
    assert validate(lower(parse("F0 F0@1 B0@1 B0"))).peak_in_flight == (2,)


@given(schedule=small, data=st.data())
def test_a_dropped_instruction_is_noticed(schedule: Schedule, data: st.DataObject) -> None:
    training = schedule.has_backward
    rank, at = pick(schedule, data)
    row = list(schedule.rows[rank])
    del row[at]
    with pytest.raises(ScheduleError, match=f"rank {rank}.*add"):
        validate(replaced(schedule, rank, row), training=training)


@given(schedule=small, data=st.data())
def test_a_duplicated_instruction_is_noticed(schedule: Schedule, data: st.DataObject) -> None:
    rank, at = pick(schedule, data)
    row = list(schedule.rows[rank])
    row.insert(data.draw(st.integers(0, len(row))), row[at])
    with pytest.raises(ScheduleError, match=f"rank {rank}, index .*: appears already at index"):
        validate(replaced(schedule, rank, row))


@given(schedule=small)
def test_every_swap_of_neighbours_that_rely_on_each_other_is_noticed(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        for at, (first, second) in enumerate(pairwise(row)):
            if not _order_matters(first, second):
                continue
            swapped = [*row[:at], second, first, *row[at + 2 :]]
            with pytest.raises(ScheduleError, match=r"swap the two|in the order of the sends"):
                validate(replaced(schedule, rank, swapped), training=schedule.has_backward)


def _order_matters(first: Instruction, second: Instruction) -> bool:
    """Whether swapping two neighbours must break the schedule.

    Work on different micro-batches may change places: that is another schedule, right or wrong for
    reasons further away (the next test decides those). So may a gradient's receive and what comes
    before its Backward, since posting a receive early or late only shifts where waiting may happen.
    """
    receives = ReceiveActivation | ReceiveGradient
    if isinstance(first, receives) and isinstance(second, receives):
        return first.peer == second.peer
    if (first.stage, first.micro_batch) != (second.stage, second.micro_batch):
        return False
    return not isinstance(second, receives)


@given(schedule=small, data=st.data())
def test_accepts_what_computes_the_right_thing_and_nothing_else(
    schedule: Schedule, data: st.DataObject
) -> None:
    training = schedule.has_backward
    rank, at = pick(schedule, data)
    row = list(schedule.rows[rank])
    moved = row.pop(at)
    to = data.draw(st.integers(0, len(row)))
    if data.draw(st.booleans()) and to < len(row):  # Swap with another, near or far; else move.
        row.insert(at, moved)
        row[at], row[to] = row[to], row[at]
    else:
        row.insert(to, moved)
    mutated = replaced(schedule, rank, row)
    assume(mutated != schedule)
    assert is_accepted(mutated, training=training) == is_right(mutated, training=training), draw(
        mutated
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 sa0>1 rg0<1 B0\nra0<0 F0 B0 sg0>0 x0", "rank 0, index 3, B0@0: needs x0@0 after it"),
        ("F0 rg0<1 B0 x0\nra0<0 F0 B0 sg0>0 x0", "rank 0, index 0, F0@0: needs sa0@0>1 after it"),
        ("F0 sa0>1 B0 x0\nra0<0 F0 B0 sg0>0 x0", "index 2, B0@0: needs rg0@0<1 before it"),
        (
            "F0 sa0>1 rg0<1 x0 B0\nra0<0 F0 B0 sg0>0 x0",
            "rank 0, index 3, x0@0: comes before B0@0 at index 4",
        ),
        ("F0 sa0>1 rg0<1 B0 x0\nF0 B0 sg0>0 x0", "rank 1, index 0, F0@1: needs ra0@1<0 before it"),
        (f"{GOOD} ra0<0", "rank 1, index 5, ra0@1<0: appears already at index 0"),
        ("sg0>1 F0 sa0>1 rg0<1 B0 x0\nra0<0 F0 B0 sg0>0 x0", "rank 0, index 0, sg0@0>1: nothing"),
        ("F0 sa0>1 rg0<1 B0 x0\nra0<2 ra0<0 F0 B0 sg0>0 x0", "rank 1, index 0, ra0@1<2: nothing"),
    ],
)
def test_a_broken_rule_is_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(parse(text))


def test_a_missing_micro_batch_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 1: the row lacks ra1@1<0 and F1@1"):
        validate(parse("F0 sa0>1 x0 F1 sa1>1 x1\nra0<0 F0 x0"))


def test_training_needs_backwards() -> None:
    schedule = lower(forward_only(2, 2))
    validate(schedule)
    with pytest.raises(ScheduleError, match="F0@0: needs B0@0 after it"):
        validate(schedule, training=True)
    with pytest.raises(ScheduleError, match="Backward without training; remove it"):
        validate(parse(GOOD), training=False)


def test_an_unlowered_schedule_is_sent_to_lowering() -> None:
    with pytest.raises(ScheduleError, match=r"lower\(\)"):
        validate(gpipe(2, 2))


def test_messages_must_be_received_in_the_order_of_sending() -> None:
    with pytest.raises(ScheduleError) as error:
        validate(parse("F0 sa0>1 x0 F1 sa1>1 x1\nra1<0 ra0<0 F0 x0 F1 x1"))
    assert str(error.value) == (
        "rank 0, index 1, sa0@0>1: is message 1 to rank 1, whose receive 1 from here is ra1@1<0 "
        "at index 0; messages match by order, so post the receives in the order of the sends"
    )


def test_a_deadlock_names_both_ranks() -> None:
    # Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants both before it starts back.
    with pytest.raises(ScheduleError) as error:
        validate(lower(parse("F0 B0 F1 B1\nF0 F1 B0 B1")))
    assert str(error.value).startswith(
        "deadlock with sends that block until the receive is posted: "
        "rank 0 at index 3, B0@0, waits for the message of rg0@0<1; "
        "rank 1 at index 3, F1@1, waits for the message of ra1@1<0."
    )


def test_a_deadlock_of_blocking_sends_alone_is_noticed() -> None:
    # Fine where sends are buffered: both ranks send first and post their receives afterwards.
    text = """\
        F0 sa0>1 F1 sa1>1 rg0<1 B0 x0 rg1<1 B1 x1
        ra0<0 F0 B0 sg0>0 x0 ra1<0 F1 B1 sg1>0 x1"""
    with pytest.raises(ScheduleError) as error:
        validate(parse(text))
    assert "rank 0 at index 3, sa1@0>1, waits for ra1@1<0 on rank 1" in str(error.value)
    assert "rank 1 at index 3, sg0@1>0, waits for rg0@0<1 on rank 0" in str(error.value)


def test_a_stage_that_waits_for_its_own_rank_is_noticed() -> None:
    with pytest.raises(ScheduleError, match="F0@1, waits for F0@0 later in its own row"):
        validate(parse("F0@1 x0@1 F0 x0"))
