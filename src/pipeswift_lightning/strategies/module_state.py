"""Undo what a step that is only looked at does to its module."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating", "unchanged"]

_COPIED = (list, dict, OrderedDict, defaultdict, Counter, set, deque)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Give the module's own attributes their values back after a block.

    Numbers, strings and what else is assigned anew comes back as it was; lists, dicts, sets and
    deques, and those within lists and dicts, get their items back. What else they hold is not
    copied.

    Example:
        >>> module = nn.Module()
        >>> module.count, module.seen = 0, {"val": []}
        >>> with unchanged(module):
        ...     module.count += 1
        ...     module.seen["val"].append(1)
        >>> module.count, module.seen
        (0, {'val': []})
    """
    before = dict(vars(module))
    items = list(_containers(list(before.values()), set()))
    try:
        yield
    finally:
        attributes = vars(module)
        for name in [name for name in attributes if name not in before]:
            del attributes[name]
        attributes.update(before)
        for container, saved in items:
            _restore(container, saved)


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


def _containers(values: Iterable[Any], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Find all containers among values, and within them, with copies of their items."""
    for value in values:
        if type(value) in _COPIED and id(value) not in seen:
            seen.add(id(value))
            yield value, value.copy()
            held = value.values() if isinstance(value, dict) else value
            yield from _containers(held, seen)


def _restore(value: Any, saved: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(saved)
    else:
        value.update(saved)
