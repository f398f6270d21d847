"""Split a collated batch into micro-batches; describe batches so that ranks can compare them."""

import copy
import dataclasses
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["BatchError", "batch_checksum", "batch_signature", "describe_batch", "num_samples"]
__all__ += ["fresh_containers", "has_gradient", "split_batch", "structure_of", "tensor_versions"]
__all__ += ["change_tensors", "select_rows", "tensors_by_path"]

_SAMPLED_BYTES = 1 << 20


class BatchError(ValueError):
    """A batch cannot be split into micro-batches."""


def num_samples(batch: Any) -> int:
    """Return the number of samples: the first dim of the batch's first tensor.

    Raises:
        BatchError: The batch holds no tensor with a dim.

    Example:
        >>> num_samples({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
        3
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            return int(leaf.shape[0])
    msg = (
        f"a batch of type {type(batch).__name__} holds no tensor with a sample dim. Rule: the "
        "first dim of a batch's tensors counts its samples. Remedy: define "
        "split_batch(batch, sizes) on your LightningModule"
    )
    raise BatchError(msg)


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split ``batch`` along its sample dim into micro-batches of the given sizes.

    Tensors and arrays whose first dim is the number of samples are split (as views), and so are
    lists of that length that hold no tensors; everything else is given to each micro-batch whole.

    Args:
        batch: A tensor, or a nested structure (mappings, sequences, dataclasses) of tensors.
        sizes: Samples in each micro-batch; they sum to the number of samples.

    Raises:
        BatchError: The sizes do not sum to the number of samples, or the batch holds an object
            that this function does not know how to split.

    Example:
        >>> [x.tolist() for x in split_batch(torch.arange(5), [2, 3])]
        [[0, 1], [2, 3, 4]]
    """
    if len(sizes) == 1:
        return [batch]
    total = num_samples(batch)
    if sum(sizes) != total:
        msg = f"micro-batch sizes {list(sizes)} sum to {sum(sizes)}, but the batch has {total}"
        raise BatchError(msg)
    return _parts(batch, total, len(sizes), partial(_sliced, list(sizes)))


def fresh_containers(value: Any) -> Any:
    """Return ``value`` with its mappings, lists and dataclasses copied, and its tensors shared.

    A step may take things out of its batch (``batch.pop("labels")``), and runs more than once.

    Example:
        >>> batch = {"x": torch.zeros(1)}
        >>> _ = fresh_containers(batch).pop("x")
        >>> list(batch)
        ['x']
    """
    if type(value) is Tensor:  # the question below takes long, and most values are no others
        return value
    if isinstance(value, Mapping):
        return _like(value, {k: fresh_containers(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        parts = [fresh_containers(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return copy.copy(value)
    return value


def has_gradient(value: Any) -> bool:
    """Whether a tensor in ``value`` needs a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _leaves(value))


def structure_of(value: Any) -> Hashable:
    """Return what kind of value it is: its structure, and the dtypes and dims of its tensors.

    Example:
        >>> structure_of(torch.zeros(2)) == structure_of(torch.zeros(3))
        True
    """
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(
        (str(x.dtype), x.ndim) if isinstance(x, Tensor) else type(x).__name__ for x in leaves
    )


def tensor_versions(batch: Any) -> list[int]:
    """Return the counts of in-place changes of a batch's tensors."""
    return [leaf._version for leaf in _leaves(batch) if isinstance(leaf, Tensor)]


def select_rows(batch: Any, indices: Sequence[int]) -> Any:
    """Return a batch of these samples of ``batch``, as copies, in this order.

    Raises:
        BatchError: The batch holds an object that cannot be split.

    Example:
        >>> select_rows({"x": torch.arange(4), "n": ["a", "b", "c", "d"]}, [2, 0])
        {'x': tensor([2, 0]), 'n': ['c', 'a']}
    """
    return _parts(batch, num_samples(batch), 1, partial(_picked, list(indices)))[0]


def tensors_by_path(batch: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the tensors and arrays of a batch by their place in it: keys joined by dots.

    Example:
        >>> [name for name, _ in tensors_by_path({"x": torch.ones(1), "y": (torch.ones(1), 2)})]
        ['x', 'y.0']
    """
    if isinstance(batch, Tensor | np.ndarray):
        return [(path, batch)]
    return [
        found
        for key, value in _children(batch)
        for found in tensors_by_path(value, f"{path}.{key}" if path else str(key))
    ]


def change_tensors(batch: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a batch with its tensors changed; ``change`` is told the place of each.

    Example:
        >>> change_tensors({"x": torch.ones(2), "n": 3}, lambda place, tensor: tensor * len(place))
        {'x': tensor([1., 1.]), 'n': 3}
    """
    if isinstance(batch, Tensor):
        return change(path, batch)
    children = {
        key: change_tensors(value, change, f"{path}.{key}" if path else str(key))
        for key, value in _children(batch)
    }
    return _rebuilt(batch, children) if children else batch


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    return []


def _rebuilt(value: Any, children: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return _like(value, children)
    if isinstance(value, list | tuple):
        parts = list(children.values())
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return dataclasses.replace(value, **children)


def _parts(value: Any, total: int, count: int, take: Callable[[Any], list[Any]]) -> list[Any]:
    """Return ``count`` batches, of the parts of each row of samples that ``take`` returns."""
    if isinstance(value, Tensor | np.ndarray):
        return take(value) if value.ndim and value.shape[0] == total else [value] * count
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return [value] * count
    if type(value) is list and len(value) == total and not _has_tensor(value):
        return take(value)
    if isinstance(value, Mapping | list | tuple) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        parts = {k: _parts(v, total, count, take) for k, v in _children(value)}
        return [_rebuilt(value, {k: v[i] for k, v in parts.items()}) for i in range(count)]
    msg = (
        f"cannot split a batch that holds a {type(value).__name__}. Rule: batches are nested "
        "mappings, sequences or dataclasses of tensors. Remedy: define "
        "split_batch(batch, sizes) on your LightningModule, returning one batch a size"
    )
    raise BatchError(msg)


def _sliced(sizes: list[int], value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        # Views that autograd takes for separate tensors: a layer that changes its input in place
        # must not make the other micro-batches' inputs look changed.
        return list(torch.unsafe_split_with_sizes(value, sizes))
    return [value[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def _picked(indices: list[int], value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.index_select(0, torch.tensor(indices, device=value.device))]
    return [[value[i] for i in indices] if isinstance(value, list) else value[indices]]


def _like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return items if type(original) is dict else type(original)(items)  # type: ignore[call-arg]


def _has_tensor(value: Any) -> bool:
    return any(isinstance(x, Tensor | np.ndarray) for x in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in _leaves(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for f in dataclasses.fields(value) for leaf in _leaves(getattr(value, f.name))]
    return [value]


def batch_signature(batch: Any) -> Hashable:
    """Return what determines the shapes of activations: structure, shapes, dtypes and integers.

    Example:
        >>> batch_signature(torch.zeros(2, 3)) == batch_signature(torch.ones(2, 3))
        True
        >>> batch_signature({"length": 2}) == batch_signature({"length": 3})
        False
    """
    if isinstance(batch, Tensor | np.ndarray):
        return tuple(batch.shape), str(batch.dtype)
    if isinstance(batch, int):
        return batch
    if isinstance(batch, Mapping):
        return _name(batch), tuple((str(k), batch_signature(v)) for k, v in batch.items())
    if isinstance(batch, list | tuple):
        return _name(batch), tuple(map(batch_signature, batch))
    if dataclasses.is_dataclass(batch):
        fields = dataclasses.fields(batch)
        return _name(batch), tuple(batch_signature(getattr(batch, f.name)) for f in fields)
    return _name(batch)


def _name(value: object) -> str:
    return type(value).__name__


def describe_batch(batch: Any) -> str:
    """Say in words what a batch holds, for errors that compare two ranks.

    Example:
        >>> describe_batch({"x": torch.zeros(2, 3)})
        "{'x': float32[2, 3]}"
    """
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe_batch(v)}" for k, v in batch.items()) + "}"
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        return f"{_name(batch)}{describe_batch(fields)}"
    if isinstance(batch, list | tuple) and len(batch) <= 16:
        return "(" + ", ".join(map(describe_batch, batch)) + ")"
    if isinstance(batch, Tensor | np.ndarray):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    return _name(batch)


def batch_checksum(batch: Any) -> int:
    """Return a checksum of the batch's tensors, to tell whether two ranks drew the same samples.

    Costs at most a megabyte of CRC a tensor: larger tensors are sampled at equal strides.

    Example:
        >>> batch_checksum(torch.zeros(3)) == batch_checksum(torch.ones(3))
        False
    """
    total = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, np.ndarray):
            total = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), total)
        elif isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_meta:
            total = zlib.crc32(_sample(leaf), total)
    return total


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // _SAMPLED_BYTES)
    return flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
