"""Micro-batches of several shapes, cut out of one real batch."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from pipeswift_lightning.runtime.batching import num_samples, split_batch

__all__ = ["example_micro_batches", "length_of", "shape_of"]


def length_of(batch: Any) -> int:
    """Return the number of tokens of a batch's samples; 1, if they are not sequences.

    That is the second dim of its first tensor of tokens or of a mask: integers or booleans with a
    row for each sample.

    Example:
        >>> import torch
        >>> length_of({"x": torch.zeros(2, 9), "tokens": torch.zeros(2, 5, dtype=torch.int64)})
        5
        >>> length_of(torch.zeros(2, 9))
        1
    """
    rows = num_samples(batch)
    for leaf in tree_flatten(batch)[0]:
        is_sequence = isinstance(leaf, Tensor) and leaf.dim() >= 2 and leaf.shape[0] == rows
        if is_sequence and not leaf.is_floating_point() and not leaf.is_complex():
            return int(leaf.shape[1])
    return 1


def shape_of(batch: Any) -> tuple[int, int]:
    """Return a micro-batch's number of samples, and of tokens of each, padding included."""
    return num_samples(batch), length_of(batch)


def example_micro_batches(
    batch: Any, *, sizes: Sequence[int] | None = None, lengths: Sequence[int] | None = None
) -> list[Any]:
    """Return the first samples of ``batch``, in each of some numbers and cut to some lengths.

    Args:
        batch: A real batch, of the longest samples that are to be planned for.
        sizes: Numbers of samples; by default all, half and a quarter of those of the batch, but
            of no more than 8.
        lengths: Numbers of tokens; by default three quarters, half, a quarter and all of those of
            the batch.

    Example:
        >>> import torch
        >>> tokens = torch.zeros(4, 8, dtype=torch.int64)
        >>> [list(x.shape) for x in example_micro_batches(tokens, sizes=[2], lengths=[8, 4])]
        [[2, 8], [2, 4]]
    """
    rows, length = shape_of(batch)
    most = min(rows, 8)
    sizes = sizes or sorted({max(1, most // k) for k in (1, 2, 4)})
    lengths = lengths or sorted({max(1, length * k // 4) for k in (1, 2, 3, 4)})
    return [_cut(batch, rows, size, length, n) for size, n in product(sizes, lengths)]


def _cut(batch: Any, rows: int, size: int, length: int, new_length: int) -> Any:
    first = split_batch(batch, [size, rows - size])[0] if size < rows else batch
    if new_length == length:
        return first

    def trim(tensor: Tensor) -> Tensor:
        # Rows of the batch keep their first dim; a table of positions has none of samples.
        begin = 1 if tensor.dim() and tensor.shape[0] == size else 0
        for dim in range(begin, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, new_length)
        return tensor.contiguous()

    return tree_map_only(Tensor, trim, first)
