"""Which layers go to which stage."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeswift_lightning.plan.bottleneck import PartitionError, StageProblem, solve_starts

__all__ = [
    "Partition",
    "PartitionError",
    "best_partition",
    "explicit_partition",
    "solve_partition",
    "uniform_partition",
]


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
                f"starts={list(self.starts)} do not split {self.num_layers} layers. Rule: they "
                f"begin with 0, increase, and stay below {self.num_layers}, so that every stage "
                "has a layer. Remedy: give the first layer of each stage"
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
            message = (
                f"layer {layer} is not there. Rule: one of 0..{self.num_layers - 1}. Remedy: count "
                "layers from 0"
            )
            raise PartitionError(message)
        return bisect_right(self.starts, layer) - 1


def solve_partition(costs_s: Sequence[float], num_stages: int) -> Partition:
    """Return the partition whose slowest stage is fastest, when the costs of layers are all.

    See ``best_partition`` for devices, cuts and memory.

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
    return best_partition(StageProblem(costs_s=tuple(costs_s), num_stages=num_stages))


def best_partition(problem: StageProblem) -> Partition:
    """Return the partition whose slowest stage is fastest; see ``bottleneck.solve_starts``.

    Raises:
        PartitionError: Nothing fits into memory, or too many cuts are forbidden.

    Example:
        >>> best_partition(StageProblem(costs_s=(1, 1, 1, 3), num_stages=2, cut_s=(0, 0, 0, 9)))
        Partition(starts=(0, 2), num_layers=4)
    """
    return Partition(solve_starts(problem), len(problem.costs_s))


def uniform_partition(num_layers: int, num_stages: int) -> Partition:
    """Return stages of as equal a number of layers as can be, the larger ones first.

    Example:
        >>> uniform_partition(7, 3)
        Partition(starts=(0, 3, 5), num_layers=7)
    """
    _check_counts(num_layers, num_stages)
    size, larger = divmod(num_layers, num_stages)
    starts = (size * r + min(r, larger) for r in range(num_stages))
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
            "ways. Rule: one of them. Remedy: leave the other out"
        )
        raise PartitionError(message)
    if starts is not None:
        return Partition(tuple(starts), num_layers)
    counts = tuple(layers_per_stage or ())
    _check_counts(num_layers, len(counts))
    if sum(counts) != num_layers or min(counts) < 1:
        message = (
            f"partition={list(counts)} (layers of each stage) adds up to {sum(counts)}. Rule: 1 or "
            f"more each, and together the model's {num_layers} layers. Remedy: correct the counts"
        )
        raise PartitionError(message)
    return Partition(tuple(accumulate(counts[:-1], initial=0)), num_layers)


def _check_counts(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        message = (
            f"cannot split {num_layers} layers into {num_stages} stages. Rule: each has a layer. "
            f"Remedy: use between 1 and {num_layers} stages, or a model of more layers"
        )
        raise PartitionError(message)
