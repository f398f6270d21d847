"""Which of the network's layers go to which stage."""

from lightning.pytorch import LightningModule

from pipeswift_lightning.plan.partition import (
    Partition,
    explicit_partition,
    solve_partition,
    uniform_partition,
)
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.ownership import Owners, find_owners
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.layer_costs import layer_costs
from pipeswift_lightning.strategies.network import PipelinedNetwork
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.recorded_plan import RecordedPlan

__all__ = ["check_fits", "choose_partition", "fixed_partition"]


def choose_partition(
    module: LightningModule,
    network: PipelinedNetwork,
    trace: StepTrace,
    fixed: Partition | None,
    num_stages: int,
) -> Partition:
    """Split the layers into stages.

    Args:
        module: The user's module.
        network: Its network.
        trace: How a step's layers hang together.
        fixed: What is chosen already; ``None`` balances estimated costs.
        num_stages: Number of stages.

    Raises:
        CutError: The step calls fewer layers than there are stages.
    """
    if fixed is not None:
        return fixed
    if trace.num_layers < num_stages:
        msg = (
            f"a step calls {trace.num_layers} layers of {network.name}, but {num_stages} stages "
            "are asked for. Rule: each stage has a layer. Remedy: fewer stages, or return other "
            "layers from configure_pipeline()"
        )
        raise CutError(msg)
    return solve_partition(layer_costs(module, network.layers, trace), num_stages)


def fixed_partition(
    options: PipelineOptions, recorded: RecordedPlan | None, num_layers: int, num_stages: int
) -> Partition | None:
    """Return the partition that the user or the checkpoint has chosen, if one has.

    Raises:
        PartitionError: The user's does not fit the network.
    """
    if options.uniform:
        return uniform_partition(num_layers, num_stages)
    layers = options.partition
    if layers is None and recorded is not None:
        layers = recorded.layers_for(num_layers)
    return None if layers is None else explicit_partition(num_layers, layers_per_stage=layers)


def check_fits(
    module: LightningModule,
    network: PipelinedNetwork,
    trace: StepTrace,
    hook: str,
    order: tuple[int, ...],
    owners: Owners,
    partition: Partition,
) -> None:
    """Check that another kind of step can run on the stages that the first one was cut into.

    Args:
        module: The user's module.
        network: Its network.
        trace: How the new kind of step's layers hang together.
        hook: Which step it is.
        order: The first kind's order of layers.
        owners: The owners of parameters that the first kind led to.
        partition: The stages.

    Raises:
        CutError: Layers come in another order, or a parameter is used on another stage.
    """
    if trace.order != order:
        msg = (
            f"{hook} calls the layers of {network.name} in the order {trace.order}, but the stages "
            f"were cut for the order {order}. Rule: all steps call the same layers in the same "
            "order. Remedy: call all of them in every step, and in one order; or stages=1"
        )
        raise CutError(msg)
    found = find_owners(module, network.module, network.layers, trace, partition)
    for name, stages in found.parameters.items():
        missing = set(stages) - set(owners.parameters[name])
        if name in trace.parameter_gaps and missing:
            msg = (
                f"{hook} uses {name} on stage {min(missing)}, but the first step used it on "
                f"stage {owners.parameters[name]} only. Rule: code outside the layers uses a "
                "parameter at the same place in all steps. Remedy: make the module that holds it a "
                "layer, by configure_pipeline()"
            )
            raise CutError(msg)
