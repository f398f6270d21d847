"""How much state an optimizer keeps."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["optimizer_factor"]

_log = logging.getLogger(__name__)
_USUAL = 2.0  # Adam's two moments
_SIDE = 64  # of the matrix to try it on: beside it a counter of steps is nothing


def optimizer_factor(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of an optimizer's state for each byte of a trained parameter.

    If it has state already that is counted; otherwise another one of its kind makes a step on a
    small matrix. One that cannot be made from its own defaults counts as Adam, with a warning.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 2))
        >>> [round(optimizer_factor(make([weight])), 1)
        ...  for make in (torch.optim.AdamW, torch.optim.SGD)]
        [2.0, 0.0]
    """
    if optimizer.state:
        return _ratio(optimizer, optimizer.state)
    first = next(p for group in optimizer.param_groups for p in group["params"])
    probe = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=first.dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        trial = type(optimizer)([probe], **optimizer.defaults)
        trial.step()
    except (TypeError, ValueError, RuntimeError) as error:
        _log.warning("the state of %s is taken for Adam's: %s", type(optimizer).__name__, error)
        return _USUAL
    return _ratio(trial, [probe])


def _ratio(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> float:
    held = total = 0
    for parameter in parameters:
        total += parameter.numel() * parameter.element_size()
        values = optimizer.state[parameter].values()
        held += sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))
    return held / total if total else 0.0
