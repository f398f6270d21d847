"""Undo what a step that is only looked at does to its module."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating", "unchanged"]

_COPIED = (list, dict, set, deque)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Give the module's own attributes their values back after a block.

    Numbers, strings and what else is assigned anew comes back as it was; lists, dicts, sets and
    deques get their items back. What these hold is not copied.

    Example:
        >>> module = nn.Module()
        >>> module.count, module.seen = 0, []
        >>> with unchanged(module):
        ...     module.count += 1
        ...     module.seen.append(1)
        >>> module.count, module.seen
        (0, [])
    """
    before = dict(vars(module))
    items = {name: _copy(value) for name, value in before.items() if type(value) in _COPIED}
    try:
        yield
    finally:
        attributes = vars(module)
        for name in [name for name in attributes if name not in before]:
            del attributes[name]
        attributes.update(before)
        for name, saved in items.items():
            _restore(before[name], saved)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a block, and each part back into its own."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _copy(value: Any) -> Any:
    return value.copy()


def _restore(value: Any, saved: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(saved)
    else:
        value.update(saved)
