"""Many makespans at once: the simulator's rules, carried out for a whole set of candidates.

For one schedule the graph of what waits for what is the same whatever the micro-batches cost; only
the durations differ from one candidate (an order, a partition, a formation) to the next. So the
graph is sorted once into *levels* of computations that do not wait for each other, and each level
is one short run of NumPy operations on arrays of ``[computations of the level][candidates]``. With
a few hundred candidates this is some hundred times faster than simulating them one by one, and the
operations come in the simulator's order, so the results are equal to the last bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.instructions import Backward, Compute, Schedule, ScheduleError
from pipeswift_lightning.plan.schedules import build_schedule

__all__ = ["Evaluator", "OrderCosts", "check_fits", "evaluator_for"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_INSTANT = Link()
_PART_CELLS = 1 << 17  # Cells of [computations][candidates] at once: 1 MiB, which caches hold.
_PART_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class _Level:
    """Computations that start once all earlier levels are done; each field indexes rows.

    ``before`` is the row of what the rank computed before, ``needed`` that of the input, ``link``
    that of the message that took the same link before. Row 0 is the beginning of time.
    """

    rows: slice
    before: Ints
    needed: Ints
    link: Ints
    computes: Ints
    sends: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """One schedule, ready to be timed for many candidates.

    Computations are numbered as in ``simulator``: with ``S`` stages and ``m`` micro-batches,
    Forward ``i`` on stage ``s`` is ``s m + i`` and Backward ``S m + s m + i``.

    Example:
        >>> evaluator = Evaluator.of(build_schedule("1f1b", 2, 3))
        >>> durations_s = np.ones((12, 2)) * [1.0, 2.0]  # two candidates; 2 x 2 x 3 computations
        >>> evaluator.makespans_s(durations_s)
        array([ 8., 16.])
    """

    num_stages: int
    num_micro_batches: int
    levels: tuple[_Level, ...]
    last_rows: Ints
    output_rows: Ints

    @classmethod
    def of(cls, schedule: Schedule) -> Self:
        """Sort the schedule's computations into levels.

        Raises:
            ScheduleError: The schedule never finishes.
        """
        graph = _Graph(schedule)
        depth = graph.depths()
        m, stages = schedule.num_micro_batches, schedule.num_stages
        computes = sorted(depth, key=lambda c: (depth[c], c))
        row_of = {c: row for row, c in enumerate(computes, start=1)}
        row_of[_NONE] = 0
        levels: list[_Level] = []
        begin = 0
        while begin < len(computes):
            end = begin
            while end < len(computes) and depth[computes[end]] == depth[computes[begin]]:
                end += 1
            part = computes[begin:end]
            levels.append(
                _Level(
                    rows=slice(begin + 1, end + 1),
                    before=np.array([row_of[graph.before[c]] for c in part]),
                    needed=np.array([row_of[graph.needed[c]] for c in part]),
                    link=np.array([row_of[graph.link[c]] for c in part]),
                    computes=np.array(part),
                    sends=np.array([graph.sends[c] for c in part])[:, None],
                )
            )
            begin = end
        last_stage = range((stages - 1) * m, stages * m)
        return cls(
            num_stages=stages,
            num_micro_batches=m,
            levels=tuple(levels),
            last_rows=np.array([row_of[row[-1]] for row in graph.rows if row]),
            output_rows=np.array([row_of[c] for c in last_stage if c in row_of]),
        )

    @property
    def num_computes(self) -> int:
        """Number of computations of the schedule."""
        return int(self.levels[-1].rows.stop) - 1

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains."""
        return self.num_computes > len(self.output_rows) * self.num_stages

    @property
    def part_size(self) -> int:
        """Number of candidates that are timed together, so that all their times fit a cache."""
        return min(_PART_CANDIDATES, max(16, _PART_CELLS // (self.num_computes + 1)))

    def makespans_s(
        self,
        durations_s: Floats,
        *,
        row_of: Ints | None = None,
        occupied_s: Floats | None = None,
        latency_s: float = 0.0,
        overlap: bool = True,
    ) -> Floats:
        """Return the makespan of each candidate.

        Args:
            durations_s: Seconds of each computation, or of each kind of computation if ``row_of``
                is given. Shape ``[computations or kinds][candidates]``.
            row_of: Row of ``durations_s`` (and ``occupied_s``) of each computation.
            occupied_s: Seconds that each computation's message occupies its link; the same shape.
            latency_s: Seconds from there to the arrival.
            overlap: Whether a sender computes on during its transfer.

        Returns:
            Seconds. Shape ``[candidates]``.
        """
        out = np.empty(durations_s.shape[1])
        for part, ends in self._ends(durations_s, row_of, occupied_s, latency_s, overlap=overlap):
            out[part] = ends[self.last_rows].max(axis=0)
        return out

    def completions_s(
        self,
        durations_s: Floats,
        *,
        row_of: Ints | None = None,
        occupied_s: Floats | None = None,
        latency_s: float = 0.0,
        overlap: bool = True,
    ) -> Floats:
        """Return the mean time at which the last stage's forwards end; see ``makespans_s``.

        It is how long a request waits on average if each micro-batch is a request.
        """
        out = np.empty(durations_s.shape[1])
        for part, ends in self._ends(durations_s, row_of, occupied_s, latency_s, overlap=overlap):
            out[part] = ends[self.output_rows].mean(axis=0)
        return out

    def _ends(
        self,
        durations_s: Floats,
        row_of: Ints | None,
        occupied_s: Floats | None,
        latency_s: float,
        *,
        overlap: bool,
    ) -> Iterator[tuple[slice, Floats]]:
        """Yield candidates and the end of each row, in parts that fit a cache."""
        candidates = durations_s.shape[1]
        rows = [
            level.computes if row_of is None else row_of[level.computes] for level in self.levels
        ]
        size = self.part_size
        for begin in range(0, candidates, size):
            part = slice(begin, begin + size)
            durations = np.ascontiguousarray(durations_s[:, part])
            if occupied_s is None and not latency_s:
                yield part, self._instant(durations, rows)
            else:
                wire = None if occupied_s is None else np.ascontiguousarray(occupied_s[:, part])
                yield part, self._wired(durations, rows, wire, latency_s, overlap=overlap)

    def _instant(self, durations_s: Floats, rows: list[Ints]) -> Floats:
        ends = np.empty((self.num_computes + 1, durations_s.shape[1]))
        ends[0] = 0.0
        for level, kinds in zip(self.levels, rows, strict=True):
            begun = ends.take(level.before, axis=0)
            np.maximum(begun, ends.take(level.needed, axis=0), out=begun)
            np.add(begun, durations_s.take(kinds, axis=0), out=ends[level.rows])
        return ends

    def _wired(
        self,
        durations_s: Floats,
        rows: list[Ints],
        occupied_s: Floats | None,
        latency_s: float,
        *,
        overlap: bool,
    ) -> Floats:
        shape = (self.num_computes + 1, durations_s.shape[1])
        ends, sent, arrivals = np.empty(shape), np.empty(shape), np.empty(shape)
        ends[0] = sent[0] = arrivals[0] = 0.0
        release = ends if overlap else np.zeros(shape)
        for level, kinds in zip(self.levels, rows, strict=True):
            at = level.rows
            begun = release.take(level.before, axis=0)
            np.maximum(begun, arrivals.take(level.needed, axis=0), out=begun)
            np.add(begun, durations_s.take(kinds, axis=0), out=ends[at])
            if occupied_s is None:
                sent_now = ends[at]
            else:
                sent_now = np.maximum(ends[at], sent.take(level.link, axis=0), out=sent[at])
                sent_now += np.where(level.sends, occupied_s.take(kinds, axis=0), 0.0)
            np.add(sent_now, np.where(level.sends, latency_s, 0.0), out=arrivals[at])
            if not overlap:
                release[at] = np.where(level.sends, arrivals[at], ends[at])
        return ends


_NONE = -1


class _Graph:
    """What each computation of a schedule waits for, by number; ``_NONE`` is nothing."""

    def __init__(self, schedule: Schedule) -> None:
        m, stages = schedule.num_micro_batches, schedule.num_stages
        size = stages * m
        self.rows = [
            [
                i.stage * m + i.micro_batch + (size if isinstance(i, Backward) else 0)
                for i in row
                if isinstance(i, Compute)
            ]
            for row in schedule.rows
        ]
        self.before: dict[int, int] = {}
        self.needed: dict[int, int] = {}
        self.link: dict[int, int] = {}
        self.sends: dict[int, bool] = {}
        ranks = schedule.stage_ranks
        for row in self.rows:
            previous, link_previous = _NONE, dict.fromkeys(range(2 * stages), _NONE)
            for c in row:
                stage, backward = c % size // m, c >= size
                other = stage - 1 if backward else stage + 1
                self.before[c], previous = previous, c
                self.sends[c] = 0 <= other < stages and ranks[other] != ranks[stage]
                self.link[c] = link_previous[c // m] if self.sends[c] else _NONE
                link_previous[c // m] = c
                if backward:
                    self.needed[c] = c + m if stage < stages - 1 else c - size
                else:
                    self.needed[c] = c - m if stage else _NONE

    def depths(self) -> dict[int, int]:
        """Return the length of the longest chain of waits before each computation."""
        depth = {_NONE: 0}
        position = [0] * len(self.rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                at = position[rank]
                while at < len(row) and self.needed[row[at]] in depth:
                    c = row[at]
                    depth[c] = 1 + max(depth[self.before[c]], depth[self.needed[c]])
                    at += 1
                moved |= at > position[rank]
                position[rank] = at
        if any(at < len(row) for at, row in zip(position, self.rows, strict=True)):
            message = (
                "the schedule never finishes: let each rank compute what the others wait for first "
                "(simulate() names the computations)"
            )
            raise ScheduleError(message)
        del depth[_NONE]
        return depth


@dataclass(frozen=True, slots=True)
class OrderCosts:
    """The costs of a step, ready to be gathered for many orders of its micro-batches.

    Equal rows, such as those of proportionate stages, are kept once.

    Args:
        kinds_s: Seconds of each kind of computation by micro-batch. Shape ``[kinds][m]``.
        wire_s: Seconds on the wire, of the same shape, or None where nothing takes time.
        row_of: Row in ``[kinds * m]`` of each computation.
        latency_s: Latency of the link.
        overlap: Whether a sender computes on.
    """

    kinds_s: Floats
    wire_s: Floats | None
    row_of: Ints
    latency_s: float
    overlap: bool

    @classmethod
    def of(cls, costs: StepCosts, *, link: Link = _INSTANT, overlap: bool = True) -> Self:
        """Return the costs in this form."""
        stages, m = costs.num_stages, costs.num_micro_batches
        tables = np.array([*costs.forward_s, *costs.backward_s])
        wire = np.zeros_like(tables)
        gradients = costs.gradient_bytes or costs.activation_bytes
        if costs.activation_bytes is not None and stages > 1:
            wire[: stages - 1] = np.array(costs.activation_bytes) / link.bandwidth_bytes_per_s
        if gradients is not None and stages > 1:
            wire[stages + 1 :] = np.array(gradients) / link.bandwidth_bytes_per_s
        both, kind_of = np.unique(np.hstack([tables, wire]), axis=0, return_inverse=True)
        row_of = (kind_of.reshape(-1, 1) * m + np.arange(m)).reshape(-1)
        silent = not wire.any() and (overlap or not link.latency_s)
        return cls(both[:, :m], None if silent else both[:, m:], row_of, link.latency_s, overlap)

    @property
    def equal(self) -> bool:
        """Whether all micro-batches cost the same, so that their order does not matter."""
        tables = [self.kinds_s] if self.wire_s is None else [self.kinds_s, self.wire_s]
        return all(bool((table == table[:, :1]).all()) for table in tables)

    def makespans_s(self, evaluator: Evaluator, orders: Ints) -> Floats:
        """Return the makespan of each order. Shape of ``orders``: ``[candidates][m]``."""
        return self._by_parts(evaluator, evaluator.makespans_s, orders)

    def completions_s(self, evaluator: Evaluator, orders: Ints) -> Floats:
        """Return the mean completion of each order; see ``Evaluator.completions_s``."""
        return self._by_parts(evaluator, evaluator.completions_s, orders)

    def _by_parts(
        self, evaluator: Evaluator, measure: Callable[..., Floats], orders: Ints
    ) -> Floats:
        out = np.empty(len(orders))
        size = evaluator.part_size
        for begin in range(0, len(orders), size):
            part = orders[begin : begin + size]
            out[begin : begin + size] = measure(
                self._gather(self.kinds_s, part),
                row_of=self.row_of,
                occupied_s=None if self.wire_s is None else self._gather(self.wire_s, part),
                latency_s=self.latency_s,
                overlap=self.overlap,
            )
        return out

    def _gather(self, table: Floats, orders: Ints) -> Floats:
        columns = np.ascontiguousarray(orders.T)
        gathered: Floats = table.take(columns, axis=1).reshape(-1, len(orders))
        return gathered


def evaluator_for(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    warm_up: Sequence[int] | float | None = None,
) -> Evaluator:
    """Return the evaluator of a schedule by name; results are kept. See ``build_schedule``."""
    if warm_up is not None and not isinstance(warm_up, int | float):
        warm_up = tuple(min(int(depth), num_micro_batches) for depth in warm_up)
    return _evaluator_for(name, num_stages, num_micro_batches, warm_up)


@lru_cache(maxsize=512)
def _evaluator_for(
    name: str, num_stages: int, num_micro_batches: int, warm_up: tuple[int, ...] | float | None
) -> Evaluator:
    return Evaluator.of(build_schedule(name, num_stages, num_micro_batches, warm_up=warm_up))


def check_fits(evaluator: Evaluator, costs: StepCosts) -> None:
    """Raise ``CostError`` unless the costs are for the evaluator's schedule."""
    have = costs.num_stages, costs.num_micro_batches
    need = evaluator.num_stages, evaluator.num_micro_batches
    if have != need:
        message = (
            f"costs are for {have[0]} stages and {have[1]} micro-batches, the schedule has "
            f"{need[0]} and {need[1]}: measure the same partition and micro-batches"
        )
        raise CostError(message)
