"""Which samples form a micro-batch.

Where samples are *packed* (no padding) a micro-batch costs the sum of its samples, and any split is
possible. Where they are *padded* it costs its number of samples times that of its longest one, and
samples of similar length belong together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeswift_lightning.plan.bottleneck import StageProblem, solve_starts
from pipeswift_lightning.plan.microbatches import MicroBatchError

__all__ = [
    "Formation",
    "PaddedCost",
    "assign_to_targets",
    "bucket_lengths",
    "check_count",
    "form_in_order",
    "form_padded",
    "form_to_targets",
    "tapered_targets",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
# Cost of micro-batches of so many samples, padded to such lengths; element by element.
PaddedCost: TypeAlias = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True, slots=True)
class Formation:
    """The samples of each micro-batch.

    Args:
        samples: Sample ids of each micro-batch, each sample once, no micro-batch empty. Shape
            ``[m][any]``.

    Raises:
        MicroBatchError: A micro-batch is empty, or a sample is missing or named twice.

    Example:
        >>> formation = Formation(((2, 0), (1,)))
        >>> formation.assignment, formation.sizes, formation.loads([3, 5, 1])
        ((0, 1, 0), (2, 1), (4, 5))
    """

    samples: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(tuple(map(int, part)) for part in self.samples))
        ids = sorted(i for part in self.samples for i in part)
        if not all(self.samples) or not ids or ids != list(range(len(ids))):
            message = (
                f"samples={list(map(list, self.samples))} form no micro-batches. Rule: each sample "
                "0, 1, ... once, no micro-batch empty. Remedy: use fewer micro-batches"
            )
            raise MicroBatchError(message)

    @classmethod
    def of(cls, assignment: Sequence[int]) -> "Formation":
        """Return the formation in which sample ``i`` is in micro-batch ``assignment[i]``.

        Example:
            >>> Formation.of([0, 1, 0])
            Formation(samples=((0, 2), (1,)))
        """
        parts: list[list[int]] = [[] for _ in range(max(assignment, default=-1) + 1)]
        for sample, part in enumerate(assignment):
            parts[part].append(sample)
        return cls(tuple(map(tuple, parts)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each micro-batch."""
        return tuple(map(len, self.samples))

    @property
    def assignment(self) -> tuple[int, ...]:
        """Micro-batch of each sample."""
        of = {sample: part for part, samples in enumerate(self.samples) for sample in samples}
        return tuple(of[sample] for sample in range(len(of)))

    def loads(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the sum of the samples' values for each micro-batch."""
        return tuple(sum(values[i] for i in part) for part in self.samples)

    def reordered(self, order: Sequence[int]) -> "Formation":
        """Return the micro-batches in another order, ``order[position] = micro-batch id``."""
        return Formation(tuple(self.samples[i] for i in order))


def form_in_order(costs: Sequence[float], num_micro_batches: int) -> Formation:
    """Return runs of the samples in their order, the costliest run as cheap as can be.

    For samples whose order must not change.

    Example:
        >>> form_in_order([1, 1, 1, 3], 2).samples
        ((0, 1, 2), (3,))
    """
    check_count(len(costs), num_micro_batches)
    starts = solve_starts(StageProblem(costs_s=tuple(costs), num_stages=num_micro_batches))
    return Formation(tuple(tuple(range(a, b)) for a, b in pairwise((*starts, len(costs)))))


def form_to_targets(
    costs: Sequence[float],
    targets: Sequence[float],
    *,
    tokens: Sequence[float] | None = None,
    max_tokens: float = math.inf,
) -> Formation:
    """Return packed micro-batches with costs near the targets; equal targets balance them.

    The costliest sample first, each to the micro-batch that lacks most to its target (LPT, Graham
    1969, when the targets are equal); empty ones last of all get a sample of their own.

    Args:
        costs: Cost of each sample. Shape ``[N]``.
        targets: Cost that each micro-batch should have. Shape ``[m]``.
        tokens: Length of each sample. None: the costs.
        max_tokens: Most tokens of a micro-batch.

    Raises:
        MicroBatchError: There are fewer samples than micro-batches, or the tokens do not fit.

    Example:
        >>> form_to_targets([5, 4, 3, 3, 3], [9, 9]).samples
        ((0, 3), (1, 2, 4))
    """
    check_count(len(costs), len(targets))
    (assignment,) = assign_to_targets(costs, [targets], tokens=tokens, max_tokens=max_tokens)
    lengths = costs if tokens is None else tokens
    ranked = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for i in ranked:
        if assignment[i] < 0:
            message = (
                f"sample {i} of {lengths[i]:g} tokens fits none of {len(targets)} micro-batches. "
                f"Rule: at most {max_tokens:g} tokens each. Remedy: use more micro-batches (at "
                f"least {math.ceil(sum(lengths) / max_tokens)}), or a higher limit"
            )
            raise MicroBatchError(message)
    return Formation(
        tuple(tuple(i for i in ranked if assignment[i] == j) for j in range(len(targets)))
    )


def assign_to_targets(
    costs: Sequence[float],
    targets: Sequence[Sequence[float]] | Floats,
    *,
    tokens: Sequence[float] | None = None,
    max_tokens: float = math.inf,
) -> Ints:
    """Return what `form_to_targets` does for many targets at once, as numbers of micro-batches.

    Args:
        costs: Cost of each sample. Shape ``[N]``.
        targets: Costs that the micro-batches should have. Shape ``[any][m]``.
        tokens: Length of each sample. None: the costs.
        max_tokens: Most tokens of a micro-batch.

    Returns:
        The micro-batch of each sample; -1 where a sample fits nowhere. Shape ``[any][N]``.

    Example:
        >>> assign_to_targets([5, 4, 3, 3, 3], [[9, 9], [6, 12]]).tolist()
        [[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]
    """
    lack = np.array(targets, dtype=float)
    lengths = costs if tokens is None else tokens
    room, filled = np.full(lack.shape, float(max_tokens)), np.zeros(lack.shape, dtype=bool)
    rows = np.arange(len(lack))
    assignment = np.full((len(lack), len(costs)), -1)
    ranked = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for place, i in enumerate(ranked):
        fits = room >= lengths[i]
        # The last samples go to micro-batches that would stay empty.
        only_empty = (~filled).sum(1) >= len(ranked) - place
        fits &= ~(filled & only_empty[:, None])
        wanted = np.where(fits, lack, -math.inf).argmax(1)
        found = fits[rows, wanted]
        assignment[found, i] = wanted[found]
        taken = rows[found], wanted[found]
        filled[taken] = True
        lack[taken] -= costs[i]
        room[taken] -= lengths[i]
    return assignment


@lru_cache(maxsize=1024)
def tapered_targets(num_micro_batches: int, *, start: int, end: int, least: float) -> Floats:
    """Return shares that rise from ``least`` over ``start`` micro-batches and fall over ``end``.

    Small micro-batches fill and drain the pipeline sooner.

    Returns:
        Shares with the sum 1. Shape ``[m]``.

    Example:
        >>> tapered_targets(5, start=2, end=1, least=0.5).round(3).tolist()
        [0.133, 0.2, 0.267, 0.267, 0.133]
    """
    place = np.arange(num_micro_batches, dtype=float)
    shares = np.ones(num_micro_batches)
    if start:
        shares = np.minimum(shares, least + (1 - least) * place / start)
    if end:
        shares = np.minimum(shares, least + (1 - least) * place[::-1] / end)
    total: Floats = shares / shares.sum() if shares.sum() else shares + 1 / num_micro_batches
    total.flags.writeable = False  # the same array is returned again
    return total


def form_padded(
    lengths: Sequence[float],
    num_micro_batches: int,
    *,
    num_stages: int = 1,
    cost: PaddedCost | None = None,
    max_tokens: float = math.inf,
) -> Formation:
    """Return micro-batches of similar lengths, each padded to its longest sample.

    Exact over runs of the samples sorted by length: least ``sum + (p - 1) * largest`` of the
    micro-batches' costs, which is the time of ``p`` equal stages. For a set of limits on the
    largest, dynamic programming finds the least sum; O(m N^2) each.

    Args:
        lengths: Length of each sample. Shape ``[N]``.
        num_micro_batches: ``m``.
        num_stages: ``p``.
        cost: Cost of micro-batches by numbers of samples and padded lengths. None: their product.
        max_tokens: Most tokens of a micro-batch, padding included.

    Returns:
        The micro-batches, the shortest samples first.

    Raises:
        MicroBatchError: There are fewer samples than micro-batches, or the tokens do not fit.

    Example:
        >>> form_padded([9, 1, 2, 8, 1], 2).samples
        ((1, 4, 2), (3, 0))
    """
    check_count(len(lengths), num_micro_batches)
    ranked = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    n = len(ranked)
    longest = np.array([lengths[i] for i in ranked], dtype=float)
    counts = np.arange(1, n + 1)[None, :] - np.arange(n)[:, None]  # [first][last]
    padded = np.broadcast_to(longest, (n, n))
    table = np.where(counts > 0, counts * padded, math.inf)
    too_long = table > max_tokens
    if cost is not None:
        table = np.where(counts > 0, cost(np.maximum(counts, 1.0), padded), math.inf)
    table[too_long] = math.inf
    best_value, best_bounds = math.inf, None
    for limit in _limits(table, num_micro_batches):
        total, bounds = _least_sum(np.where(table > limit, math.inf, table), num_micro_batches)
        if bounds is None:
            continue
        value = total + (num_stages - 1) * max(table[a, b - 1] for a, b in pairwise(bounds))
        if value < best_value:
            best_value, best_bounds = value, bounds
    if best_bounds is None:
        message = (
            f"{n} samples do not fit {num_micro_batches} padded micro-batches. Rule: samples times "
            f"longest at most {max_tokens:g} tokens. Remedy: use more micro-batches, or a higher "
            "limit"
        )
        raise MicroBatchError(message)
    return Formation(tuple(tuple(ranked[a:b]) for a, b in pairwise(best_bounds)))


_NUM_LIMITS = 24


def _limits(table: Floats, num_micro_batches: int) -> Floats:
    """Return limits on a micro-batch's cost, from the least possible up to none at all."""
    values = np.unique(table[np.isfinite(table)])
    if len(values) == 0:
        return values
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _runs(table, values[middle]) <= num_micro_batches:
            high = middle
        else:
            low = middle + 1
    top = max(values[low] * 4, table.diagonal().max())
    picked = np.geomspace(max(values[low], 1e-300), max(top, 1e-300), _NUM_LIMITS)
    limits: Floats = np.append(values[low], np.append(picked[1:], values[-1]))
    return limits


def _runs(table: Floats, limit: float) -> float:
    """Return the least number of runs none of which costs more than the limit."""
    n, at, runs = len(table), 0, 0
    while at < n:
        fits = int((table[at, at:] <= limit).sum())
        if fits == 0:
            return math.inf
        at, runs = at + fits, runs + 1
    return runs


def _least_sum(table: Floats, num_parts: int) -> tuple[float, tuple[int, ...] | None]:
    """Return the least sum of exactly ``num_parts`` runs, and their bounds."""
    n = len(table)
    best = np.append(np.full(n, math.inf), 0.0)  # From each first sample on, with k runs.
    splits: list[npt.NDArray[np.int64]] = []
    for _ in range(num_parts):
        value = table + best[None, 1:]
        splits.append(value.argmin(axis=1))
        best = np.append(value[np.arange(n), splits[-1]], math.inf)
    if best[0] == math.inf:
        return math.inf, None
    bounds = [0]
    for split in reversed(splits):
        bounds.append(int(split[bounds[-1]]) + 1)
    return float(best[0]), tuple(bounds)


def bucket_lengths(lengths: Sequence[int], num_buckets: int, *, multiple: int = 1) -> list[int]:
    """Return each sample's length rounded up to one of a few, so that there are few shapes.

    The lengths of the buckets make the padding least (exact, O(k u^2) for ``u`` lengths).

    Args:
        lengths: Length of each sample. Shape ``[N]``.
        num_buckets: Most different lengths, 1 or more.
        multiple: What every length is rounded up to first; e.g. 8 for tensor cores.

    Raises:
        MicroBatchError: ``num_buckets`` or ``multiple`` is below 1.

    Example:
        >>> bucket_lengths([3, 9, 4, 10, 4], num_buckets=2)
        [4, 10, 4, 10, 4]
    """
    for name, value in (("num_buckets", num_buckets), ("multiple", multiple)):
        if value < 1:
            message = f"{name}={value} does not work. Rule: 1 or more. Remedy: 1 pads all alike"
            raise MicroBatchError(message)
    rounded = [-(-length // multiple) * multiple for length in lengths]
    unique, counts = np.unique(np.array(rounded), return_counts=True)
    n = len(unique)
    before = np.concatenate([[0], np.cumsum(counts)])
    inside = before[None, 1:] - before[:-1, None]  # Samples of the lengths first..last.
    table = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], inside * unique, math.inf)
    _, bounds = _least_sum(table, min(num_buckets, n))
    assert bounds is not None  # for the type checker: there are as many lengths as buckets
    top = {int(unique[k]): int(unique[b - 1]) for a, b in pairwise(bounds) for k in range(a, b)}
    return [top[length] for length in rounded]


def check_count(num_samples: int, num_micro_batches: int) -> None:
    """Raise ``MicroBatchError`` unless each micro-batch can have a sample."""
    if not 1 <= num_micro_batches <= num_samples:
        message = (
            f"cannot form {num_micro_batches} micro-batches of {num_samples} samples. Rule: each "
            f"needs a sample. Remedy: use between 1 and {num_samples} micro-batches"
        )
        raise MicroBatchError(message)
