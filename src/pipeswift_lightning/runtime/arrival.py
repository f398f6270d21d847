"""Tensors that arrive from outside the graph, whose gradient is wanted back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Arrival"]


_ANCHOR = torch.empty(0, requires_grad=True)  # makes a node's output need a gradient; gets none


class _Arrive(torch.autograd.Function):
    """Puts a tensor into the graph as the output of a node, and keeps the gradient at the node.

    A leaf that requires a gradient would do as well, but for one thing: user code may not change a
    leaf in place, and layers such as ``nn.ReLU(inplace=True)`` do change their input.
    """

    @override
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, box: list[Tensor]) -> Tensor:
        ctx.gradient = None
        return box.pop()  # from a list, so that it counts as new and not as a view of an argument

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        (gradient,) = gradients
        # Several backward passes may end here: one for each part that was taken of the tensor.
        ctx.gradient = gradient if ctx.gradient is None else ctx.gradient + gradient
        return None, None


# What `Function.apply` calls in the end; its look for transforms of functions costs as much again.
_arrive: Callable[[Tensor, list[Tensor]], Tensor] = super(torch.autograd.Function, _Arrive).apply


class Arrival:
    """One tensor's entry into the graph.

    Args:
        tensor: A tensor without history.

    Attributes:
        tensor: The same tensor within the graph; it may be changed in place.

    Example:
        >>> arrival = Arrival(torch.ones(2))
        >>> arrival.tensor.mul_(3).sum().backward()
        >>> arrival.take_gradient()
        tensor([3., 3.])
    """

    __slots__ = ("_device", "_dtype", "_node", "_shape", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        with torch.enable_grad():
            self.tensor: Tensor = _arrive(_ANCHOR, [tensor])
        self._node: Any = self.tensor.grad_fn  # the tensor gets another node if it is changed

    def take_gradient(self) -> Tensor | None:
        """Return the gradient that has come back, if one has, and forget it."""
        gradient: Tensor | None = self._node.gradient
        self._node.gradient = None
        return gradient

    def take_gradient_or_zeros(self) -> Tensor:
        """Return the gradient that has come back, or zeros, and forget it."""
        gradient = self.take_gradient()
        if gradient is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return gradient
