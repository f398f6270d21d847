"""Which of the network's layers go to which stage."""

from collections.abc import Sequence

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
    """Split the layers into stages.

    Args:
        module: The user's module.
        network: Its network.
        trace: How a step's layers hang together.
        layers_per_stage: What the user asked for; ``None`` balances estimated costs.
        num_stages: Number of stages.

    Raises:
        CutError: The step calls fewer layers than there are stages.
    """
    if layers_per_stage is not None:
        return explicit_partition(trace.num_layers, layers_per_stage=layers_per_stage)
    if trace.num_layers < num_stages:
        msg = (
            f"a step calls {trace.num_layers} layers of {network.name}, but {num_stages} stages "
            "are asked for. Rule: each stage has a layer. Remedy: fewer stages, or return other "
            "layers from configure_pipeline()"
        )
        raise CutError(msg)
    return solve_partition(layer_costs(module, network.layers, trace), num_stages)
