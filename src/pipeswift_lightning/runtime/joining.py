"""Join what the network returned for each micro-batch, and share out the gradient again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeswift_lightning.runtime.unjoined import Unjoined, aligned, constant

__all__ = ["JoinedOutputs", "join_outputs"]

_CROSSING = (
    "Rule: what a layer of another stage computes gets here as an argument or an output of a "
    "layer, not as an attribute that it keeps. Remedy: return it from the layers, and pass it on"
)


@dataclass(frozen=True, slots=True)
class JoinedOutputs:
    """The outputs of all micro-batches as one.

    Attributes:
        sizes: Rows of each micro-batch; samples, as a rule.
        weights: What each micro-batch counts in scalars; they sum to 1.
        spec: The structure of the output.
        leaves: Its leaves in order, with ``None`` in the places of tensors.
        places: The places of the tensors among the leaves.
        tensors: The joined tensors, without history.
        wanted: For each of them, whether its gradient is wanted back.
        parts: For each micro-batch, the tensors that were joined.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    wanted: tuple[bool, ...]
    parts: tuple[tuple[Tensor, ...], ...]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output with ``tensors`` in the places of the joined ones."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.spec)

    def shares(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return a micro-batch's tensors that need a gradient, and their part of ``gradients``."""
        start, size = sum(self.sizes[:micro_batch]), self.sizes[micro_batch]
        tensors: list[Tensor] = []
        shares: list[Tensor] = []
        for part, gradient in zip(self.parts[micro_batch], gradients, strict=True):
            if gradient is None or not part.requires_grad:
                continue
            tensors.append(part)
            if gradient.dim() == 0:
                shares.append(gradient * self.weights[micro_batch])
            else:
                shares.append(gradient if len(self.sizes) == 1 else gradient[start : start + size])
        return tensors, shares


def join_outputs(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    network: str,
    weights: Sequence[float] | None = None,
) -> JoinedOutputs:
    """Join what the network returned for each micro-batch, in the batch's order.

    Tensors with a row a sample are concatenated; scalars (an auxiliary loss, say) are averaged.
    What cannot be joined is an error where the step uses it (see `Unjoined`).

    Args:
        outputs: For each micro-batch, what the network returned.
        sizes: Rows of each micro-batch.
        network: How errors name the network.
        weights: What each micro-batch counts in scalars; by its rows, unless given.

    Raises:
        CutError: The outputs hold numbers that differ from micro-batch to micro-batch.

    Example:
        >>> join_outputs([torch.zeros(2, 1), torch.ones(1, 1)], [2, 1], "net").tensors[0].tolist()
        [[0.0], [0.0], [1.0]]
    """
    flat: list[tuple[list[Any], TreeSpec]] = [tree_flatten(o) for o in aligned(outputs, network)]
    shares = [size / sum(sizes) for size in sizes] if weights is None else weights
    leaves: list[Any] = []
    places: list[int] = []
    tensors: list[Tensor] = []
    wanted: list[bool] = []
    parts: list[list[Tensor]] = [[] for _ in outputs]
    for column in zip(*(f[0] for f in flat), strict=True):
        joined = _joined(column, sizes, shares, network)
        if not isinstance(joined, Tensor):
            leaves.append(joined)
            continue
        places.append(len(leaves))
        leaves.append(None)
        tensors.append(joined)
        wanted.append(torch.is_grad_enabled() and any(part.requires_grad for part in column))
        for mine, part in zip(parts, column, strict=True):
            mine.append(part)
    return JoinedOutputs(
        sizes=tuple(sizes),
        weights=tuple(shares),
        spec=flat[0][1],
        leaves=tuple(leaves),
        places=tuple(places),
        tensors=tuple(tensors),
        wanted=tuple(wanted),
        parts=tuple(map(tuple, parts)),
    )


def _joined(
    column: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], network: str
) -> Any:
    """Join one leaf: a tensor, a constant, or what stands for neither."""
    if not all(isinstance(part, Tensor) for part in column):
        return constant(column, network)
    detached = [part.detach() for part in column]
    if len(detached) == 1 and not detached[0].is_meta:
        return detached[0].clone()
    if any(part.is_meta for part in detached):
        return Unjoined("what depends on a value of another stage", network, _CROSSING)
    if all(part.dim() == 0 for part in detached):
        return _joined_scalars(detached, weights)
    by_row = all(p.dim() and p.shape[0] == n for p, n in zip(detached, sizes, strict=True))
    if not by_row or len({p.shape[1:] for p in detached}) > 1:
        shapes = [list(part.shape) for part in detached]
        what = f"tensors of shapes {shapes} for micro-batches of {list(sizes)} samples"
        return Unjoined(what, network)
    return torch.cat(detached)


def _joined_scalars(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean; of numbers that have none, such as counts, the last."""
    if not parts[0].is_floating_point():
        return parts[-1]
    return sum(
        (part * weight for part, weight in zip(parts, weights, strict=True) if weight),
        start=torch.zeros_like(parts[0]),
    )
