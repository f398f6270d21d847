"""What the layers of earlier stages return: absent values, whose shapes are found when needed.

The shapes of a layer's outputs are found by running it on the meta device. That takes as long as a
small forward, and micro-batches of unequal samples have ever new shapes; but most code only hands
the outputs of one layer to the next. So where the structure of the outputs is known from other
shapes, they are *deferred*: stand-ins without a shape, until code between the layers looks at one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.absent import AbsentMode, absent_output, entered
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.rng import preserved_rng
from pipeswift_lightning.runtime.structure import leaves_of, mapped

__all__ = ["SkippedLayers"]

_MAX_TEMPLATES = 4096
_VALUES = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)

Template = tuple[list[Any], Any]  # The leaves of an output, and the output.


class SkippedLayers:
    """Answers calls of layers that other stages run.

    Args:
        layers: All layers of the network.
        network_name: How errors name the network.
    """

    def __init__(self, layers: Sequence[nn.Module], network_name: str) -> None:
        self._layers, self._network_name = layers, network_name
        self._templates: dict[Hashable, Template] = {}
        self._structures: dict[Hashable, Template] = {}

    def answer(
        self,
        index: int,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        mode: AbsentMode,
    ) -> Template:
        """Return the leaves of a layer's output, of this call's own, and a like output.

        Args:
            index: Of the layer, as registered.
            original: Its own forward.
            args: Of the call; absent ones may be deferred.
            kwargs: Likewise.
            leaves: Of both.
            mode: Of the run; left while this is called.
        """
        layer = index, self._layers[index].training
        deferred = mode.deferred
        if not deferred or not any(id(leaf) in deferred for leaf in leaves):
            template = self._templates.get((*layer, *map(_described, leaves)))
            if template is not None:
                return _copies(template), template[1]
        kind = (*layer, *map(_kind, leaves))
        call = _Call(self, index, original, args, kwargs, mode)
        structure = self._structures.get(kind)
        if structure is not None:
            return call.deferred(structure[0]), structure[1]
        template = call.template()
        if all(leaf is None or isinstance(leaf, Tensor) for leaf in template[0]):
            self._structures[kind] = template
        return _copies(template), template[1]

    def template(
        self, index: int, original: Callable[..., Any], args: Any, kwargs: Any, mode: AbsentMode
    ) -> Template:
        """Return what a layer returns for arguments whose shapes are all known."""
        key = (index, self._layers[index].training, *map(_described, leaves_of((args, kwargs))))
        template = self._templates.get(key)
        if template is None:
            # What the layer draws here must not change what code between the layers draws.
            with preserved_rng(mode.device), entered(mode):
                output = absent_output(original, args, kwargs)
            template = leaves_of(output), output
            for known in (self._templates, self._structures):
                if len(known) >= _MAX_TEMPLATES:
                    known.clear()
            self._templates[key] = template
        return template

    def changed(self, index: int) -> CutError:
        """Return the error of a layer whose output depends on shapes in more than its shape."""
        return CutError(
            f"layer {index} of {self._network_name} returns another number of tensors for these "
            "shapes than for others. Rule: what a layer returns has one structure. Remedy: return "
            "coarser layers from configure_pipeline()"
        )


@dataclass(slots=True)
class _Call:
    """One call of a layer that is not run."""

    layers: SkippedLayers
    index: int
    original: Callable[..., Any]
    args: Any
    kwargs: Any
    mode: AbsentMode
    _found: list[Any] = field(default_factory=list)

    def deferred(self, leaves: list[Any]) -> list[Any]:
        """Return stand-ins for what the call returns; ``leaves`` are those of a like call."""
        found = [_sizeless(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for i, leaf in enumerate(found):
            if isinstance(leaf, Tensor):  # it is held, or its id could be another's
                self.mode.deferred[id(leaf)] = leaf, partial(self._value, i, len(leaves))
        return found

    def _value(self, leaf: int, number: int) -> Any:
        """Find the shapes, now that code between the layers looks at one."""
        if not self._found:
            counter = self.mode.counter
            was_paused = counter is not None and counter.paused
            if counter is not None:
                counter.paused = True
            try:
                self._found = _copies(self.template())
            finally:
                if counter is not None:
                    counter.paused = was_paused
            if len(self._found) != number:
                raise self.layers.changed(self.index)
        return self._found[leaf]

    def template(self) -> Template:
        """Return what the call returns."""
        args, kwargs = mapped(self.mode.known, (self.args, self.kwargs))
        return self.layers.template(self.index, self.original, args, kwargs, self.mode)


def _sizeless(tensor: Tensor) -> Tensor:
    """Return a like tensor, of sizes that nothing could take for real ones."""
    return torch.empty((0,) * tensor.ndim, dtype=tensor.dtype, device="meta")


def _copies(template: Template) -> list[Any]:
    """Return tensors of a run's own: code may change them, and some stand for present ones."""
    return [x.detach() if isinstance(x, Tensor) else x for x in template[0]]


def _described(leaf: Any) -> Hashable:
    """Return what of an argument decides the shapes and types of a layer's outputs."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype)
    return (type(leaf), leaf if isinstance(leaf, _VALUES) else None)


def _kind(leaf: Any) -> Hashable:
    """Return what of an argument, which may be deferred, decides the structure of the outputs."""
    return (leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else _described(leaf)
