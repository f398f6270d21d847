"""Which of a stage's gradients are summed with which other ranks'."""

import torch.distributed as dist
from torch import nn

from pipeswift_lightning.runtime.gradients import reduce_gradients
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.ownership import LocalShare

__all__ = ["reduce_stage_gradients"]


def reduce_stage_gradients(
    module: nn.Module, share: LocalShare | None, groups: MeshGroups, *, summed: bool
) -> None:
    """Sum shared parameters' gradients over their stages, and average all over the replicas.

    Args:
        module: The user's module.
        share: What this rank holds of it; ``None`` for all.
        groups: Of the mesh.
        summed: Whether the stages' are summed already.
    """
    replicas = groups.replicas if groups.mesh.num_replicas > 1 else None
    shared: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
    if share is None:
        own = [p for p in module.parameters() if p.requires_grad]
    elif summed:
        own = list(share.local().values())
    else:
        shared = share.shared_groups(groups)
        in_shared = {id(p) for parameters in shared.values() for p in parameters}
        local = share.local() if replicas is not None else {}
        own = [p for p in local.values() if id(p) not in in_shared]
    reduce_gradients(own, shared, replicas)
