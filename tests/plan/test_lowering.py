from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.instructions import (
    Backward,
    Forward,
    Free,
    ReceiveGradient,
    Schedule,
    ScheduleError,
)
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.notation import draw, parse
from pipeswift_lightning.plan.schedules import forward_only, gpipe, one_f_one_b
from pipeswift_lightning.plan.validate import validate
from tests.helpers.interpreter import interpret
from tests.helpers.schedules import compute_schedules

windows = st.none() | st.integers(1, 2)


def test_three_stages_three_micro_batches() -> None:
    assert draw(lower(one_f_one_b(3, 3), receive_window=1)) == dedent(
        """\
        F0 sa0>1 rg0<1 F1 sa1>1 F2 sa2>1 rg1<1 B0 x0 rg2<1 B1 x1 B2 x2
        ra0<0 ra1<0 F0 sa0>2 ra2<0 rg0<2 F1 sa1>2 rg1<2 B0 sg0>0 x0 F2 sa2>2 rg2<2 B1 sg1>0 x1 B2 sg2>0 x2
        ra0<1 ra1<1 F0 B0 sg0>1 x0 ra2<1 F1 B1 sg1>1 x1 F2 B2 sg2>1 x2"""  # noqa: E501
    )


def test_forward_only_frees_after_the_send() -> None:
    assert draw(lower(forward_only(2, 3), receive_window=1)) == dedent(
        """\
        F0 sa0>1 x0 F1 sa1>1 x1 F2 sa2>1 x2
        ra0<0 ra1<0 F0 x0 ra2<0 F1 x1 F2 x2"""
    )


def test_a_wider_window_posts_one_message_earlier() -> None:
    last = draw(lower(forward_only(2, 4), receive_window=2)).splitlines()[1]
    assert last == "ra0<0 ra1<0 ra2<0 F0 x0 ra3<0 F1 x1 F2 x2 F3 x3"


def test_receives_are_posted_as_far_ahead_as_memory_allows() -> None:
    """GPipe holds all micro-batches anyway; 1F1B's last stage holds one."""
    all_at_once = draw(lower(gpipe(2, 5))).splitlines()[1]
    assert all_at_once.startswith("ra0<0 ra1<0 ra2<0 ra3<0 ra4<0 F0 F1 ")
    few = draw(lower(one_f_one_b(2, 5))).splitlines()[1]
    assert few.startswith("ra0<0 ra1<0 ra2<0 F0 B0 sg0>0 x0 ra3<0 F1 ")


@given(
    schedule=st.builds(one_f_one_b, st.integers(2, 6), st.integers(1, 16))
    | st.builds(gpipe, st.integers(2, 6), st.integers(1, 16))
)
def test_receiving_ahead_takes_two_buffers_above_the_peak(schedule: Schedule) -> None:
    """Per edge: an inner rank has two, for activations and for gradients."""
    report = validate(lower(schedule))
    one_edge = (0, schedule.num_ranks - 1)
    for rank, (held, posted) in enumerate(
        zip(report.peak_in_flight, report.peak_receives, strict=True)
    ):
        assert posted <= (held + 2) * (1 if rank in one_edge else 2)


def test_receives_keep_the_senders_order_where_the_receiver_differs() -> None:
    lowered = lower(parse("F0 F1 F2\nF2 F0 F1"))
    assert draw(lowered).splitlines()[1] == "ra0<0 ra1<0 ra2<0 F2 x2 F0 x0 F1 x1"
    validate(lowered)


def test_stages_on_one_rank_exchange_no_messages() -> None:
    lowered = lower(parse("F0 F0@1 B0@1 B0"))
    assert draw(lowered) == "F0 F0@1 B0@1 x0@1 B0 x0"
    interpret(lowered, training=True)


def test_two_stages_a_rank() -> None:
    compute = parse("F0 F1 F0@2 F1@2 B0@2 B1@2 B0 B1\nF0 F1 F0@3 B0@3 F1@3 B1@3 B0 B1")
    for window in (1, 2, 3):
        lowered = lower(compute, receive_window=window)
        assert validate(lowered).peak_in_flight == (4, 3)
        interpret(lowered, training=True)


@given(schedule=compute_schedules(), window=windows)
def test_every_generated_schedule_is_valid(schedule: Schedule, window: int | None) -> None:
    validate(lower(schedule, receive_window=window), training=schedule.has_backward)


@given(schedule=compute_schedules(max_stages=4, max_micro_batches=6), window=windows)
def test_every_generated_schedule_computes_the_right_thing(
    schedule: Schedule, window: int | None
) -> None:
    interpret(lower(schedule, receive_window=window), training=schedule.has_backward)


@given(schedule=compute_schedules(max_stages=4, max_micro_batches=6))
def test_lowering_twice_is_lowering_once(schedule: Schedule) -> None:
    assert lower(lower(schedule)) == lower(schedule)
    assert lower(schedule).compute_only() == schedule


@given(schedule=compute_schedules(max_stages=4), window=windows)
def test_a_gradient_is_received_once_its_shape_is_known(
    schedule: Schedule, window: int | None
) -> None:
    for row in lower(schedule, receive_window=window).rows:
        for at, instruction in enumerate(row):
            if isinstance(instruction, ReceiveGradient):
                assert Forward(instruction.stage, instruction.micro_batch) in row[:at]


@given(schedule=compute_schedules(max_stages=4))
def test_free_follows_the_last_use(schedule: Schedule) -> None:
    for row in lower(schedule).rows:
        for at, instruction in enumerate(row):
            if isinstance(instruction, Free):
                key = instruction.stage, instruction.micro_batch
                assert (row[at - 1].stage, row[at - 1].micro_batch) == key
                assert all((i.stage, i.micro_batch) != key for i in row[at + 1 :])


def test_a_stuck_schedule_is_lowered_and_left_to_validate() -> None:
    lowered = lower(parse("F0 B0 F1 B1\nF0 F1 B0 B1"))
    assert Backward(0, 0) in lowered.rows[0]
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(lowered)


def test_a_backward_before_its_forward_is_left_to_validate() -> None:
    # The gradient is needed before its shape is known: no place is right, none may fail.
    with pytest.raises(ScheduleError, match="F0@0"):
        validate(lower(parse("B0 F0\nF0 B0")))


def test_window_is_at_least_one() -> None:
    with pytest.raises(ScheduleError, match="receive_window=0 must be 1 or more"):
        lower(forward_only(2, 2), receive_window=0)
