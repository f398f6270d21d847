"""Begin to plan: the costs, the partition and the number of micro-batches, chosen once for all."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.partition import Partition, explicit_partition
from pipeswift_lightning.strategies.cost_source import from_rank_zero
from pipeswift_lightning.strategies.logged_facts import log_facts
from pipeswift_lightning.strategies.planning import StepPlanner
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["begin", "choose", "start_planning"]


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
    start = from_rank_zero(lambda: choose(planner, costs(), call, fixed))
    return begin(planner, start, num_layers)


@dataclass(frozen=True, slots=True)
class Start:
    """What is chosen once for all; the costs as text, which can be sent."""

    costs: str
    starts: tuple[int, ...]
    number: int
    schedule: str
    num_samples: int


def choose(
    planner: StepPlanner, model: CostModel, call: StepCall, fixed: Partition | None
) -> Start:
    """Choose for a run by its first step.

    Args:
        planner: Knows the batch.
        model: The costs.
        call: The step.
        fixed: The partition, if it is chosen already.
    """
    choice = planner.first(model, call, fixed)
    chosen = choice.chosen
    gain = 1 - chosen.step_s / choice.plain.step_s if choice.plain.step_s else 0.0
    rank_zero_info(
        f"pipeswift: planned from costs: {chosen.name}; layers of each stage "
        f"{[len(r) for r in chosen.partition.ranges]}; a step like the first takes "
        f"{chosen.step_s:.3g} s by prediction, {gain:.0%} less than equal runs of samples."
    )
    number = len(chosen.formation.samples)
    starts, schedule = chosen.partition.starts, chosen.schedule_name
    return Start(model.to_json(), starts, number, schedule, call.num_samples)


def begin(planner: StepPlanner, start: Start, num_layers: int) -> Partition:
    """Plan from now on with what was chosen; returns the partition."""
    partition = explicit_partition(num_layers, starts=start.starts)
    planner.begin(
        CostModel.from_json(start.costs),
        partition,
        number=start.number,
        num_samples=start.num_samples,
        schedule=start.schedule,
    )
    _write_down(planner.module, partition, start.number)
    return partition


def _write_down(module: LightningModule, partition: Partition, number: int) -> None:
    """Put what was chosen for the whole run into the loggers' configuration."""
    if not module.trainer.is_global_zero:
        return
    chosen = {
        "pipeswift/partition": [len(layers) for layers in partition.ranges],
        "pipeswift/micro_batches": number,
    }
    log_facts(module.trainer.loggers, chosen)
