"""Packed micro-batches, formed and ordered together with the simulator in the loop.

Samples are moved and swapped between *positions* of the order, and positions with each other; each
round times a set of such changes at once, takes the best, and carries the next best over to the
next round where they touch other positions. Everything is decided by numbers of evaluations and a
fixed seed, so that every rank finds the same micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeswift_lightning.plan.evaluator import Evaluator, Floats, Ints
from pipeswift_lightning.plan.formation import (
    Formation,
    assign_to_targets,
    check_count,
    form_to_targets,
    tapered_targets,
)

__all__ = ["Packed", "StageRates", "pack"]

Bools: TypeAlias = npt.NDArray[np.bool_]

_CELLS = 12_000_000  # Computations times formations timed: about 0.1 to 0.2 s.
_FOR_EACH_PAIR = 1000  # Most formations timed for each pair of a sample and a position.
_LEAST_SHARES = (0.3, 0.6, 0.9)
_SAMPLE, _CARRIED = 200, 30
_MOVES, _SWAPS = 0.35, 0.9  # Shares of the changes: up to here moves, up to here swaps.
_PATIENCE = 8
_KICK = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """What a micro-batch costs on each stage: ``fixed + rate * cost``, in seconds.

    Args:
        forward: Rate of the forward. Shape ``[num_stages]``.
        backward: Rate of the backward; the same shape.
        fixed_forward_s: What each forward takes however small the micro-batch.
        fixed_backward_s: The same for each backward.
        latency_s: Latency between neighbouring stages.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches in the order in which they run.

    Args:
        formation: Samples of the micro-batch at each position.
        makespan_s: Simulated makespan.
        evaluations: Number of formations timed.
    """

    formation: Formation
    makespan_s: float
    evaluations: int


def pack(
    costs: Sequence[float],
    evaluator: Evaluator,
    rates: StageRates,
    *,
    tokens: Sequence[float] | None = None,
    max_tokens: float = math.inf,
    evaluations: int | None = None,
    seed: int = 0,
) -> Packed:
    """Return packed micro-batches, and their order, with the least simulated makespan found.

    Starts from the best of balanced and tapered formations (see ``form_to_targets``).

    Args:
        costs: Cost of each sample. Shape ``[N]``.
        evaluator: Of the schedule, whose number of micro-batches is the one formed.
        rates: What a micro-batch costs on each stage.
        tokens: Length of each sample, for ``max_tokens``. None: the costs.
        max_tokens: Most tokens of a micro-batch.
        evaluations: Budget of the search. None: some 0.1 s.
        seed: Of the search.

    Raises:
        MicroBatchError: There are fewer samples than micro-batches, or the tokens do not fit.

    Example:
        >>> from pipeswift_lightning.plan.evaluator import evaluator_for
        >>> rates = StageRates(forward=(1, 1), backward=(2, 2))
        >>> packed = pack([7, 5, 4, 3, 2, 2, 1], evaluator_for("1f1b", 2, 3), rates)
        >>> packed.makespan_s
        92.0
    """
    m = evaluator.num_micro_batches
    check_count(len(costs), m)
    state = _State(np.array(costs, dtype=float), tokens, max_tokens)
    timer = _Timer(evaluator, rates)
    starts = _starts(costs, evaluator, tokens=tokens, max_tokens=max_tokens)
    loads = np.zeros((len(starts), m))
    np.add.at(loads, (np.arange(len(starts))[:, None], starts), state.costs)
    values = timer.makespans_s(loads)
    first = int(values.argmin())
    state.restart(starts[first], m)
    if evaluations is None:
        few = _FOR_EACH_PAIR * len(costs) * m
        evaluations = min(few, _CELLS // evaluator.num_computes)
    search = _Search(state, timer, np.random.default_rng(seed), float(values[first]))
    if m > 1 and len(costs) > m:
        search.run(evaluations - len(starts))
    formation = Formation.of(search.best.tolist())
    return Packed(formation, search.best_value, len(starts) + search.evaluations)


def _starts(
    costs: Sequence[float],
    evaluator: Evaluator,
    *,
    tokens: Sequence[float] | None,
    max_tokens: float,
) -> Ints:
    """Return the micro-batch of each sample, for each start that fits. Shape ``[starts][N]``."""
    m, p = evaluator.num_micro_batches, evaluator.num_stages
    ends = sorted({k for k in (0, 1, 2, p - 1, p, 2 * p) if k < m})
    shapes = {(0, 0, 1.0): None}
    shapes.update(
        ((start, end, least), None) for start in ends for end in ends for least in _LEAST_SHARES
    )
    shares = [tapered_targets(m, start=a, end=b, least=least) for a, b, least in shapes]
    targets = np.array(shares) * sum(costs)
    found = assign_to_targets(costs, targets, tokens=tokens, max_tokens=max_tokens)
    fitting = found[(found >= 0).all(1)]
    if not len(fitting):
        form_to_targets(costs, targets[0].tolist(), tokens=tokens, max_tokens=max_tokens)  # says so
    return fitting


class _Timer:
    """Times formations by the costs of their micro-batches."""

    def __init__(self, evaluator: Evaluator, rates: StageRates) -> None:
        m = evaluator.num_micro_batches
        both = [(rate, rates.fixed_forward_s) for rate in rates.forward]
        both += [(rate, rates.fixed_backward_s) for rate in rates.backward]
        kinds = dict.fromkeys(both)
        number = {kind: row for row, kind in enumerate(kinds)}
        self.evaluator, self.latency_s = evaluator, rates.latency_s
        self.rates = np.array([rate for rate, _ in kinds])[:, None, None]
        self.fixed = np.array([fixed for _, fixed in kinds])[:, None, None]
        self.row_of = np.concatenate([number[kind] * m + np.arange(m) for kind in both])

    def makespans_s(self, loads: Floats) -> Floats:
        durations = self.rates * loads.T + self.fixed
        return self.evaluator.makespans_s(
            durations.reshape(-1, len(loads)), row_of=self.row_of, latency_s=self.latency_s
        )


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of a formation: each takes ``cost`` from position ``a`` to ``b``.

    ``first`` is the sample that moves from ``a``; ``second`` the one that comes back from ``b``, or
    -1 if none does. Both are -1 where the positions change places.
    """

    first: Ints
    second: Ints
    a: Ints
    b: Ints
    cost: Floats
    tokens: Floats

    def joined(self, other: Self) -> "_Changes":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return _Changes(*(np.concatenate(pair) for pair in pairs))

    def only(self, which: Ints) -> "_Changes":
        return _Changes(*(getattr(self, f.name)[which] for f in fields(self)))


class _State:
    """Which sample is at which position, and what that makes of the positions."""

    def __init__(self, costs: Floats, tokens: Sequence[float] | None, max_tokens: float) -> None:
        self.costs = costs
        self.lengths = costs if tokens is None else np.array(tokens, dtype=float)
        self.max_tokens = max_tokens
        self.position: Ints = np.empty(0, dtype=np.int64)
        self.loads: Floats = np.empty(0)
        self.tokens: Floats = np.empty(0)
        self.counts: Ints = np.empty(0, dtype=np.int64)

    def restart(self, position: Ints, m: int) -> None:
        self.position = position.copy()
        self.loads = np.bincount(position, weights=self.costs, minlength=m).astype(float)
        self.tokens = np.bincount(position, weights=self.lengths, minlength=m).astype(float)
        self.counts = np.bincount(position, minlength=m)

    def propose(self, random: np.random.Generator, number: int) -> _Changes:
        kind = random.random(number)
        first, second = random.integers(len(self.costs), size=(2, number))
        places = random.integers(len(self.loads), size=(2, number))
        move, exchange = kind < _MOVES, kind >= _SWAPS
        a = np.where(exchange, places[0], self.position[first])
        b = np.where(move | exchange, places[1], self.position[second])

        def taken(values: Floats, at: Floats) -> Floats:
            back = np.where(move, 0.0, values[second])
            out: Floats = np.where(exchange, at[a] - at[b], values[first] - back)
            return out

        return _Changes(
            first=np.where(exchange, -1, first),
            second=np.where(move | exchange, -1, second),
            a=a,
            b=b,
            cost=taken(self.costs, self.loads),
            tokens=taken(self.lengths, self.tokens),
        )

    def allowed(self, changes: _Changes) -> Bools:
        move = (changes.first >= 0) & (changes.second < 0)
        fits: Bools = self.tokens[changes.b] + changes.tokens <= self.max_tokens
        fits &= self.tokens[changes.a] - changes.tokens <= self.max_tokens
        fits &= (changes.a != changes.b) & ~(move & (self.counts[changes.a] < 2))
        return fits

    def loads_after(self, changes: _Changes) -> Floats:
        loads = np.repeat(self.loads[None], len(changes.a), axis=0)
        rows = np.arange(len(changes.a))
        loads[rows, changes.a] -= changes.cost
        loads[rows, changes.b] += changes.cost
        return loads

    def apply(self, changes: _Changes, index: int) -> None:
        a, b, position = changes.a[index], changes.b[index], self.position.copy()
        first, second = changes.first[index], changes.second[index]
        if first < 0:
            position[self.position == a], position[self.position == b] = b, a
        else:
            position[first] = b
            if second >= 0:
                position[second] = a
        self.restart(position, len(self.loads))


class _Search:
    """Descends, and starts again near the best when it stands."""

    def __init__(
        self, state: _State, timer: _Timer, random: np.random.Generator, value: float
    ) -> None:
        self.state, self.timer, self.random = state, timer, random
        self.best, self.best_value, self.evaluations = state.position, value, 0

    def run(self, evaluations: int) -> None:
        """Search until the budget is spent."""
        state, value, idle = self.state, self.best_value, 0
        carried: _Changes | None = None
        while self.evaluations < evaluations:
            changes = state.propose(self.random, _SAMPLE)
            if carried is not None:
                changes = carried.joined(changes)
            values = self.timer.makespans_s(state.loads_after(changes))
            values[~state.allowed(changes)] = math.inf
            self.evaluations += len(values)
            ranked = np.argsort(values, kind="stable")
            first, carried = int(ranked[0]), None
            idle = 0 if values[first] < value else idle + 1
            if values[first] <= value and values[first] < math.inf:
                carried = _untouched(changes, ranked, values, first)
                state.apply(changes, first)
                value = float(values[first])
                if value < self.best_value:
                    self.best, self.best_value = state.position, value
            if idle >= _PATIENCE:
                state.restart(self.best, len(state.loads))
                self._kick()
                value, carried, idle = math.inf, None, 0

    def _kick(self) -> None:
        for _ in range(int(self.random.integers(*_KICK))):
            changes = self.state.propose(self.random, 8)
            allowed = np.flatnonzero(self.state.allowed(changes))
            if len(allowed):
                self.state.apply(changes, int(allowed[0]))


def _untouched(changes: _Changes, ranked: Ints, values: Floats, taken: int) -> _Changes:
    """Return the next best changes of samples that have nothing to do with the one taken."""
    near = ranked[1 : _CARRIED + 1]
    ends = (changes.a[taken], changes.b[taken])
    apart = ~np.isin(changes.a[near], ends) & ~np.isin(changes.b[near], ends)
    return changes.only(near[apart & (changes.first[near] >= 0) & (values[near] < math.inf)])
