"""Begin to plan: the costs, the partition and the number of micro-batches, chosen once for all."""

from collections.abc import Callable
from functools import partial

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.partition import Partition, explicit_partition
from pipeswift_lightning.strategies.cost_source import from_rank_zero, read_costs
from pipeswift_lightning.strategies.logged_facts import log_facts
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.planning import StepPlanner
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["plan_one_stage", "start_planning"]


def start_planning(
    planner: StepPlanner,
    costs: Callable[[], CostModel],
    call: StepCall,
    num_layers: int,
    fixed: Partition | None = None,
) -> Partition:
    """Get the costs and choose from them, on the first rank; a collective of all ranks.

    Args:
        planner: Plans from now on.
        costs: Reads or measures them; called on the first rank only.
        call: The first step; the first rank's batch decides.
        num_layers: Layers that a step calls.
        fixed: The partition, if it is chosen already.

    Returns:
        The partition.

    Raises:
        CostError: The costs cannot be read, or are another network's.
        PartitionError: Nothing fits into memory.
    """

    def choose() -> tuple[str, tuple[int, ...], int, str, int]:
        model = costs()
        choice = planner.first(model, call, fixed)
        chosen = choice.chosen
        gain = 1 - chosen.step_s / choice.plain.step_s if choice.plain.step_s else 0.0
        rank_zero_info(
            f"pipeswift: planned from costs: {chosen.name}; layers of each stage "
            f"{[len(r) for r in chosen.partition.ranges]}; a step like the first takes "
            f"{chosen.step_s:.3g} s by prediction, {gain:.0%} less than equal runs of samples."
        )
        number = len(chosen.formation.samples)
        return (
            model.to_json(),
            chosen.partition.starts,
            number,
            chosen.schedule_name,
            call.num_samples,
        )

    text, starts, number, schedule, num_samples = from_rank_zero(choose)
    partition = explicit_partition(num_layers, starts=starts)
    planner.begin(
        CostModel.from_json(text),
        partition,
        number=number,
        num_samples=num_samples,
        schedule=schedule,
    )
    _write_down(planner.module, partition, number)
    return partition


def plan_one_stage(
    planner: StepPlanner, options: PipelineOptions, call: StepCall, num_layers: int
) -> None:
    """Plan the micro-batches of a single stage, if there are to be several and a file of costs.

    What the first batch is does not matter: replicas, which see others, must all take part, and
    later batches may be larger.
    """
    costs, wanted = options.costs, options.micro_batches
    number = len(wanted) if isinstance(wanted, tuple) else wanted or 1
    if costs is not None and costs != "measure" and number > 1:
        start_planning(planner, partial(read_costs, costs, num_layers), call, num_layers)


def _write_down(module: LightningModule, partition: Partition, number: int) -> None:
    """Put what was chosen for the whole run into the loggers' configuration."""
    if not module.trainer.is_global_zero:
        return
    chosen = {
        "pipeswift/partition": [len(layers) for layers in partition.ranges],
        "pipeswift/micro_batches": number,
    }
    log_facts(module.trainer.loggers, chosen)
