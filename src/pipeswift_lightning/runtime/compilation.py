"""Compile the layers of a stage, each by itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from pipeswift_lightning.runtime.layer_wrapper import LayerWrapper

__all__ = ["Compilation"]


class Compilation(LayerWrapper):
    """Runs chosen layers through ``torch.compile``.

    Layer by layer, since the code between them is where a stage begins and ends; equal layers
    share what is compiled.

    Args:
        layers: All layers of the network.
        settings: Arguments of ``torch.compile``.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> compilation = Compilation([layer], {"backend": "eager"})
        >>> compilation.install()
        >>> compilation.choose([0])
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
        >>> compilation.remove()
    """

    def __init__(self, layers: Sequence[nn.Module], settings: Mapping[str, Any]) -> None:
        super().__init__(layers)
        self._settings = dict(settings)
        self._compiled: dict[int, Callable[..., Any]] = {}

    @override
    def call(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        compiled = self._compiled.get(index)
        if compiled is None:
            compiled = torch.compile(original, **self._settings)
            self._compiled[index] = compiled
        return compiled(*args, **kwargs)
