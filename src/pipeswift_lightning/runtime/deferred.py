"""Absent values whose shapes nobody has looked at: found later, or never.

To find the shape of what a layer or an operation returns takes a run on the meta device: 0.1 ms for
an operation, and as long as a small forward for a layer. Micro-batches of unequal samples have ever
new shapes, and most code only hands values on. So calls whose like has been seen return *stand-ins*
(meta tensors without a size), and are made when code looks at a shape that depends on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

__all__ = ["Deferrals", "kind_of", "sizeless"]

_BY_VALUE = (bool, complex, str, bytes, Enum, torch.dtype, torch.device)
_SMALL = 8  # an int below is a dim or a number of parts, most often; one above is a size


@dataclass(slots=True)
class _Call:
    """A call that has not been made."""

    make: Callable[[], Sequence[Any]]
    needs: tuple["_Call", ...]
    results: Sequence[Any] | None = None


class Deferrals:
    """The stand-ins of one run of a step.

    Example:
        >>> deferrals = Deferrals()
        >>> seen = torch.empty(2, 3, device="meta")
        >>> (x,) = deferrals.defer(lambda: [torch.empty(5, 3, device="meta")], [], [seen])
        >>> x.shape, deferrals.known(x).shape, x in deferrals
        (torch.Size([0, 0]), torch.Size([5, 3]), True)
    """

    def __init__(self) -> None:
        # The stand-in is held, or its id could be another's.
        self._places: dict[int, tuple[Tensor, _Call, int]] = {}

    def __contains__(self, leaf: Any) -> bool:
        return id(leaf) in self._places

    def __bool__(self) -> bool:
        return bool(self._places)

    def defer(
        self, make: Callable[[], Sequence[Any]], arguments: Sequence[Any], like: Sequence[Any]
    ) -> list[Any]:
        """Return stand-ins for what a call returns.

        Args:
            make: Makes the call; what it is given by `known` is there by then.
            arguments: The leaves of its arguments.
            like: The leaves of what a like call has returned.
        """
        found = (self._places.get(id(leaf)) for leaf in arguments)
        call = _Call(make, tuple(place[1] for place in found if place is not None))
        leaves = [sizeless(leaf) if isinstance(leaf, Tensor) else leaf for leaf in like]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._places[id(leaf)] = leaf, call, i
        return leaves

    def known(self, leaf: Any) -> Any:
        """Return a tensor of the right shape for a stand-in; anything else as it is."""
        place = self._places.get(id(leaf))
        if place is None:
            return leaf
        call = place[1]
        if call.results is None:
            _make(call)
        assert call.results is not None
        return call.results[place[2]]

    def found(self, leaf: Any) -> Any:
        """Return what stands for a stand-in if its size is known by now; all else as it is."""
        place = self._places.get(id(leaf))
        return leaf if place is None or place[1].results is None else self.known(leaf)

    def settle(self) -> None:
        """Make all calls."""
        for _, call, _ in list(self._places.values()):
            if call.results is None:
                _make(call)

    def clear(self) -> None:
        """Forget all: calls that are not made hold what they were given."""
        self._places.clear()


def _make(call: _Call) -> None:
    """Make a call and what it needs, one after the other: deep networks are long chains."""
    waiting = [call]
    while waiting:
        last = waiting[-1]
        needs = [need for need in last.needs if need.results is None]
        if needs:
            waiting += needs
            continue
        if last.results is None:  # several may need it
            last.results = last.make()
        waiting.pop()


def sizeless(tensor: Tensor) -> Tensor:
    """Return a like tensor, of sizes that nothing could take for real ones."""
    return torch.empty((0,) * tensor.ndim, dtype=tensor.dtype, device="meta")


def kind_of(value: Any) -> Any:
    """Return what of an argument decides the form of a result, though not its sizes."""
    if isinstance(value, Tensor):
        return value.ndim, value.dtype
    if isinstance(value, torch.Size):
        return torch.Size, len(value)
    if isinstance(value, tuple | list):
        return type(value), *map(kind_of, value)
    if type(value) is dict:
        return dict, *((key, kind_of(part)) for key, part in value.items())
    if isinstance(value, _BY_VALUE) or (isinstance(value, int) and -_SMALL < value < _SMALL):
        return type(value), value
    return type(value)
