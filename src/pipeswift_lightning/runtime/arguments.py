"""The arguments of one call: split into micro-batches, and their gradients put together again."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeswift_lightning.runtime.arrival import Arrival
from pipeswift_lightning.runtime.batching import (
    BatchError,
    has_gradient,
    num_samples,
    split_batch,
)
from pipeswift_lightning.runtime.network_call import CutError

__all__ = ["CallArguments"]


class CallArguments:
    """What a network is called with.

    Args:
        value: The pair (args, kwargs).
        network: How errors name the network.
        training: Whether gradients may be wanted.

    Attributes:
        value: The arguments.
        wanted: The tensors among them whose gradient is wanted.
        flags: For each leaf, whether it is one of them.
        num_samples: Rows of the first tensor; ``None`` if there is none.

    Raises:
        CutError: A gradient is wanted of a tensor that lies in an object of an unknown kind.

    Example:
        >>> x = torch.ones(3, 1, requires_grad=True)
        >>> arguments = CallArguments(((x,), {}), "self.net", training=True)
        >>> for args, kwargs in arguments.split([2, 1]):
        ...     (2 * args[0]).sum().backward()
        >>> arguments.take_gradients()[0].tolist(), x.grad
        ([[2.0], [2.0], [2.0]], None)
    """

    def __init__(self, value: Any, network: str, *, training: bool) -> None:
        leaves, self._spec = tree_flatten(value)
        self.value = value
        self.flags = tuple(training and isinstance(x, Tensor) and x.requires_grad for x in leaves)
        self.wanted = [x for x, flag in zip(leaves, self.flags, strict=True) if flag]
        others = [x for x in leaves if not isinstance(x, Tensor)]
        if training and any(map(has_gradient, others)):
            msg = (
                f"{network} is called with a tensor that needs a gradient inside an object of a "
                "kind that torch does not look into. Rule: arguments are tensors, or tuples, "
                "lists and dicts of them. Remedy: pass the tensor itself"
            )
            raise CutError(msg)
        self._leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._sizes: tuple[int, ...] = ()
        self._arrivals: list[list[Arrival]] = []
        try:
            self.num_samples: int | None = num_samples(value)
        except BatchError:
            self.num_samples = None

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Return the arguments of each micro-batch, outside the caller's graph.

        Raises:
            CutError: They hold something that cannot be split.
        """
        self._sizes = tuple(sizes)
        try:
            parts = split_batch(tree_unflatten(self._leaves, self._spec), sizes)
        except BatchError as error:
            msg = f"a network's arguments: {error}, or PipeSwiftStrategy(micro_batches=1)"
            raise CutError(msg) from None
        return [self._received(part) for part in parts] if self.wanted else parts

    def _received(self, part: Any) -> Any:
        leaves, spec = tree_flatten(part)
        if len(leaves) != len(self.flags):  # lists of as many items as samples are split
            msg = (
                "a network is called with a list of as many items as samples, beside a tensor "
                "that needs a gradient. Remedy: pass the list's items as a tensor or a tuple"
            )
            raise CutError(msg)
        arrivals = []
        for i, flag in enumerate(self.flags):
            if flag:
                arrival = Arrival(leaves[i].detach())
                arrivals.append(arrival)
                leaves[i] = arrival.tensor
        self._arrivals.append(arrivals)
        return tree_unflatten(leaves, spec)

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients that have come back for ``wanted``, and forget them."""
        result: list[Tensor | None] = []
        for i, tensor in enumerate(self.wanted):
            parts = [arrivals[i].take_gradient() for arrivals in self._arrivals]
            result.append(self._joined(tensor, parts))
        return result

    def _joined(self, tensor: Tensor, parts: list[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if len(parts) == 1:
            return found[0]
        if tensor.dim() == 0 or tensor.shape[0] != self.num_samples:  # given whole to each
            return torch.stack(found).sum(0)
        whole = torch.zeros_like(tensor)
        ends = [0]
        for size in self._sizes:
            ends.append(ends[-1] + size)
        for (start, stop), part in zip(pairwise(ends), parts, strict=True):
            if part is not None:
                whole[start:stop] = part
        return whole
