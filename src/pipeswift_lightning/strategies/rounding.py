"""How far two ways to compute one value may differ by rounding alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["rounding_in_use", "rounding_of"]

_KNOWN = {torch.float64: 1e-9, torch.float32: 1e-5}  # of sums, which round often
_TF32 = 2.0**-10
_FLOAT32_PRODUCTS = {"highest": 0.0, "high": _TF32, "medium": 2.0**-7}


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding explains in sums of this type.

    Example:
        >>> rounding_of(torch.float64), rounding_of(torch.bfloat16)
        (1e-09, 0.0078125)
    """
    if not dtype.is_floating_point:
        return _KNOWN[torch.float64]
    return _KNOWN.get(dtype) or torch.finfo(dtype).eps


def rounding_in_use(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], device: torch.device
) -> float:
    """Return the same for what a module computes: by its parameters, autocast, and TF32.

    Args:
        module: The module; its coarsest parameters count.
        context: The precision plugin's context, which may turn autocast on.
        device: Where it computes.
    """
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    coarsest = max(map(rounding_of, types), default=_KNOWN[torch.float64])
    if torch.float32 not in types:
        return coarsest
    with context():
        if torch.is_autocast_enabled(device.type):
            coarsest = max(coarsest, rounding_of(torch.get_autocast_dtype(device.type)))
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
    if device.type == "cuda" and convolves:  # cuDNN's default
        coarsest = max(coarsest, _TF32)
    return max(coarsest, _FLOAT32_PRODUCTS[torch.get_float32_matmul_precision()])
