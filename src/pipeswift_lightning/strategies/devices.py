"""Place a module whose parameters do not all belong on this rank's device, alike on all ranks."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from pipeswift_lightning.runtime.gradients import broadcast_tensors
from pipeswift_lightning.strategies.collectives import Collectives

__all__ = ["move_buffers", "start_alike"]


def move_buffers(module: LightningModule, device: torch.device) -> None:
    """Move buffers and metrics to ``device``, and make ``module.device`` say so.

    The parameters follow once it is known which of them belong to this rank's stage: all of them
    together need not fit the device.
    """
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
    _update_properties(module, device=device)


def start_alike(module: nn.Module, collectives: Collectives, device: torch.device) -> None:
    """Start all ranks from rank 0's values, whether or not the user seeded everything."""
    tensors = [t.data for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    collectives.guarded(
        "waiting for rank 0's initial parameters",
        lambda: broadcast_tensors(tensors, 0, None, device),
    )
