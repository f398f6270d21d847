"""A batch's plan follows from the batch, the costs and what a checkpoint keeps."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipeswift_lightning.plan.partition import explicit_partition
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.planning import StepPlanner
from pipeswift_lightning.strategies.step import StepCall
from tests.helpers.networks import Padded, pad
from tests.helpers.planned import LAYERS, costs


def call(lengths: Sequence[int]) -> StepCall:
    batch = pad([torch.ones(n, dtype=torch.long) for n in lengths])
    return StepCall(
        hook="training_step",
        batch=batch,
        source=batch,
        micro_batches=[batch],
        rest=(0,),
        sizes=(len(lengths),),
        seed=(),
        loss_divisor=1,
        context=nullcontext,
    )


def planner(state: dict[str, Any] | None = None) -> StepPlanner:
    made = StepPlanner(Padded(), PipelineOptions.of(), 2)
    if state is not None:
        made.load_state(state)
    partition = explicit_partition(LAYERS, starts=[0, LAYERS // 2])
    made.begin(costs(), partition, number=2, num_samples=4, schedule="1f1b")
    return made


def test_a_resumed_run_plans_as_one_that_was_not_stopped() -> None:
    few, many = call([3, 5, 2, 8]), call([3, 5, 2, 8] * 6)
    first = planner()
    early = first.planned(few)
    assert len(early.sizes) == 2
    assert len(first.planned(many).sizes) > 2
    later = first.planned(few)  # with as many micro-batches as there are from now on
    resumed = planner(first.state()).planned(few)
    assert (later.samples, later.choice) == (resumed.samples, resumed.choice)


def test_planning_ahead_changes_no_plan() -> None:
    few, many = call([3, 5, 2, 8]), call([3, 5, 2, 8] * 6)
    plain, ahead = planner(), planner()
    ahead.plan_ahead(few)  # and the other rank comes to it too late
    for each in (plain, ahead):
        each.planned(many)
    assert plain.planned(few).samples == ahead.planned(few).samples


def test_the_state_of_an_earlier_format_is_left() -> None:
    old = {"trims": False, "checks": 3, "padding": {}, "looked": [], "number": 2, "largest": 4}
    assert planner(old).planned(call([3, 5, 2, 8])).samples
