"""Run chosen layers of a network in another way, without an edit to their code."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

__all__ = ["LayerWrapper"]


class LayerWrapper(ABC):
    """Stands between chosen layers and their callers.

    Which layers are this stage's is known only after it is in place: see `choose`.

    Args:
        layers: All layers of the network.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._chosen: frozenset[int] = frozenset()
        self._originals: list[Callable[..., Any]] = []

    @abstractmethod
    def call(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a chosen layer, whose own forward is ``original``."""

    def install(self) -> None:
        """Put the interception in place; `remove` takes it away."""
        for index, layer in enumerate(self._layers):
            self._originals.append(layer.forward)
            layer.forward = partial(self._call, index, layer.forward)

    def choose(self, indices: Collection[int]) -> None:
        """Run these layers in this way from now on."""
        self._chosen = frozenset(indices)

    def remove(self) -> None:
        """Give the layers their own ``forward`` back; nothing to do if it was not in place."""
        for layer, original in zip(self._layers, self._originals, strict=False):
            del layer.forward
            if layer.forward != original:  # it was an attribute of the instance already
                layer.forward = original
        self._originals.clear()

    def _call(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index not in self._chosen:
            return original(*args, **kwargs)
        return self.call(index, original, args, kwargs)
