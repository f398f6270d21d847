"""Which layers go to which stage."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

__all__ = ["Partition", "PartitionError", "explicit_partition", "solve_partition"]


class PartitionError(ValueError):
    """Layers that cannot be split as asked."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Contiguous, non-empty runs of layers, one a stage.

    Args:
        starts: First layer of each stage; increasing, the first 0. Shape ``[num_stages]``.
        num_layers: Number of layers, all stages together.

    Raises:
        PartitionError: The starts do not begin at 0, do not increase, or pass the last layer.

    Example:
        >>> partition = Partition((0, 3), num_layers=5)
        >>> partition.ranges, partition.stage_of(3)
        ((range(0, 3), range(3, 5)), 1)
    """

    starts: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(self.starts))
        bounds = (*self.starts, self.num_layers)
        if not self.starts or self.starts[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            message = (
                f"starts={list(self.starts)} do not split {self.num_layers} layers: they must "
                f"begin with 0, increase, and stay below {self.num_layers}, so that every stage "
                "has a layer"
            )
            raise PartitionError(message)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Layers of each stage. Shape ``[num_stages]``."""
        return tuple(range(a, b) for a, b in pairwise((*self.starts, self.num_layers)))

    def stage_of(self, layer: int) -> int:
        """Return the stage that holds ``layer``.

        Raises:
            PartitionError: There is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            message = f"layer {layer} is none of 0..{self.num_layers - 1}: count layers from 0"
            raise PartitionError(message)
        return bisect_right(self.starts, layer) - 1


def solve_partition(costs_s: Sequence[float], num_stages: int) -> Partition:
    """Return the partition whose slowest stage is fastest.

    Exact dynamic programming over the layers from the end, O(p n^2) (PipeDream, SOSP '19, section
    3.1, with the cost of communication left out). With ``b[k][i]`` the best bottleneck of layers
    ``i..n-1`` on ``k`` stages::

        b[1][i] = cost(i..n-1)
        b[k][i] = min over j in i+1..n-k+1 of max(cost(i..j-1), b[k-1][j])

    Args:
        costs_s: Time of each layer, in seconds. Shape ``[n]``.
        num_stages: Number of stages ``p``, ``1 <= p <= n``.

    Returns:
        The partition. Ties go to the earliest split, and the stages after it are again best for
        their layers; so every rank computes the same partition.

    Raises:
        PartitionError: There are fewer layers than stages, no stage, or a cost is negative or not
            finite.

    Example:
        >>> solve_partition([1.0, 1.0, 1.0, 3.0], num_stages=2)
        Partition(starts=(0, 3), num_layers=4)
    """
    num_layers = len(costs_s)
    _check_counts(num_layers, num_stages)
    for layer, cost_s in enumerate(costs_s):
        if not 0 <= cost_s < math.inf:
            message = (
                f"costs_s[{layer}]={cost_s} must be finite and 0 or more: measure the layer again"
            )
            raise PartitionError(message)
    total = np.array([0.0, *accumulate(float(cost_s) for cost_s in costs_s)])
    best = total[-1] - total
    splits: list[np.ndarray] = []  # splits[k - 2][i]: first layer of the next stage, k stages left.
    for stages_left in range(2, num_stages + 1):
        above = np.full(num_layers + 1, np.inf)
        split = np.zeros(num_layers + 1, dtype=np.int64)
        for i in range(num_layers - stages_left + 1):
            ends = slice(i + 1, num_layers - stages_left + 2)
            bottleneck = np.maximum(total[ends] - total[i], best[ends])
            first = int(np.argmin(bottleneck))
            above[i], split[i] = bottleneck[first], i + 1 + first
        best = above
        splits.append(split)
    starts = [0]
    for split in reversed(splits):
        starts.append(int(split[starts[-1]]))
    return Partition(tuple(starts), num_layers)


def explicit_partition(
    num_layers: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
) -> Partition:
    """Return the partition that the user spelled out, in one of two ways.

    Args:
        num_layers: Number of layers of the model.
        layers_per_stage: Number of layers of each stage. Shape ``[num_stages]``.
        starts: First layer of each stage. Shape ``[num_stages]``.

    Raises:
        PartitionError: Both or neither are given, a stage is empty, or the sum is not
            ``num_layers``.

    Example:
        >>> explicit_partition(5, layers_per_stage=[3, 2]) == explicit_partition(5, starts=[0, 3])
        True
    """
    if (layers_per_stage is None) == (starts is None):
        message = (
            f"layers_per_stage={layers_per_stage} and starts={starts} say the same thing in two "
            "ways: give one of them"
        )
        raise PartitionError(message)
    if starts is not None:
        return Partition(tuple(starts), num_layers)
    counts = tuple(layers_per_stage or ())
    _check_counts(num_layers, len(counts))
    if sum(counts) != num_layers or min(counts) < 1:
        message = (
            f"partition={list(counts)} (layers of each stage) must be 1 or more each and add up "
            f"to the model's {num_layers} layers, not {sum(counts)}: correct the counts"
        )
        raise PartitionError(message)
    return Partition(tuple(accumulate(counts[:-1], initial=0)), num_layers)


def _check_counts(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        message = (
            f"cannot split {num_layers} layers into {num_stages} stages, each needs a layer: "
            f"use between 1 and {num_layers} devices, or a model of more layers"
        )
        raise PartitionError(message)
