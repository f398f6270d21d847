"""Search for the best of many partitions, which are looked at as one array."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeswift_lightning.plan.evaluator import Floats, Ints

__all__ = ["Bools", "PartitionSearch", "all_starts", "bounds_of", "without_empty_stages"]

Bools: TypeAlias = npt.NDArray[np.bool_]

_STARTS = 4  # Partitions from which the neighbours are searched.
_REACH = 3  # Layers by which a neighbour's cuts differ.


def all_starts(num_layers: int, num_stages: int) -> Ints:
    """Return the first layers of the stages of every partition. Shape ``[number][num_stages]``.

    Example:
        >>> all_starts(3, 2).tolist()
        [[0, 1], [0, 2]]
    """
    cuts = num_stages - 1
    inner = np.array(list(itertools.combinations(range(1, num_layers), cuts)), dtype=np.int64)
    inner = inner.reshape(math.comb(num_layers - 1, cuts), cuts)
    return np.hstack([np.zeros((len(inner), 1), dtype=np.int64), inner])


def bounds_of(starts: Ints, num_layers: int) -> Ints:
    """Return the partitions with the number of layers at the end of each row."""
    return np.hstack([starts, np.full((len(starts), 1), num_layers)])


def without_empty_stages(starts: Ints, num_layers: int) -> Bools:
    """Return which of the rows are partitions: every stage has a layer."""
    good: Bools = np.all(np.diff(bounds_of(starts, num_layers), axis=1) > 0, axis=1)
    return good


@dataclass(frozen=True, slots=True)
class PartitionSearch:
    """Finds the partition of least value, by looking at all of them or at neighbours.

    A partition is a row of first layers.

    Args:
        values: Returns the value of each of some partitions; less is better. Shape ``[number]``.
        admissible: Returns which of some partitions are allowed. Shape ``[number]``.
    """

    values: Callable[[Ints], Floats]
    admissible: Callable[[Ints], Bools]

    def best(self, starts: Ints) -> tuple[Ints, float]:
        """Return the best of the partitions that are allowed, the first of equal ones."""
        starts = starts[self.admissible(starts)]
        values = self.values(starts)
        first = int(values.argmin())
        return starts[first], float(values[first])

    def around(self, starts: Ints) -> tuple[Ints, float]:
        """Descend from the best of the given partitions to better neighbours."""
        starts = starts[self.admissible(starts)]
        values = self.values(starts)
        found: list[tuple[float, tuple[int, ...]]] = []
        for index in np.argsort(values, kind="stable")[:_STARTS]:
            current, value = starts[index], float(values[index])
            while True:
                near, near_value = self.best(np.vstack([current[None], _neighbours(current)]))
                if not near_value < value:
                    break
                current, value = near, near_value
            found.append((value, tuple(current.tolist())))
        value, order = min(found)
        return np.array(order), value


def _neighbours(starts: Ints) -> Ints:
    """Return partitions with one or two cuts moved, or a run of cuts moved together."""
    cuts = len(starts) - 1
    steps = [d for d in range(-_REACH, _REACH + 1) if d]
    moved: list[Ints] = []
    for a in range(1, cuts + 1):
        for b in range(a, cuts + 1):
            for d in steps:
                run = starts.copy()
                run[a : b + 1] += d
                moved.append(run)
            for d, e in itertools.product((-1, 1), repeat=2) if b > a else ():
                pair = starts.copy()
                pair[a] += d
                pair[b] += e
                moved.append(pair)
    return np.array(moved, dtype=np.int64).reshape(-1, len(starts))
