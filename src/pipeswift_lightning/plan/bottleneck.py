"""Where to cut the layers so that the slowest stage is fastest: what is asked, and the solver."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["LayerMemory", "PartitionError", "StageProblem", "solve_starts"]

Floats: TypeAlias = npt.NDArray[np.float64]

# Bottlenecks to try, as multiples of the lower bound: a tight one leaves few pairs of cuts to see.
_GUESSES = (1.02, 1.1, 1.25, 1.6, 2.5, 5.0, math.inf)
_ROUNDING = 1e-9


class PartitionError(ValueError):
    """Layers that cannot be split as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What the layers hold in memory, and how much the stages' devices have.

    A stage needs ``sum(static_bytes) + in_flight * sum(activation_bytes)`` over its layers.

    Args:
        static_bytes: Parameters, gradients and optimiser state of each layer. Shape ``[n]``.
        activation_bytes: What each layer keeps of one micro-batch for its backward. Shape ``[n]``.
        in_flight: Micro-batches in flight on each stage. Shape ``[num_stages]``.
        capacity_bytes: Memory of each stage's device. Shape ``[num_stages]``.
        recomputed_bytes: What each layer keeps of one micro-batch if it is recomputed, to tell
            whether that is a remedy. Shape ``[n]``. None: not known.
    """

    static_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]
    capacity_bytes: tuple[float, ...]
    recomputed_bytes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, tuple(values))
                _check_values(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Layers, devices and links: all that decides how good a cut is.

    Args:
        costs_s: Time of each layer on the fastest device, in seconds. Shape ``[n]``.
        num_stages: Number of stages, ``1 <= num_stages <= n``.
        slowdown: By how much each stage's device is slower; above 0. Shape ``[num_stages]``.
            None: all are equal.
        cut_s: Time that a cut before layer ``k`` costs the stage on either side of it: bytes over
            bandwidth, and latency. Shape ``[n]``; the first is not used. None: cuts are free.
        forbidden_cuts: Layers before which no cut may lie.
        memory: What the layers need and the devices have. None: memory does not matter.

    Raises:
        PartitionError: A value is negative or not finite, or a sequence has another length.

    Example:
        >>> problem = StageProblem(costs_s=(1.0, 1.0, 1.0, 3.0), num_stages=2, slowdown=(1.0, 2.0))
        >>> solve_starts(problem), problem.bottleneck_s((0, 3))
        ((0, 3), 6.0)
    """

    costs_s: tuple[float, ...]
    num_stages: int
    slowdown: tuple[float, ...] | None = None
    cut_s: tuple[float, ...] | None = None
    forbidden_cuts: frozenset[int] = field(default_factory=frozenset)
    memory: LayerMemory | None = None

    def __post_init__(self) -> None:
        for name in ("costs_s", "slowdown", "cut_s"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        object.__setattr__(self, "forbidden_cuts", frozenset(self.forbidden_cuts))
        n, stages = len(self.costs_s), self.num_stages
        if not 1 <= stages <= n:
            message = (
                f"cannot split {n} layers into {stages} stages. Rule: each has a layer. Remedy: "
                f"use between 1 and {n} stages, or a model of more layers"
            )
            raise PartitionError(message)
        for name, length in (("costs_s", n), ("slowdown", stages), ("cut_s", n)):
            self._check(name, getattr(self, name), length)
        if self.slowdown is not None and min(self.slowdown) == 0:
            message = (
                f"slowdown={list(self.slowdown)} is not allowed. Rule: above 0 each. Remedy: 1 for "
                "the fastest device"
            )
            raise PartitionError(message)
        if self.memory is not None:
            for name in ("static_bytes", "activation_bytes", "recomputed_bytes"):
                self._check(name, getattr(self.memory, name), n)
            for name in ("in_flight", "capacity_bytes"):
                self._check(name, getattr(self.memory, name), stages)

    def _check(self, name: str, values: Sequence[float] | None, length: int) -> None:
        if values is None:
            return
        if len(values) != length:
            message = (
                f"{name} has {len(values)} entries. Rule: one for each of the {length} "
                f"{'layers' if length == len(self.costs_s) else 'stages'}. Remedy: give all of them"
            )
            raise PartitionError(message)
        _check_values(name, values)

    def stage_s(self, starts: Sequence[int]) -> tuple[float, ...]:
        """Return the time of each stage, its share of the cuts included."""
        slowdown = self.slowdown or (1.0,) * self.num_stages
        cut = (0.0, *(self.cut_s or (0.0,) * len(self.costs_s))[1:], 0.0)
        bounds = (*starts, len(self.costs_s))
        return tuple(
            sum(self.costs_s[a:b]) * slow + cut[a] + cut[b]
            for slow, (a, b) in zip(slowdown, pairwise(bounds), strict=True)
        )

    def bottleneck_s(self, starts: Sequence[int]) -> float:
        """Return the time of the slowest stage."""
        return max(self.stage_s(starts))

    def stage_bytes(self, starts: Sequence[int]) -> tuple[float, ...]:
        """Return the memory that each stage needs; nothing without ``memory``."""
        if self.memory is None:
            return ()
        return tuple(
            sum(self.memory.static_bytes[a:b]) + held * sum(self.memory.activation_bytes[a:b])
            for held, (a, b) in zip(
                self.memory.in_flight, pairwise((*starts, len(self.costs_s))), strict=True
            )
        )


def solve_starts(problem: StageProblem) -> tuple[int, ...]:
    """Return the first layer of each stage such that the slowest stage is fastest.

    Exact dynamic programming over the layers from the end (PipeDream, SOSP '19, section 3.1, with
    what PipeDream left out: unequal devices, cuts that both sides pay, memory). With ``best[r][i]``
    the least bottleneck of layers ``i..n-1`` on stages ``r..p-1``::

        best[r][i] = min over j of max(cost[r](i..j-1), best[r+1][j])

    A guess ``T`` of the bottleneck bounds ``j`` to stages not longer than ``T``, and ``i`` to what
    stages within ``T`` before and after it can hold; the result is exact if it is at most ``T``,
    otherwise a larger guess is tried. With a good guess ``n^2`` steps instead of ``p n^2``.

    Returns:
        Layer indices, the first 0. Shape ``[num_stages]``. Ties go to the earliest split, and the
        stages after it are again best for their layers; so every rank finds the same partition.

    Raises:
        PartitionError: Nothing fits into memory (with a table and what would help), or too many
            cuts are forbidden.
    """
    starts = _solve(_tables(problem))
    if starts is not None:
        return starts
    if problem.memory is None or _solve(_tables(replace(problem, memory=None))) is None:
        message = (
            f"cannot cut {len(problem.costs_s)} layers into {problem.num_stages} stages with "
            f"{len(problem.forbidden_cuts)} cuts forbidden. Rule: {problem.num_stages - 1} cuts "
            "are needed. Remedy: use fewer stages, or forbid fewer cuts"
        )
        raise PartitionError(message)
    raise PartitionError(_does_not_fit(problem, problem.memory))


@dataclass(frozen=True, slots=True)
class _Tables:
    """The problem as running sums: ``prefix_s[r][k]`` is layers ``0..k-1`` on stage ``r``."""

    prefix_s: Floats
    cut_s: Floats
    open_cuts: npt.NDArray[np.bool_]
    prefix_bytes: Floats | None = None
    capacity_bytes: tuple[float, ...] = ()


def _tables(problem: StageProblem) -> _Tables:
    n = len(problem.costs_s)
    slowdown = np.array(problem.slowdown or [1.0] * problem.num_stages)
    cut_s = np.zeros(n + 1)
    if problem.cut_s is not None:
        cut_s[1:n] = problem.cut_s[1:]
    open_cuts = np.ones(n + 1, dtype=bool)
    open_cuts[[k for k in problem.forbidden_cuts if 0 < k < n]] = False
    memory = problem.memory
    return _Tables(
        prefix_s=slowdown[:, None] * _running(problem.costs_s),
        cut_s=cut_s,
        open_cuts=open_cuts,
        prefix_bytes=None if memory is None else _prefix_bytes(memory),
        capacity_bytes=() if memory is None else memory.capacity_bytes,
    )


def _prefix_bytes(memory: LayerMemory) -> Floats:
    held = np.array(memory.in_flight, dtype=float)[:, None]
    prefix: Floats = _running(memory.static_bytes) + held * _running(memory.activation_bytes)
    return prefix


def _running(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])


def _solve(tables: _Tables) -> tuple[int, ...] | None:
    """Return the best starts, or None if there are none."""
    prefix = tables.prefix_s
    rates = prefix[:, -1]  # Whole model on each device; stages that share it ideally take `bound`.
    bound = 1 / np.sum(1 / rates) if rates.min() > 0 else 0.0
    bound = max(float(bound), float(np.diff(prefix, axis=1).max(axis=1).min()))
    for guess in _GUESSES if bound > 0 else (math.inf,):
        starts = _solve_within(tables, guess * bound if guess < math.inf else math.inf)
        if starts is not None:
            return starts
    return None


def _solve_within(tables: _Tables, limit_s: float) -> tuple[int, ...] | None:
    """Return the best starts if their bottleneck is at most ``limit_s``, else None."""
    prefix = tables.prefix_s
    stages, n = prefix.shape[0], prefix.shape[1] - 1
    reach = _reach(prefix, limit_s)
    if reach is None:
        return None
    first, last = reach
    best = np.full(n + 2, math.inf)
    best[n] = 0.0
    splits: list[tuple[int, npt.NDArray[np.int64]]] = []
    for r in reversed(range(stages)):
        begin = np.arange(first[r], last[r] + 1)
        stop = np.searchsorted(prefix[r], prefix[r][begin] + limit_s * (1 + _ROUNDING), "right")
        width = max(1, min(int((stop - begin).max()) - 1, n - int(begin[0])))
        end = begin[:, None] + np.arange(1, width + 1)
        np.minimum(end, n + 1, out=end)
        value = _stage_costs(tables, r, begin, end)
        np.maximum(value, best[end], out=value)
        chosen = value.argmin(axis=1)
        above = np.full(n + 2, math.inf)
        above[begin] = np.where(
            tables.open_cuts[begin], value[np.arange(len(begin)), chosen], math.inf
        )
        best = above
        splits.append((int(begin[0]), begin + 1 + chosen))
    if not best[0] <= limit_s * (1 + _ROUNDING) or best[0] == math.inf:
        return None
    starts = [0]
    for offset, split in splits[:0:-1]:
        starts.append(int(split[starts[-1] - offset]))
    return tuple(starts)


def _stage_costs(
    tables: _Tables, r: int, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> Floats:
    """Return the time of stage ``r`` for each begin and end; infinite where it does not fit."""
    prefix = np.append(tables.prefix_s[r], math.inf)
    cost: Floats = prefix[end] - prefix[begin][:, None]
    if tables.cut_s.any():
        cut = np.append(tables.cut_s, 0.0)
        cost += cut[end] + cut[begin][:, None]
    if tables.prefix_bytes is not None:
        held = np.append(tables.prefix_bytes[r], math.inf)
        too_much = held[end] - held[begin][:, None] > tables.capacity_bytes[r]
        cost[too_much] = math.inf
    return cost


def _reach(prefix: Floats, limit_s: float) -> tuple[list[int], list[int]] | None:
    """Return the first and last layer at which each stage can begin, cuts and memory left out."""
    stages, n = prefix.shape[0], prefix.shape[1] - 1
    slack = limit_s * (1 + _ROUNDING)
    last = [0]
    for r in range(stages - 1):
        furthest = int(np.searchsorted(prefix[r], prefix[r][last[-1]] + slack, "right")) - 1
        last.append(min(furthest, n - (stages - 1 - r)))
    first = [n]
    for r in reversed(range(stages)):
        nearest = int(np.searchsorted(prefix[r], prefix[r][first[-1]] - slack, "left"))
        first.append(max(nearest, r))
    first = first[:0:-1]
    if any(a > b for a, b in zip(first, last, strict=True)):
        return None
    return first, last


def _does_not_fit(problem: StageProblem, memory: LayerMemory) -> str:
    """Return a table of the fullest stages of the leanest partition, and what would make it fit."""
    starts = _leanest(problem, memory)
    needed = problem.stage_bytes(starts)
    bounds = (*starts, len(problem.costs_s))
    lines = ["stage  layers      static  in flight  x each  =  needed    device"]
    for r, (a, b) in enumerate(pairwise(bounds)):
        static, each = sum(memory.static_bytes[a:b]), sum(memory.activation_bytes[a:b])
        over = "  too much" if needed[r] > memory.capacity_bytes[r] else ""
        lines.append(
            f"{r:5d}  {f'{a}-{b - 1}':9s} {_amount(static):>8s}  {memory.in_flight[r]:9d} "
            f"{_amount(each):>7s} {_amount(needed[r]):>10s} {_amount(memory.capacity_bytes[r]):>9s}"
            f"{over}"
        )
    remedies = _remedies(problem, memory) or ["take devices with more memory, or a smaller model"]
    return (
        f"{len(problem.costs_s)} layers do not fit the memory of {problem.num_stages} stages; the "
        "least full partition needs\n" + "\n".join(lines) + "\nRule: static + in flight x each <= "
        f"device on every stage. Remedy, the cheapest first: {'; or '.join(remedies)}"
    )


def _leanest(problem: StageProblem, memory: LayerMemory) -> tuple[int, ...]:
    """Return the partition whose fullest device, in relation to its memory, is least full."""
    share = _prefix_bytes(memory) / np.maximum(np.array(memory.capacity_bytes), 1e-300)[:, None]
    tables = _tables(replace(problem, memory=None, cut_s=None))
    starts = _solve(replace(tables, prefix_s=share))
    assert starts is not None  # for the type checker: it exists without memory
    return starts


def _remedies(problem: StageProblem, memory: LayerMemory) -> list[str]:
    """Return the changes of one kind that make the layers fit, the cheapest first."""
    found: list[str] = []
    for parts in (2, 4, 8, 16):
        smaller = replace(
            memory, activation_bytes=tuple(a / parts for a in memory.activation_bytes)
        )
        if _fits(problem, smaller):
            found.append(f"make micro-batches {parts} times smaller (and {parts} times as many)")
            break
    if memory.recomputed_bytes is not None:
        recomputed = replace(memory, activation_bytes=memory.recomputed_bytes)
        if _fits(problem, recomputed):
            found.append("recompute the layers in backward (recompute=True)")
    for more in range(
        1, min(3 * problem.num_stages, len(problem.costs_s) - problem.num_stages) + 1
    ):
        head = tuple(memory.in_flight[0] + k for k in range(more, 0, -1))
        deeper = replace(
            memory,
            in_flight=(*head, *memory.in_flight),
            capacity_bytes=(min(memory.capacity_bytes),) * more + memory.capacity_bytes,
        )
        wider = replace(problem, num_stages=problem.num_stages + more, slowdown=None, memory=None)
        if _fits(wider, deeper):
            found.append(f"use {wider.num_stages} stages")
            break
    return found


def _fits(problem: StageProblem, memory: LayerMemory) -> bool:
    return _solve(_tables(replace(problem, memory=memory))) is not None


def _amount(number_of_bytes: float) -> str:
    """Return bytes in the largest unit that leaves a whole number.

    Example:
        >>> _amount(3 * 2**30), _amount(1500)
        ('3.0 GiB', '1.5 KiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number_of_bytes >= size:
            return f"{number_of_bytes / size:.1f} {unit}"
    return f"{number_of_bytes:.0f} B"


def _check_values(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not 0 <= value < math.inf:
            message = (
                f"{name}[{index}]={value} is no cost. Rule: finite, and 0 or more. Remedy: measure "
                "the layer again"
            )
            raise PartitionError(message)
