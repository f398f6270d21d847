"""Gather the shares of all stages into one ordinary Lightning checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.ownership import LocalShare, ParameterTable
from pipeswift_lightning.strategies.optimizers import unwrapped

__all__ = ["gather_module_state", "gather_optimizer_state"]


def gather_module_state(
    module: LightningModule, share: LocalShare | None, groups: MeshGroups
) -> dict[str, Any]:
    """Return the whole module's ``state_dict`` on rank 0; collective over the first pipeline.

    Other ranks get what they hold themselves, which nobody saves.
    """
    state = dict(module.state_dict())
    if share is None:
        return state
    mine = {name: value for name, value in state.items() if not _is_meta(value)}
    if groups.coordinate.replica != 0:
        return mine
    owned = {name: _to_cpu(v) for name, v in mine.items() if _saves(share, name, groups)}
    shares = _gather(owned, groups)
    if groups.rank != 0:
        return mine
    whole = {name: value for part in shares for name, value in part.items()}
    return {name: whole.get(name, value) for name, value in state.items()}


def _saves(share: LocalShare, name: str, groups: MeshGroups) -> bool:
    """Whether this stage contributes ``name``: the first owner does."""
    canonical = {a: c for c, aliases in share.table.aliases.items() for a in aliases}
    stage = groups.coordinate.stage
    if name in canonical:
        return share.owners.parameters[canonical[name]][0] == stage
    # Buffers by their owner; extra state (torchmetrics, ``get_extra_state``) from the last stage,
    # where the user's step runs to its end.
    return share.owners.buffers.get(name, groups.mesh.num_stages - 1) == stage


def gather_optimizer_state(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    module: LightningModule,
    groups: MeshGroups,
) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` over all stages, in the order of the user's groups.

    Collective over the first pipeline; on other ranks than 0 the state is empty.
    """
    inner = unwrapped(optimizer)
    table = ParameterTable.of(module)
    param_groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": list(group_names)}
        for group, group_names in zip(inner.param_groups, names, strict=True)
    ]
    order = {name: i for i, name in enumerate(n for group in names for n in group)}
    for group in param_groups:
        group["params"] = [order[name] for name in group["params"]]
    if groups.coordinate.replica != 0:
        return {"state": {}, "param_groups": param_groups}
    mine = {
        table.names[id(parameter)]: tree_map_only(Tensor, _to_cpu, dict(state))
        for parameter, state in inner.state.items()
        if id(parameter) in table.names
    }
    state: dict[int, Mapping[str, Any]] = {}
    for part in _gather(mine, groups):
        state.update({order[name]: value for name, value in part.items()})
    return {"state": dict(sorted(state.items())), "param_groups": param_groups}


def _gather(value: dict[str, Any], groups: MeshGroups) -> list[dict[str, Any]]:
    size = groups.mesh.num_stages
    if size == 1:
        return [value]
    target: list[Any] | None = [None] * size if groups.rank == 0 else None
    dist.gather_object(value, target, dst=0, group=groups.pipeline)
    return target or []


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
