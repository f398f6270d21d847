"""Join what the network returned for each micro-batch, and share out the gradient again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeswift_lightning.runtime.network_call import CutError

__all__ = ["JoinedOutputs", "join_outputs"]


@dataclass(frozen=True, slots=True)
class JoinedOutputs:
    """The outputs of all micro-batches as one.

    Attributes:
        sizes: Samples of each micro-batch.
        spec: The structure of the output.
        leaves: Its leaves in order, with ``None`` in the places of tensors.
        places: The places of the tensors among the leaves.
        tensors: The joined tensors, without history.
        wanted: For each of them, whether its gradient is wanted back.
        parts: For each micro-batch, the tensors that were joined.
    """

    sizes: tuple[int, ...]
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
                shares.append(gradient * (size / sum(self.sizes)))
            else:
                shares.append(gradient if len(self.sizes) == 1 else gradient[start : start + size])
        return tensors, shares


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], network: str) -> JoinedOutputs:
    """Join what the network returned for each micro-batch, in the batch's order.

    Tensors with a row a sample are concatenated; scalars (an auxiliary loss, say) are averaged
    with the micro-batches' samples as weights.

    Raises:
        CutError: An output tensor has no row a sample.

    Example:
        >>> join_outputs([torch.zeros(2, 1), torch.ones(1, 1)], [2, 1], "net").tensors[0].tolist()
        [[0.0], [0.0], [1.0]]
    """
    flat: list[tuple[list[Any], TreeSpec]] = [tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        msg = f"{network} returned structures that differ from micro-batch to micro-batch"
        raise CutError(msg)
    leaves: list[Any] = []
    places: list[int] = []
    tensors: list[Tensor] = []
    wanted: list[bool] = []
    parts: list[list[Tensor]] = [[] for _ in outputs]
    for column in zip(*(f[0] for f in flat), strict=True):
        if not isinstance(column[0], Tensor):
            leaves.append(_constant(column, network))
            continue
        places.append(len(leaves))
        leaves.append(None)
        tensors.append(_join_tensors(column, sizes, network))
        wanted.append(any(part.requires_grad for part in column))
        for mine, part in zip(parts, column, strict=True):
            mine.append(part)
    return JoinedOutputs(
        sizes=tuple(sizes),
        spec=flat[0][1],
        leaves=tuple(leaves),
        places=tuple(places),
        tensors=tuple(tensors),
        wanted=tuple(wanted),
        parts=tuple(map(tuple, parts)),
    )


def _constant(column: Sequence[Any], network: str) -> Any:
    if any(value != column[0] for value in column):
        msg = (
            f"{network} returned {list(column)[:4]} for different micro-batches: numbers that "
            "depend on the micro-batch cannot be joined. Remedy: return them as tensors with a "
            'row a sample, or PipeSwiftStrategy(loss="per_sample")'
        )
        raise CutError(msg)
    return column[0]


def _join_tensors(column: Sequence[Tensor], sizes: Sequence[int], network: str) -> Tensor:
    detached = [part.detach() for part in column]
    if len(detached) == 1:
        return detached[0].clone()
    if all(part.dim() == 0 for part in detached):
        if not detached[0].is_floating_point():
            return detached[-1]
        total = sum(sizes)
        return sum(
            (part * (size / total) for part, size in zip(detached, sizes, strict=True)),
            start=torch.zeros_like(detached[0]),
        )
    by_row = all(p.dim() and p.shape[0] == n for p, n in zip(detached, sizes, strict=True))
    if not by_row or len({part.shape[1:] for part in detached}) > 1:
        shapes = [list(part.shape) for part in detached]
        msg = (
            f"{network} returned tensors of shapes {shapes} for micro-batches of {list(sizes)} "
            "samples. Rule: to see the whole batch, the loss needs outputs with a row a sample. "
            "Remedy: return them with a row a sample, or PipeSwiftStrategy(micro_batches=1), or "
            'loss="per_sample" if the loss is a mean over samples'
        )
        raise CutError(msg)
    return torch.cat(detached)
