"""Plan a single stage: there is nothing to cut, but micro-batches can be formed without padding."""

from functools import partial

import torch

from pipeswift_lightning.plan.partition import explicit_partition
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.cost_source import read_costs
from pipeswift_lightning.strategies.measuring import Between, CostSource
from pipeswift_lightning.strategies.options import MEASURE, PipelineOptions
from pipeswift_lightning.strategies.planning import StepPlanner
from pipeswift_lightning.strategies.start_planning import begin, choose, start_planning
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["measure_one_stage", "plan_one_stage"]


def plan_one_stage(
    planner: StepPlanner, options: PipelineOptions, call: StepCall, num_layers: int
) -> None:
    """Plan the micro-batches of a single stage, if there are to be several, from a file of costs.

    What the first batch is does not matter: replicas, which see others, must all take part, and
    later batches may be larger.
    """
    costs, wanted = options.costs, options.micro_batches
    number = len(wanted) if isinstance(wanted, tuple) else wanted or 1
    if costs is not None and costs != MEASURE and number > 1:
        start_planning(planner, partial(read_costs, costs, num_layers), call, num_layers)


def measure_one_stage(
    planner: StepPlanner,
    source: CostSource,
    trace: StepTrace,
    call: StepCall,
    device: torch.device,
) -> None:
    """Measure the costs of a single stage, if they are to be, and plan its micro-batches.

    Each replica does so for itself: another may not have seen a batch of several micro-batches yet.

    Args:
        planner: Plans from now on.
        source: The costs.
        trace: The order of the layers.
        call: A step of several micro-batches.
        device: Where layers run.
    """
    if planner.active or not source.measures:
        return
    whole = explicit_partition(trace.num_layers, starts=[0])
    model = source.measured(trace, call, device, Between())
    begin(planner, choose(planner, model, call, whole), trace.num_layers)
