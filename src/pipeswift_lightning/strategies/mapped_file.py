"""Read a checkpoint in one file by mapping it: a rank touches the pages of its own tensors alone.

The tensors are views of the file until they are copied. What a Trainer keeps for longer than
restoring takes is copied here, since the file may be replaced while training goes on.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["can_map", "owned", "owned_extras", "read_mapped"]

_LARGE = ("state_dict", "optimizer_states")


def can_map(plugin: CheckpointIO, path: str | Path) -> bool:
    """Whether ``path`` is a local file of torch's format, and no plugin of the user's reads it."""
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    return type(inner) is TorchCheckpointIO and Path(path).is_file() and zipfile.is_zipfile(path)


def read_mapped(path: str | Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint whose parameters and optimizer states are views of the file.

    Args:
        path: A local file, that `can_map` allows.
        weights_only: As for `torch.load`.
    """
    loaded: dict[str, Any] = torch.load(
        path, map_location="cpu", weights_only=weights_only, mmap=True
    )
    return {key: value if key in _LARGE else owned(value) for key, value in loaded.items()}


def owned(value: Any) -> Any:
    """Return ``value`` with copies of its tensors, which the file no longer backs."""
    return tree_map_only(Tensor, _copied, value)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy that is a leaf, as what was loaded is: only leaves can be copied deeply."""
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def owned_extras(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what a module may keep of its state; into parameters and buffers it is copied anyway."""
    copied = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: value if name in copied else owned(value) for name, value in state.items()}
