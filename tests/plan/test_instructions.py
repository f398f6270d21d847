import pytest

from pipeswift_lightning.plan.instructions import (
    Backward,
    Forward,
    Free,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
)
from pipeswift_lightning.plan.notation import parse


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Forward(2, 0), "F0@2"),
        (Backward(2, 0), "B0@2"),
        (SendActivation(2, 0, 3), "sa0@2>3"),
        (ReceiveActivation(2, 0, 1), "ra0@2<1"),
        (SendGradient(2, 0, 1), "sg0@2>1"),
        (ReceiveGradient(2, 0, 3), "rg0@2<3"),
        (Free(2, 0), "x0@2"),
    ],
)
def test_text_of_an_instruction(instruction, text) -> None:
    assert str(instruction) == text


@pytest.mark.parametrize("kind", [SendActivation, ReceiveActivation, SendGradient, ReceiveGradient])
def test_numbers_start_at_zero(kind) -> None:
    with pytest.raises(ScheduleError, match="peer=-1 must be 0 or more"):
        kind(0, 0, -1)
    with pytest.raises(ScheduleError, match="micro_batch=-2 must be 0 or more"):
        Free(0, -2)


def test_what_the_rows_say() -> None:
    schedule = parse("F0@1 F1@1 x0@1\nF0@0 F1@0")
    assert schedule.stage_ranks == (1, 0)
    assert schedule.num_ranks == schedule.num_stages == schedule.num_micro_batches == 2
    assert schedule.is_lowered
    assert not schedule.has_backward
    assert schedule.compute_only() == parse("F0@1 F1@1\nF0@0 F1@0")


def test_a_stage_lies_on_one_rank() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on ranks 0 and 1"):
        Schedule(((Forward(0, 0),), (Forward(0, 1),)), num_stages=1)


@pytest.mark.parametrize(("rows", "num_stages"), [((), 0), (((Forward(1, 0),),), 2), (((),), 1)])
def test_every_stage_has_a_row(rows, num_stages) -> None:
    with pytest.raises(ScheduleError, match=f"num_stages={num_stages} asks for each"):
        Schedule(rows, num_stages)
