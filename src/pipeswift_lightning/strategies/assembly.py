"""Divide the layers of a network among the stages."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from pipeswift_lightning.plan.partition import Partition, explicit_partition, solve_partition
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.ownership import Owners
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.layer_costs import layer_costs
from pipeswift_lightning.strategies.network import PipelinedNetwork

__all__ = ["check_owners", "choose_partition"]


def choose_partition(
    module: nn.Module,
    network: PipelinedNetwork,
    trace: StepTrace,
    num_stages: int,
    layers_per_stage: Sequence[int] | None,
) -> Partition:
    """Split the layers; layers that no cut may part stay together.

    Args:
        module: The whole module, for the costs of what lies between the layers.
        network: The network.
        trace: What its step was seen to do.
        num_stages: Number of stages.
        layers_per_stage: What the user chose; ``None`` balances estimated costs.

    Raises:
        CutError: There are too few places to cut, or the user's choice cuts at a wrong one.
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


def check_owners(hook: str, trace: StepTrace, now: Owners, first: Owners) -> None:
    """Check that a new kind of step uses parameters where the first one did.

    Args:
        hook: The step's name.
        trace: What it was seen to do.
        now: The owners that it would have.
        first: The owners as they are.

    Raises:
        CutError: It uses a parameter on a stage that does not have it.
    """
    for name, stages in now.parameters.items():
        missing = set(stages) - set(first.parameters[name])
        if name in trace.parameter_gaps and missing:
            msg = (
                f"{hook} uses {name} on stage {min(missing)}, but the first step used it on "
                f"stage {first.parameters[name]} only. Rule: code outside the "
                "layers uses a parameter at the same place in all steps. Remedy: make the "
                "module that holds it a layer, by configure_pipeline()"
            )
            raise CutError(msg)
