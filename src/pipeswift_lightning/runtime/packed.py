"""Batches whose samples lie one behind the other, so that none is padded."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedBatch", "pack_samples"]

_LENGTHS = "lengths"


class PackedBatch(dict[str, Any]):
    """A dict of tensors: the samples' tokens one behind the other, and ``lengths``.

    Tensors with a row a token are ``[sum of lengths, ...]``; others have a row a sample. As a dict,
    any module takes it, on one device too. A pipeline takes any samples out of it.

    Example:
        >>> batch = PackedBatch(lengths=torch.tensor([2, 1]), ids=torch.tensor([5, 6, 7]))
        >>> batch.select([1, 0])
        {'lengths': tensor([1, 2]), 'ids': tensor([7, 5, 6])}
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample. Shape ``[N]``."""
        return tuple(self[_LENGTHS].tolist())

    def select(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return these samples, in this order, as a plain dict."""
        lengths = self.lengths
        starts = list(accumulate(lengths, initial=0))
        tokens = [k for i in indices for k in range(starts[i], starts[i + 1])]
        return {name: _rows(value, indices, tokens, lengths) for name, value in self.items()}


def _rows(value: Any, samples: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    rows = {len(lengths): samples, sum(lengths): tokens}.get(value.shape[0])
    if rows is None:
        return value
    return value.index_select(0, torch.tensor(rows, dtype=torch.long, device=value.device))


def pack_samples(samples: Sequence[Mapping[str, Any]]) -> PackedBatch:
    """Put samples one behind the other; a loader's ``collate_fn``.

    A mean over tokens is logged without ``batch_size``, or with its number of tokens: with the
    number of samples, it is weighted by samples where no check tells (``loss="per_sample"``).

    Args:
        samples: Of each, tensors with a row a token, all equally many, and numbers.

    Raises:
        ValueError: The tensors of a sample have different numbers of rows, or it has none.

    Example:
        >>> rows = [{"ids": torch.tensor([1, 2]), "y": 0}, {"ids": torch.tensor([3]), "y": 1}]
        >>> pack_samples(rows)
        {'lengths': tensor([2, 1]), 'ids': tensor([1, 2, 3]), 'y': tensor([0, 1])}
    """
    lengths = []
    for sample in samples:
        rows = {len(x) for x in sample.values() if isinstance(x, Tensor) and x.dim()}
        if len(rows) != 1 or rows == {0}:
            msg = (
                f"a sample has tensors of {sorted(rows)} rows. Rule: a row a token, in all of its "
                "tensors alike, 1 or more. Remedy: collate other tensors yourself"
            )
            raise ValueError(msg)
        lengths.append(rows.pop())
    packed = PackedBatch(lengths=torch.tensor(lengths))
    for name in samples[0]:
        column = [torch.as_tensor(sample[name]) for sample in samples]
        packed[name] = torch.cat(column) if column[0].dim() else torch.stack(column)
    return packed
