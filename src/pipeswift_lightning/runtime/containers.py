"""What a layer does to the lists, dicts and dataclasses that it is given."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["Containers"]

_PLAIN = (bool, int, float, complex, str, bytes)


class Containers:
    """The containers in a value, and what they hold now.

    Args:
        value: Anything; what is no container is not looked into.

    Example:
        >>> given = {"calls": 1, "memo": None}
        >>> before = Containers([given])
        >>> given["memo"] = "kept for oneself"
        >>> before.changed()
        False
        >>> given["calls"] += 1
        >>> before.changed(), before.changed(but_for=(given,))
        (True, False)
    """

    def __init__(self, value: Any) -> None:
        self._held = {id(found): (found, _parts(found)) for found in _containers(value, set())}

    def changed(self, *, but_for: Any = None) -> bool:
        """Whether one holds another tensor or number than before.

        What was None may have been set: such memos are made anew on each stage.

        Args:
            but_for: Containers in this value may have changed, since they are handed on.
        """
        handed_on = {id(found) for found in _containers(but_for, set())}
        return any(
            _differ(before, _parts(found))
            for key, (found, before) in self._held.items()
            if key not in handed_on
        )


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    parts = _parts(value)
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for part in parts.values():
        yield from _containers(part, seen)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _differ(before: dict[Any, Any] | None, after: dict[Any, Any] | None) -> bool:
    assert before is not None
    assert after is not None
    return any(
        key in after and _is_other(old, after[key])
        for key, old in before.items()
        if isinstance(old, (Tensor, *_PLAIN))
    )


def _is_other(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or type(old) is not type(new):
        return old is not new
    return bool(old != new)
