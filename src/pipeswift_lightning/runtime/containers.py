"""What a layer does to the lists, dicts and dataclasses that it is given."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pipeswift_lightning.runtime.structure import parts_of

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
        self._held = {id(found): (found, parts_of(found)) for found in _containers(value, set())}

    def changed(self, *, but_for: Any = None) -> bool:
        """Whether one holds another tensor or number than before.

        What was None may have been set: such memos are made anew on each stage.

        Args:
            but_for: Containers in this value may have changed, since they are handed on.
        """
        handed_on = {id(found) for found in _containers(but_for, set())}
        return any(
            _differ(before, parts_of(found))
            for key, (found, before) in self._held.items()
            if key not in handed_on
        )


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    parts = parts_of(value)
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for part in parts.values():
        yield from _containers(part, seen)


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
