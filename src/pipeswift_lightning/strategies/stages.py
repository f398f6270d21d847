"""Which of the network's layers go to which stage."""

from collections.abc import Sequence
from itertools import pairwise

from lightning.pytorch import LightningModule

from pipeswift_lightning.plan.partition import Partition, explicit_partition, solve_partition
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.layer_costs import layer_costs
from pipeswift_lightning.strategies.network import PipelinedNetwork

__all__ = ["choose_partition"]


def choose_partition(
    module: LightningModule,
    network: PipelinedNetwork,
    trace: StepTrace,
    layers_per_stage: Sequence[int] | None,
    num_stages: int,
) -> Partition:
    """Split the layers; layers that no cut may part stay together.

    Args:
        module: The user's module.
        network: Its network.
        trace: How a step's layers hang together.
        layers_per_stage: What the user asked for; ``None`` balances estimated costs.
        num_stages: Number of stages.

    Raises:
        CutError: No stage could feed one of the cuts.
    """
    if layers_per_stage is not None:
        partition = explicit_partition(trace.num_layers, layers_per_stage=layers_per_stage)
        for start in partition.starts[1:]:
            if start in trace.unnameable:
                msg = (
                    f"partition={list(layers_per_stage)} cuts before layer {start}, but "
                    f"{trace.unnameable[start]}. Remedy: move the cut, or return coarser "
                    "layers from configure_pipeline()"
                )
                raise CutError(msg)
        return partition
    costs = layer_costs(module, network.layers, trace)
    starts = [i for i in range(trace.num_layers) if i == 0 or i not in trace.unnameable]
    bounds = [*starts, trace.num_layers]
    if len(starts) < num_stages:
        reasons = "; ".join(dict.fromkeys(trace.unnameable.values())) or "it has no more layers"
        msg = (
            f"{network.name} can be cut into {len(starts)} stages at most, but "
            f"{num_stages} are asked for: {reasons}. Remedy: fewer stages, or return "
            "other layers from configure_pipeline()"
        )
        raise CutError(msg)
    units = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    solved = solve_partition(units, num_stages)
    return Partition(tuple(starts[i] for i in solved.starts), trace.num_layers)
