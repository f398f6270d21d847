"""What the layers of earlier stages return: absent values, whose shapes are found when needed.

The shapes of a layer's outputs are found by running it on the meta device. That takes as long as a
small forward, and micro-batches of unequal samples have ever new shapes; but most code only hands
the outputs of one layer to the next. So where the structure of the outputs is known from other
shapes, they are *deferred* until code between the layers looks at one.
"""

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.absent import AbsentMode, absent_output, entered
from pipeswift_lightning.runtime.alike import form_of
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

    Attributes:
        operations: What operations between layers have returned, for `AbsentMode`.
    """

    def __init__(self, layers: Sequence[nn.Module], network_name: str) -> None:
        self._layers, self._network_name = layers, network_name
        self._templates: dict[Hashable, Template] = {}
        self._structures: dict[Hashable, Template] = {}
        self._forms: dict[Hashable, int] = {}
        self._numbers: dict[int, int] = {}
        self.operations: dict[Hashable, Tensor] = {}

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
        layer = self._form(index, original), self._layers[index].training
        deferred = mode.deferred
        if not deferred or not any(leaf in deferred for leaf in leaves):
            template = self._templates.get((*layer, *map(_described, leaves)))
            if template is not None:
                return _copies(template), template[1]
        kind = (*layer, *map(_kind, leaves))
        given = mode.frozen((args, kwargs))
        call = partial(self.template, index, original, given[0], given[1], mode)
        structure = self._structures.get(kind)
        if structure is not None:
            make = partial(self._later, call, index, mode, len(structure[0]))
            return deferred.defer(make, leaves, structure[0]), structure[1]
        template = call()
        if all(leaf is None or isinstance(leaf, Tensor) for leaf in template[0]):
            self._structures[kind] = template
        return _copies(template), template[1]

    def _later(
        self, call: Callable[[], Template], index: int, mode: AbsentMode, number: int
    ) -> list[Any]:
        """Find the shapes, now that code between the layers looks at one."""
        counter = mode.counter
        was_paused = counter is not None and counter.paused
        if counter is not None:
            counter.paused = True
        try:
            leaves = _copies(call())
        finally:
            if counter is not None:
                counter.paused = was_paused
        if len(leaves) != number:
            raise self.changed(index)
        return leaves

    def template(
        self, index: int, original: Callable[..., Any], args: Any, kwargs: Any, mode: AbsentMode
    ) -> Template:
        """Return what a layer returns, once the shapes of all its arguments can be known."""
        args, kwargs = mapped(mode.deferred.known, (args, kwargs))
        layer = self._form(index, original), self._layers[index].training
        key = (*layer, *map(_described, leaves_of((args, kwargs))))
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

    def _form(self, index: int, original: Callable[..., Any]) -> int:
        """Return a number that layers have in common which are alike."""
        number = self._numbers.get(index)
        if number is None:
            form = form_of(self._layers[index], original)
            number = self._numbers[index] = self._forms.setdefault(form, len(self._forms))
        return number

    def changed(self, index: int) -> CutError:
        """Return the error of a layer whose output depends on shapes in more than its shape."""
        return CutError(
            f"layer {index} of {self._network_name} returns another number of tensors for these "
            "shapes than for others. Rule: what a layer returns has one structure. Remedy: return "
            "coarser layers from configure_pipeline()"
        )


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
