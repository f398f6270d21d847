"""Walk nested arguments: as pytrees do, at a tenth of the time.

A stage walks the arguments and outputs of every layer of every micro-batch. Nearly all are tuples,
lists and dicts of tensors and plain values, so these are told apart here. Whatever else is met
(a dataclass, an ordered dict, a model's output) is left to ``torch.utils._pytree``, leaf for leaf
in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["leaves_of", "mapped", "refilled"]

_PLAIN = {type(None), bool, int, float, str, slice, type(...)}
_LEAVES = frozenset({Tensor, nn.Parameter, torch.dtype, torch.device, *_PLAIN})


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of ``value``, in the order of ``tree_flatten``.

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
        for part in value.values() if kind is dict else value:
            if type(part) in _LEAVES:  # without a call: nearly all are
                leaves.append(part)
            else:
                _collect(part, leaves)
    else:
        leaves.extend(tree_flatten(value)[0])


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
    mine, spec = tree_flatten(value)
    return tree_unflatten(list(islice(leaves, len(mine))), spec)


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
    return tree_map(change, value)
