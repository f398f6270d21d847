"""Choose what is pipelined, and whether every rank runs whole steps."""

from lightning.pytorch import LightningModule

from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.strategies.contract import check_layers, pipelined
from pipeswift_lightning.strategies.network import PipelinedNetwork, find_network, find_networks
from pipeswift_lightning.strategies.options import LossScope, PipelineOptions

__all__ = ["choose_networks"]


def choose_networks(
    module: LightningModule, options: PipelineOptions, mesh: Mesh
) -> tuple[list[PipelinedNetwork], str | None]:
    """Return what is pipelined, and why every rank runs whole steps, if that is known already.

    Raises:
        ContractError: No network can be divided among the stages.
        NetworkError: No network, or no layers, could be found.
    """
    names, why = options.network, None
    if options.loss is LossScope.TRANSPARENT:
        why = 'loss="transparent"'
    elif not module.automatic_optimization:
        why = f"{type(module).__name__} sets automatic_optimization=False"
    elif names is not None and len(names) > 1:
        why = f"network={list(names)} names several"
    if why is not None:
        return pipelined(find_networks(module, names), mesh), why
    network = find_network(module, names[0] if names else None)
    check_layers(network, mesh)
    return [network], None
