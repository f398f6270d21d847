from hypothesis import given

from pipeswift_lightning.plan.dependencies import consumer, dependency, unit_starts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.notation import parse
from tests.helpers.schedules import compute_schedules


@given(schedule=compute_schedules(max_stages=4, max_micro_batches=4))
def test_consumers_and_dependencies_mirror_each_other(schedule: Schedule) -> None:
    for row in schedule.rows:
        for compute in row:
            user = consumer(compute, schedule.num_stages)
            assert user is None or dependency(user, schedule.num_stages) == compute


def test_unit_starts_stop_where_a_rank_is_stuck() -> None:
    assert unit_starts(parse("F0 B0 F1 B1\nF0 F1 B0 B1")) == ((0,), (1,))
