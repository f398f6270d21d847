"""Give what a network returned for trimmed micro-batches its padding back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Trim"]


@dataclass(frozen=True, slots=True)
class Trim:
    """What was cut off the micro-batches of a batch.

    Args:
        width: Tokens of a row of the batch, padding included.
        kept: Tokens of a row of each micro-batch, at most ``width``.
        is_hostile: Whether what is restored are no zeros, but values larger than all others, of
            both signs: a step that gives the same with them does not look at padding.
    """

    width: int
    kept: tuple[int, ...]
    is_hostile: bool = False

    @property
    def cuts(self) -> bool:
        """Whether a micro-batch has lost anything."""
        return min(self.kept) < self.width

    @property
    def is_reversible(self) -> bool:
        """Whether the dims that run over tokens can be told from others by their sizes.

        They can where micro-batches differ: a dim that is as long as each one's rows is no other.
        """
        return len(set(self.kept)) > 1

    def restored(self, outputs: Sequence[Any]) -> list[Any]:
        """Return each micro-batch's tensors with zeros in place of what had been cut off.

        Args:
            outputs: Nested structures of tensors, one a micro-batch.

        Example:
            >>> import torch
            >>> trim = Trim(width=3, kept=(2, 3))
            >>> [x.tolist() for x in trim.restored([torch.ones(1, 2), torch.ones(1, 3)])]
            [[[1.0, 1.0, 0.0]], [[1.0, 1.0, 1.0]]]
        """
        flat = [tree_flatten(output) for output in outputs]
        if any(spec != flat[0][1] for _, spec in flat):
            return list(outputs)
        columns = [self._padded(column) for column in zip(*(f[0] for f in flat), strict=True)]
        return [
            tree_unflatten([column[i] for column in columns], flat[0][1])
            for i in range(len(outputs))
        ]

    def _padded(self, column: Sequence[Any]) -> Sequence[Any]:
        if not all(isinstance(leaf, Tensor) and leaf.dim() == column[0].dim() for leaf in column):
            return column
        dims = {
            dim
            for dim in range(1, column[0].dim())
            if all(leaf.shape[dim] == kept for leaf, kept in zip(column, self.kept, strict=True))
        }
        if not dims:
            return column
        padded = []
        for leaf, kept in zip(column, self.kept, strict=True):
            missing = [self.width - kept if dim in dims else 0 for dim in range(1, leaf.dim())]
            pads = [end for more in reversed(missing) for end in (0, more)]
            padded.append(functional.pad(leaf, pads))
        if self.is_hostile:
            _fill(padded, [leaf.shape for leaf in column])
        return padded


def _fill(padded: Sequence[Tensor], shapes: Sequence[torch.Size]) -> None:
    """Put values of both signs, larger than all others, where tensors are not of these shapes."""
    sizes = (float(x.abs().max()) for x in map(_numbers, padded) if x.numel())
    largest = max(sizes, default=0.0)
    for tensor, shape in zip(padded, shapes, strict=True):
        values = torch.full_like(tensor, True if tensor.dtype is torch.bool else largest)
        if tensor.is_floating_point():
            rows, tokens = (torch.arange(n, device=tensor.device) for n in tensor.shape[:2])
            signs = (1 - (rows[:, None] + tokens) % 2 * 2).view(*tensor.shape[:2], *_ones(tensor))
            places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
            values = (signs * (2 * largest + 10 + places % 5)).to(tensor)
        inner = tuple(slice(0, length) for length in shape)
        values[inner] = tensor[inner]
        tensor.copy_(values)


def _ones(tensor: Tensor) -> list[int]:
    return [1] * (tensor.dim() - 2)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.double().nan_to_num(posinf=0.0, neginf=0.0)
