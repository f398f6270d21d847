import pytest

from pipeswift_lightning.plan.instructions import ScheduleError
from pipeswift_lightning.plan.schedules import SCHEDULES, build_schedule, one_f_one_b


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_built_by_name(name: str) -> None:
    assert build_schedule(name, 3, 4, order=[3, 2, 1, 0]) == SCHEDULES[name](
        3, 4, order=[3, 2, 1, 0]
    )


def test_warm_up_is_passed_on() -> None:
    assert build_schedule("1f1b", 3, 9, warm_up=2) == one_f_one_b(3, 9, warm_up=[5, 3, 1])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("1F1B", r"did you mean '1f1b'\?"), ("gpip", "'gpipe'"), ("zzz", "choose one")],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ScheduleError, match=rf"Rule: one of gpipe, 1f1b, forward_only.*{hint}"):
        build_schedule(name, 2, 2)


def test_only_1f1b_has_a_warm_up() -> None:
    with pytest.raises(ScheduleError, match=r"warm_up=2 .*a setting of 1f1b\. Remedy: "):
        build_schedule("gpipe", 2, 2, warm_up=2)
