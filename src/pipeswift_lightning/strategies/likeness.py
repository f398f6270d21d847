"""How far two values that a step may give differ: tensors, and whatever else users return."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeswift_lightning.runtime.unjoined import Unjoined
from pipeswift_lightning.strategies.rounding import rounding_of

__all__ = ["relative_error", "unlike"]


def unlike(one: Any, other: Any, rounding: float) -> float:
    """Return how far two values differ, in units of what rounding explains.

    Tensors, arrays and floats may be off by rounding, relative to their largest number. Containers
    and dataclasses are as unlike as their parts. All else is equal, or it is infinitely unlike.

    Args:
        one: Any value.
        other: Another.
        rounding: The relative error that the precision in use explains.

    Example:
        >>> unlike({"x": [1.0, "a"]}, {"x": [1.0 + 1e-12, "a"]}, 1e-9) < 1
        True
        >>> unlike({"x": [1, "a"]}, {"x": [2, "a"]}, 1e-9), unlike([1], [1, 2], 1e-9)
        (inf, inf)
    """
    if type(one) is not type(other):
        return math.inf
    if isinstance(one, Unjoined):  # nobody can use it
        return 0.0
    ours, others = _as_tensor(one), _as_tensor(other)
    if ours is not None and others is not None:
        return _unlike_tensors(ours, others, rounding)
    (names, parts), (their_names, their_parts) = _parts(one), _parts(other)
    if names != their_names:
        return math.inf
    if len(parts) == 1 and parts[0] is one:
        return 0.0 if _equal(one, other) else math.inf
    pairs = zip(parts, their_parts, strict=True)
    return max((unlike(mine, its, rounding) for mine, its in pairs), default=0.0)


def _as_tensor(value: Any) -> Tensor | None:
    """Return numbers that rounding may change, with those that stand beside them."""
    match value:
        case Tensor():
            return value
        case np.ndarray() if value.dtype.kind in "fiub":
            return torch.from_numpy(value)
        case float():
            return torch.tensor(value, dtype=torch.float64)
        case list() | tuple() if value and all(type(x) is float for x in value):
            return torch.tensor(value, dtype=torch.float64)
        case _:
            return None


def _parts(value: Any) -> tuple[Any, list[Any]]:
    """Return what a value consists of, with the parts' names; itself if that is not known."""
    match value:
        case Mapping():
            return list(value), list(value.values())
        case list() | tuple():
            return len(value), list(value)
        case _:
            pass
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return names, [getattr(value, name) for name in names]
    leaves, spec = tree_flatten(value)
    return spec, leaves


def relative_error(whole: Tensor | None, merged: Tensor | None, magnitude: Tensor | None) -> float:
    """Return how far ``merged`` is off, relative to the greater of ``whole`` and ``magnitude``."""
    if whole is None or merged is None or magnitude is None:
        return 0.0 if whole is merged else math.inf
    if whole.shape != merged.shape:
        return math.inf
    scale = torch.maximum(whole.abs(), magnitude.abs()).clamp(min=1e-300)
    same = (whole == merged) | (whole.isnan() & merged.isnan())
    errors = ((whole - merged).abs() / scale).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(errors.masked_fill(same, 0.0).max())


def _unlike_tensors(one: Tensor, other: Tensor, rounding: float) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    if not one.numel():
        return 0.0
    largest = one.double().abs().nan_to_num(posinf=0.0).max().expand(one.shape)
    error = relative_error(one.double(), other.double(), largest)
    return error / max(rounding, rounding_of(one.dtype))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values say that they are equal; those that cannot say so are not."""
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 -- a comparison of the user's own
        return False
