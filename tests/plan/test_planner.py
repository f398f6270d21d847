import pytest

from pipeswift_lightning.plan.instructions import ScheduleError
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan, PlanError, make_plan
from pipeswift_lightning.plan.schedules import forward_only, gpipe, one_f_one_b

TWO = Partition((0, 3), 5)
FOUR = MicroBatches((2, 2, 2, 1))


def test_training_plan() -> None:
    plan = make_plan(partition=TWO, micro_batches=FOUR, warm_up=[3, 1], order=[3, 2, 1, 0])
    assert plan.schedule == lower(one_f_one_b(2, 4, warm_up=[3, 1], order=[3, 2, 1, 0]))
    assert plan.schedule_name == "1f1b"


def test_without_training_only_the_order_counts() -> None:
    plan = make_plan(
        partition=TWO, micro_batches=FOUR, warm_up=2, order=[1, 0, 3, 2], training=False
    )
    assert plan.schedule == lower(forward_only(2, 4, order=[1, 0, 3, 2]))
    assert plan.schedule_name == "forward_only"


def test_a_plan_is_made_once() -> None:
    first = make_plan(partition=TWO, micro_batches=FOUR, order=[3, 2, 1, 0])
    assert make_plan(partition=TWO, micro_batches=FOUR, order=(3, 2, 1, 0)) is first
    other_sizes = make_plan(partition=TWO, micro_batches=MicroBatches((1,) * 4), order=[3, 2, 1, 0])
    assert other_sizes.schedule is first.schedule


def test_digest_tells_plans_apart() -> None:
    plans = [
        make_plan(partition=TWO, micro_batches=FOUR),
        make_plan(partition=Partition((0, 2), 5), micro_batches=FOUR),
        make_plan(partition=Partition((0, 3), 6), micro_batches=FOUR),
        make_plan(partition=TWO, micro_batches=MicroBatches((2, 2, 1, 2))),
        make_plan(partition=TWO, micro_batches=FOUR, schedule_name="gpipe"),
        make_plan(partition=TWO, micro_batches=FOUR, receive_window=1),
        make_plan(partition=TWO, micro_batches=FOUR, order=[1, 0, 2, 3]),
        make_plan(partition=TWO, micro_batches=FOUR, training=False),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match="did you mean '1f1b'"):
        make_plan(partition=TWO, micro_batches=FOUR, schedule_name="1F1B")


def test_parts_that_do_not_belong_together() -> None:
    with pytest.raises(
        PlanError, match=r"the schedule has 2 stages and 3 micro-batches, .* 2 and 4"
    ):
        Plan(partition=TWO, micro_batches=FOUR, schedule=lower(gpipe(2, 3)), schedule_name="gpipe")
    with pytest.raises(PlanError, match="'gpipe' has no communication"):
        Plan(partition=TWO, micro_batches=FOUR, schedule=gpipe(2, 4), schedule_name="gpipe")
