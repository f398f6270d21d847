"""Micro-batches of any samples of a batch, without the padding that they do not need."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pipeswift_lightning.runtime.batching import change_tensors, select_rows, split_batch
from pipeswift_lightning.runtime.lengths import SampleLengths
from pipeswift_lightning.runtime.packed import PackedBatch

__all__ = ["form_batches", "in_data_order", "is_in_order"]


def form_batches(
    batch: Any, samples: Sequence[Sequence[int]], lengths: SampleLengths | None = None
) -> list[Any]:
    """Return micro-batches of these samples.

    Args:
        batch: A nested structure of tensors, or a packed batch.
        samples: Sample ids of each micro-batch. Shape ``[m][any]``.
        lengths: What may be trimmed; ``None`` trims nothing.

    Raises:
        BatchError: The batch holds an object that cannot be split.

    Example:
        >>> lengths = SampleLengths((3, 1, 2), {"": (1,)})
        >>> rows = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
        >>> [x.tolist() for x in form_batches(rows, [[1, 2], [0]], lengths)]
        [[[4, 0], [5, 6]], [[1, 2, 3]]]
    """
    if isinstance(batch, PackedBatch):
        return [batch.select(part) for part in samples]
    if is_in_order(samples):
        parts = split_batch(batch, [len(part) for part in samples])
    else:
        parts = [select_rows(batch, part) for part in samples]
    if lengths is None or not lengths.dims:
        return parts
    return [
        change_tensors(part, partial(_trimmed, lengths.dims, max(lengths.lengths[i] for i in ids)))
        for part, ids in zip(parts, samples, strict=True)
    ]


def is_in_order(samples: Sequence[Sequence[int]]) -> bool:
    """Whether the micro-batches are runs of samples in the data's order.

    Example:
        >>> is_in_order([[0, 1], [2]]), is_in_order([[0, 2], [1]])
        (True, False)
    """
    return all(a < b for a, b in pairwise(i for part in samples for i in part))


def in_data_order(rows: Tensor, samples: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that follow the micro-batches, in the order of the batch's samples.

    Example:
        >>> in_data_order(torch.tensor([20, 0, 10]), [[2, 0], [1]]).tolist()
        [0, 10, 20]
    """
    order = torch.tensor([i for part in samples for i in part], device=rows.device)
    return rows[order.argsort()]


def _trimmed(dims: Mapping[str, Sequence[int]], longest: int, place: str, tensor: Tensor) -> Tensor:
    for dim in dims.get(place, ()):
        tensor = tensor.narrow(dim, 0, min(longest, tensor.shape[dim]))
    return tensor.contiguous()
