"""Activation checkpointing: a layer's second call, in the backward pass.

`Recomputation` asks for it from outside (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016, section 4). And user code may wrap a layer's call in ``torch.utils.checkpoint``. Then
the layer runs again during the backward pass, outside any run of the step. Its arguments are those
of the first call, absent ones included, and the random state is that of the code around the layer.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from pipeswift_lightning.runtime.layer_wrapper import LayerWrapper
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.structure import mapped

__all__ = ["Recomputation", "is_recomputing", "note_present", "with_present"]

_PRESENT = "_pipeswift_present"
_FRAMES = 16


class Recomputation(LayerWrapper):
    """Runs chosen layers without keeping what they compute inside, and once more for backward.

    The gradients are exact: the second run draws the same random numbers.

    Args:
        layers: All layers of the network.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> recomputation = Recomputation([layer])
        >>> recomputation.install()
        >>> recomputation.choose([0])
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> recomputation.remove()
        >>> layer.weight.grad
        tensor([[1., 1.],
                [1., 1.]])
    """

    @override
    def call(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled() or is_recomputing():
            return original(*args, **kwargs)
        return checkpoint(
            original,
            *args,
            use_reentrant=False,
            context_fn=partial(_contexts, self._layers[index]),
            **kwargs,
        )


def _contexts(
    layer: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first run and of the second."""
    return nullcontext(), _statistics_kept(layer)


@contextmanager
def _statistics_kept(layer: nn.Module) -> Iterator[None]:
    """Let batch norms not count the same samples twice: the second run updates copies."""
    norms = [m for m in layer.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def is_recomputing() -> bool:
    """Whether this code runs within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def note_present(absent: Tensor, present: Tensor, layer: str) -> None:
    """Remember the tensor that took the place of ``absent`` in the call of a layer.

    Raises:
        CutError: The layer is called within a reentrant checkpoint, which would detach it from
            the stage's input without a word.
    """
    if absent is present or isinstance(absent, nn.Parameter):
        return
    if present.requires_grad and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        msg = (
            f"{layer} is the first of its stage, and is called within torch.utils.checkpoint with "
            "use_reentrant=True, which loses the gradient of what another stage has sent. "
            "Remedy: checkpoint(..., use_reentrant=False), as torch recommends"
        )
        raise CutError(msg)
    setattr(absent, _PRESENT, present)


def with_present(arguments: Any) -> Any:
    """Return the arguments of a layer's second call, as they were in its first."""
    return mapped(lambda x: getattr(x, _PRESENT, x) if isinstance(x, Tensor) else x, arguments)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
    return False
