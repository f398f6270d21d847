"""Which layers of a network are alike, so that what one returns has the form of what all return."""

from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["form_of"]

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
_INNER = frozenset(vars(nn.Module()))  # parameters, buffers, modules, hooks
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def form_of(layer: nn.Module, forward: Callable[..., Any]) -> Hashable:
    """Return what a layer consists of, but for the values of its parameters and buffers.

    Layers of equal form return tensors of equal shapes for arguments of equal shapes. What cannot
    be looked into is equal to itself alone.

    Args:
        layer: The layer.
        forward: What its call runs.

    Example:
        >>> one, other, third = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 4)
        >>> form_of(one, one.forward) == form_of(other, other.forward)
        True
        >>> form_of(one, one.forward) == form_of(third, third.forward)
        False
    """
    own = getattr(forward, "__func__", None) is type(layer).forward
    state = {name: value for name, value in vars(layer).items() if name != "forward"}
    return _form(layer, state), None if own else id(forward)


def _form(module: nn.Module, state: Mapping[str, Any]) -> Hashable:
    if any(state[hooks] for hooks in _HOOKS):
        return id(module)
    tensors = {**module._parameters, **module._buffers}
    return (
        type(module),
        tuple((name, _shape(tensor)) for name, tensor in tensors.items()),
        tuple((n, child and _form(child, vars(child))) for n, child in module._modules.items()),
        tuple((name, _value(value)) for name, value in state.items() if name not in _INNER),
    )


def _shape(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_value, value))
    if type(value) is dict:
        return dict, tuple((_value(key), _value(part)) for key, part in value.items())
    return id(value)
