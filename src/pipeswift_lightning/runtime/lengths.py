"""How long each sample of a collated batch is, and which dims of its tensors that concerns.

A batch is trimmed only where nothing can be lost. Its mask must say that every row is padded at the
end; what is cut off must be under the mask, without a label, and the same padding everywhere, as
in all batches before.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeswift_lightning.runtime.batching import num_samples, tensors_by_path
from pipeswift_lightning.runtime.padding import PaddingSeen

__all__ = ["LengthError", "SampleLengths", "SessionError", "find_lengths", "told_lengths"]
__all__ += ["told_sessions"]

_MASKS = ("attention_mask", "mask")
_LABELS = "labels"
_POSITIONS = frozenset({"position_ids"})  # not padding, but without meaning where there is no token
_IGNORED = -100


class LengthError(ValueError):
    """What a module says of its batch's lengths does not fit the batch."""


class SessionError(ValueError):
    """What a module says of its batch's sessions does not fit the batch."""


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """What may be trimmed of a batch.

    Args:
        lengths: Of each sample, in tokens, 1 or more. Shape ``[N]``.
        dims: Of each tensor that has any, by its place in the batch: the dims that run over the
            tokens. Empty if nothing may be trimmed.
    """

    lengths: tuple[int, ...]
    dims: Mapping[str, tuple[int, ...]]


def told_lengths(
    batch: Any, lengths: Sequence[int], dims: Mapping[str, int | Sequence[int]]
) -> SampleLengths:
    """Return what a module has said of its batch.

    Args:
        batch: The batch.
        lengths: Of each sample.
        dims: By the tensor's place in the batch (``"ids"``; ``"0"`` in a tuple), the dims that run
            over the tokens.

    Raises:
        LengthError: There is not one length a sample, or a name or dim is not in the batch.

    Example:
        >>> told_lengths({"x": torch.zeros(2, 5)}, [3, 4], {"x": 1})
        SampleLengths(lengths=(3, 4), dims={'x': (1,)})
    """
    found = tuple(int(length) for length in lengths)
    if len(found) != num_samples(batch) or min(found) < 1:
        msg = (
            f"sample_lengths() returned {list(found)} for a batch of {num_samples(batch)} samples. "
            "Rule: one number of 1 or more a sample. Remedy: return the tokens of each row"
        )
        raise LengthError(msg)
    leaves = dict(tensors_by_path(batch))
    chosen: dict[str, tuple[int, ...]] = {}
    for name, given in dims.items():
        which = (given,) if isinstance(given, int) else tuple(given)
        tensor = leaves.get(str(name))
        if tensor is None or any(not 0 < dim < tensor.ndim for dim in which):
            msg = (
                f"length_dims names {name!r}: {list(which)}. Rule: a tensor of the batch (here "
                f"{', '.join(leaves)}), and dims of it after the first. Remedy: correct the name"
            )
            raise LengthError(msg)
        chosen[str(name)] = which
    return SampleLengths(found, chosen)


def told_sessions(given: Any, num_samples: int) -> tuple[Hashable, ...]:
    """Return the session of each sample, as a module has told it.

    Args:
        given: A tensor or an array, or any values that can be hashed.
        num_samples: Samples of the batch.

    Raises:
        SessionError: There is not one a sample, or they cannot be hashed.

    Example:
        >>> told_sessions(torch.tensor([4, 4, 7]), 3), told_sessions(["a", torch.tensor(2)], 2)
        ((4, 4, 7), ('a', 2))
    """
    if isinstance(given, Tensor | np.ndarray):
        given = given.reshape(-1).tolist()
    values = tuple(given) if isinstance(given, Iterable) else (given,)
    # Tensors are hashed by what they are, not by what they hold.
    found: tuple[Any, ...] = tuple(
        x.tolist() if isinstance(x, Tensor | np.ndarray) else x for x in values
    )
    if len(found) != num_samples or not all(map(_is_hashable, found)):
        msg = (
            f"sample_sessions() returned {given!r} for a batch of {num_samples} samples. Rule: one "
            "value a sample, which can be hashed. Remedy: return a number or a name of each "
            "sample's session"
        )
        raise SessionError(msg)
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # such as a tuple with a list in it
        return False
    return True


def find_lengths(batch: Any, padding: PaddingSeen | None = None) -> SampleLengths | None:
    """Return what may be trimmed of a batch that tells; ``None`` if it does not.

    It tells by a mask ``[N, T]``, called ``attention_mask`` or ``mask``, true at tokens. All
    tensors are looked at: one that might, or might not, run over the tokens makes this ``None``.

    Args:
        batch: The batch.
        padding: What padding was in earlier batches; takes what it is in this one.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> find_lengths({"ids": mask * 7, "attention_mask": mask})
        SampleLengths(lengths=(2, 1), dims={'ids': (1,), 'attention_mask': (1,)})
        >>> find_lengths({"ids": mask, "attention_mask": mask.flip(1)}) is None  # padded in front
        True
    """
    mask = next((m for name in _MASKS if (m := _mask(batch, name)) is not None), None)
    if mask is None:
        return None
    lengths = _ends(mask, batch)
    if lengths is None:
        return None
    rows, whole = mask.shape
    padded = torch.arange(whole, device=mask.device) >= lengths[:, None]
    padding, unsure = padding or PaddingSeen(), False
    dims: dict[str, tuple[int, ...]] = {}
    for path, tensor in tensors_by_path(batch):
        found = _dims(tensor, rows, whole)
        if found is None:
            return None
        if not found:
            continue
        if not isinstance(tensor, Tensor):
            return None
        if path.rpartition(".")[2] not in _POSITIONS:
            cells = _under_padding(tensor, found, padded)
            unsure |= not padding.takes(path, cells, int(padded.sum()))
        dims[path] = found
    return None if unsure else SampleLengths(tuple(lengths.tolist()), dims)


def _mask(batch: Any, name: str) -> Tensor | None:
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
        return mask.bool()
    return None


def _ends(mask: Tensor, batch: Mapping[str, Any]) -> Tensor | None:
    """Return where each row's tokens and labels end; ``None`` unless all padding is at the end."""
    lengths = mask.sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    if not bool((mask == (places < lengths[:, None])).all()) or not bool((lengths > 0).all()):
        return None
    labels = batch.get(_LABELS)
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        ends = torch.where(labels != _IGNORED, places + 1, 0).amax(1)
        lengths = torch.maximum(lengths, ends)
    return lengths


def _dims(tensor: Any, rows: int, whole: int) -> tuple[int, ...] | None:
    """Return the dims that run over the tokens; ``None`` if that is not clear."""
    if tensor.ndim == 0:
        return ()
    if tensor.shape[0] != rows:  # goes to each micro-batch as it is
        return None if whole in tensor.shape else ()
    found = tuple(dim for dim in range(1, tensor.ndim) if tensor.shape[dim] == whole)
    integer = isinstance(tensor, Tensor) and not tensor.dtype.is_floating_point
    match found:
        case () | (1,):
            return found
        case (1, 2) if integer and tensor.ndim == 3:  # a mask of pairs of tokens
            return found
        case (2, 3) if tensor.ndim == 4 and (integer or tensor.shape[1] == 1):
            return found
        case _:
            return None


def _under_padding(tensor: Tensor, dims: Sequence[int], padded: Tensor) -> Tensor:
    """Return what a tensor holds wherever a row has no token.

    Of a mask of pairs of tokens: wherever a token looks at padding. What padding looks at does not
    matter.
    """
    if len(dims) == 1:
        return tensor.movedim(dims[0], 1)[padded]
    seen = ~padded[:, :, None] & padded[:, None, :]
    return tensor.movedim(tuple(dims), (1, 2))[seen]
