import pytest

from pipeswift_lightning.plan.costs import CostError
from pipeswift_lightning.plan.mock import sample_lengths, transformer_costs
from pipeswift_lightning.plan.report import (
    choice_timelines,
    describe_choice,
    draw_together,
    equal_costs,
    schedule_timelines,
)
from pipeswift_lightning.plan.search import choose_plan
from pipeswift_lightning.plan.workload import Workload


@pytest.fixture(scope="module")
def planned():
    model = transformer_costs(6, dim=64, vocabulary=500, flops_per_s=1e9, relative_error=0.02)
    lengths = sample_lengths(12, median=100, spread=0.9, longest=800)
    workload = Workload(model=model, lengths=lengths, num_stages=2)
    return choose_plan(workload, num_micro_batches=[4, 6]), workload


def test_the_plan_its_prediction_and_what_was_rejected(planned) -> None:
    choice, workload = planned
    text = describe_choice(choice, workload, most_rejected=3)
    assert text.startswith(f"plan: {choice.chosen.name}\npredicted step ")
    starts = choice.chosen.partition.starts
    assert f"layers of each stage: 0-{starts[1] - 1} {starts[1]}-7" in text
    assert "micro-batches  best predicted step\n            4" in text
    assert f"{choice.rejected[0].name}: {choice.rejected[0].reason}" in text
    assert f"and {len(choice.rejected) - 3} more" in text
    assert choice.chosen.summary()["predicted_step_s"] == choice.chosen.step_s


def test_the_plan_is_drawn_beside_what_runs_without_costs(planned) -> None:
    choice, workload = planned
    timelines = choice_timelines(choice, workload)
    assert [*timelines] == [
        f"first come, first served: {choice.plain.name}",
        f"plan: {choice.chosen.name}",
    ]
    plain, plan = timelines.values()
    assert plan.makespan_s < plain.makespan_s
    rows = [row for row in draw_together(timelines, width=50).split("\n") if row[:4] == "rank"]
    widths = [row.index("| bubble") - row.index("|") - 1 for row in rows]
    share = plan.makespan_s / plain.makespan_s
    assert widths == [50, 50, round(50 * share), round(50 * share)]


def test_schedules_side_by_side() -> None:
    schedules = [{"name": "gpipe"}, {"name": "1f1b", "warm_up": [3, 1]}]
    timelines = schedule_timelines(equal_costs(2, 4), schedules, order="hill")
    assert [*timelines] == ["gpipe", "1f1b, warm-up [3, 1]"]
    assert timelines["gpipe"].makespan_s == 15.0


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(CostError, match=r"median=0, .* make no lengths\. Rule"):
        sample_lengths(3, median=0, spread=1.0, longest=5)
