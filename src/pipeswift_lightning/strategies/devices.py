"""Place a module whose parameters do not all belong on this rank's device."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from torchmetrics import Metric

__all__ = ["move_buffers"]


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
