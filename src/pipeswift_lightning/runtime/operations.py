"""Name a value by the operation that made it, where no layer takes or returns it.

A value that code before one layer computes, and code after a later one uses, has to cross the cuts
between. Both sides run that code: the stage that computes the value for real, and the stage that
waits for it on absent values. So they agree on a name: the gap, and the number of the operation
among those of the gap that depend on parameters or activations. What depends on the batch alone is
not counted: a loop over the batch's images may be longer on another batch.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeswift_lightning.runtime.structure import leaves_of

__all__ = ["Operation", "OperationCounter", "mark_dependent"]

_DEPENDS = "_pipeswift_depends"


@dataclass(frozen=True, slots=True)
class Operation:
    """Names a value.

    Attributes:
        gap: The gap whose code made it.
        index: The number of the operation among those of the gap that are counted.
        leaf: The place of the tensor in what the operation returned.
    """

    gap: int
    index: int
    leaf: int


def mark_dependent(value: Any) -> None:
    """Note that the tensors in ``value`` depend on parameters."""
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            setattr(leaf, _DEPENDS, True)


class OperationCounter:
    """Counts operations outside the layers that depend on parameters, alike on every stage.

    Args:
        on_value: Called with the name and the tensor of each value that such an operation makes.

    Attributes:
        paused: While a layer runs, nothing is counted.
    """

    def __init__(self, on_value: Callable[[Operation, Tensor], None]) -> None:
        self.paused = False
        self._on_value = on_value
        self._gap = 0
        self._index = 0
        self._digest = 0

    def enter(self, gap: int) -> None:
        """Begin to count the operations of a gap."""
        self._gap, self._index, self._digest = gap, 0, 0

    @property
    def digest(self) -> int:
        """What the gap's operations so far are called, in short."""
        return self._digest

    def depends(self, value: Any) -> bool:
        """Whether a call with these arguments counts."""
        if isinstance(value, Tensor):
            return value.is_meta or isinstance(value, nn.Parameter) or hasattr(value, _DEPENDS)
        if isinstance(value, list | tuple):
            return any(map(self.depends, value))
        if isinstance(value, dict):
            return any(map(self.depends, value.values()))
        return False

    def count(self, func: Callable[..., Any], result: Any) -> None:
        """Count a call that returned ``result``; what returns no tensor does not count."""
        leaves = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        if not leaves:
            return
        for i, leaf in enumerate(leaves):
            setattr(leaf, _DEPENDS, True)
            self._on_value(Operation(self._gap, self._index, i), leaf)
        self._index += 1
        name = getattr(func, "__name__", type(func).__name__)
        self._digest = zlib.crc32(name.encode(), self._digest)
