"""Walk nested arguments: as pytrees do, at a tenth of the time.

A stage walks the arguments and outputs of every layer of every micro-batch. Nearly all are tuples,
lists and dicts of tensors and plain values, so these are told apart here. Dataclasses that hold
tensors, which some users' layers hand on, are walked by their fields; others are leaves. Whatever
else is met (an ordered dict, a model's output) is left to ``torch.utils._pytree``, leaf for leaf
in the same order.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_map, tree_unflatten

__all__ = ["leaves_of", "mapped", "parts_of", "refilled"]

_PLAIN = {type(None), bool, int, float, str, slice, type(...)}
_LEAVES = frozenset({Tensor, nn.Parameter, torch.dtype, torch.device, *_PLAIN})


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of ``value``, in the order of ``tree_flatten`` (and of fields).

    Example:
        >>> leaves_of(((1, [2]), {"a": 3, "b": None}))
        [1, 2, 3, None]
    """
    leaves: list[Any] = []
    _collect(value, leaves)
    return leaves


def _collect(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
    elif kind is tuple or kind is list or kind is dict:
        _collect_parts(value.values() if kind is dict else value, leaves)
    elif (fields := _fields(value)) is not None:
        _collect_parts([getattr(value, name) for name in fields], leaves)
    else:
        for leaf in tree_flatten(value)[0]:
            if _fields(leaf) is None:
                leaves.append(leaf)
            else:
                _collect(leaf, leaves)


def _collect_parts(parts: Iterable[Any], leaves: list[Any]) -> None:
    for part in parts:
        if type(part) in _LEAVES:  # without a call: nearly all are
            leaves.append(part)
        else:
            _collect(part, leaves)


def _fields(value: Any) -> list[str] | None:
    """Return the names of a dataclass's fields; ``None`` if it is a leaf, or pytrees know it."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    if type(value) in SUPPORTED_NODES or not _holds_tensor(value, set()):
        return None
    return list(parts_of(value) or ())


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what a mapping, a sequence or a dataclass holds, by key; None for anything else.

    Example:
        >>> parts_of(["a", "b"]), parts_of("ab")
        ({0: 'a', 1: 'b'}, None)
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor in a value, which may hold itself."""
    if isinstance(value, Tensor):
        return True
    parts = parts_of(value)
    if parts is None or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds_tensor(part, seen) for part in parts.values())


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    """Return a copy with other values; its initialiser, which may do more, is not called."""
    found = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(found, name, field)  # it may be frozen
    return found


def refilled(value: Any, leaves: Sequence[Any]) -> Any:
    """Return ``value`` with other leaves, as many as it has.

    Example:
        >>> refilled(((1, [2]), {"a": 3}), "xyz")
        (('x', ['y']), {'a': 'z'})
    """
    return _refill(value, iter(leaves))


def _refill(value: Any, leaves: Iterator[Any]) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return next(leaves)
    if kind is tuple or kind is list:
        filled = [next(leaves) if type(x) in _LEAVES else _refill(x, leaves) for x in value]
        return tuple(filled) if kind is tuple else filled
    if kind is dict:
        return {key: _refill(part, leaves) for key, part in value.items()}
    if (fields := _fields(value)) is not None:
        return _with_fields(value, {n: _refill(getattr(value, n), leaves) for n in fields})
    mine, spec = tree_flatten(value)
    return tree_unflatten(
        [next(leaves) if _fields(leaf) is None else _refill(leaf, leaves) for leaf in mine], spec
    )


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to each leaf.

    Example:
        >>> mapped(lambda leaf: leaf + 1, (1, {"a": [2.5]}))
        (2, {'a': [3.5]})
    """
    kind = type(value)
    if kind in _LEAVES:
        return change(value)
    if kind is tuple:
        return tuple([mapped(change, part) for part in value])
    if kind is list:
        return [mapped(change, part) for part in value]
    if kind is dict:
        return {key: mapped(change, part) for key, part in value.items()}
    if (fields := _fields(value)) is not None:
        return _with_fields(value, {n: mapped(change, getattr(value, n)) for n in fields})
    return tree_map(lambda x: change(x) if _fields(x) is None else mapped(change, x), value)
