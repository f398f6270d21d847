"""Search an order with the simulator in the loop.

Iterated local search over swaps and insertions. Everything is decided by numbers of evaluations and
a fixed seed, never by a clock, so that every rank finds the same order.

* Few micro-batches: several chains, each tries its *whole* neighbourhood and takes the best step.
* Many: one chain that tries a random part of the neighbourhood, and with it the steps that were
  second best in the round before, one by one and joined: most of them are still good.

A chain that finds nothing better goes back to its best order and takes a few steps at random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from pipeswift_lightning.plan.evaluator import Floats, Ints
from pipeswift_lightning.plan.orders.sessions import Repair

__all__ = ["Found", "Measure", "search_orders"]

Measure: TypeAlias = Callable[[Ints], Floats]

_SMALL = 12  # Micro-batches up to which whole neighbourhoods are tried.
_CHAINS = 16
_SAMPLE = 160  # Neighbours that a round tries.
_KEEP, _JOIN = 40, 16  # Steps carried over to the next round; how many of them are joined.
_PATIENCE = 6  # Rounds without gain before a chain is kicked.
_KICK = (1, 3)  # Steps of a kick, from and below.
_FROM_OWN_BEST = 0.7  # Share of kicks from the chain's own best order, not from the best of all.


@dataclass(frozen=True, slots=True)
class Found:
    """The best order of a search.

    Args:
        order: ``order[position] = micro-batch id``.
        value: What was minimised, in seconds.
        evaluations: Number of orders that were timed.
    """

    order: tuple[int, ...]
    value: float
    evaluations: int


def search_orders(
    measure: Measure, starts: Ints, *, evaluations: int, repair: Repair | None = None, seed: int = 0
) -> Found:
    """Return the best order found.

    Args:
        measure: Seconds of each order; what is minimised.
        starts: Orders to start from. Shape ``[starts][m]``.
        evaluations: About how many orders to time; the starts are timed always.
        repair: What makes an order admissible; see ``session_repair``.
        seed: Of the random steps. The same seed finds the same order.
    """
    if repair is not None:
        starts = repair(starts)
    values = measure(starts)
    m = starts.shape[1]
    ranked = np.argsort(values, kind="stable")
    left = evaluations - len(starts)
    search = _Search(measure, repair, np.random.default_rng(seed), _moves(m))
    if m < 2 or left <= 0 or len(search.moves) == 0:
        pass
    elif m <= _SMALL:
        search.whole(*_distinct(starts[ranked], values[ranked], _CHAINS), left)
    else:
        search.sampled(starts[ranked[0]], float(values[ranked[0]]), left)
    if not search.best_value < values[ranked[0]]:
        search.best, search.best_value = starts[ranked[0]], float(values[ranked[0]])
    return Found(tuple(search.best.tolist()), search.best_value, len(starts) + search.evaluations)


class _Search:
    """The state of one search: the best order of all, and the number of evaluations."""

    def __init__(
        self, measure: Measure, repair: Repair | None, random: np.random.Generator, moves: Ints
    ) -> None:
        self.measure, self.repair, self.random, self.moves = measure, repair, random, moves
        self.best, self.best_value = np.empty(0, dtype=np.int64), np.inf
        self.evaluations = 0

    def whole(self, orders: Ints, values: Floats, evaluations: int) -> None:
        """Let chains take the best step of their whole neighbourhood, until the budget is spent."""
        orders, values = orders.copy(), values.copy()
        best, best_values = orders.copy(), values.copy()
        chains = np.arange(len(orders))
        while self.evaluations < evaluations:
            candidates, timed = self._time(orders[:, self.moves].reshape(-1, orders.shape[1]))
            timed = timed.reshape(len(orders), -1)
            chosen = timed.argmin(axis=1)
            stepped = candidates.reshape(*timed.shape, -1)[chains, chosen]
            gained = timed[chains, chosen] < values
            for chain in chains:
                if gained[chain]:
                    orders[chain], values[chain] = stepped[chain], timed[chain, chosen[chain]]
                    if values[chain] < best_values[chain]:
                        best[chain], best_values[chain] = orders[chain], values[chain]
                else:
                    own = self.random.random() < _FROM_OWN_BEST
                    orders[chain] = self._kick(best[chain] if own else self.best)
                    values[chain] = np.inf

    def sampled(self, order: Ints, value: float, evaluations: int) -> None:
        """Let one chain take the best of a sample of steps, until the budget is spent."""
        best, best_value = order, value
        carried: list[Ints] = []
        idle = 0
        while self.evaluations < evaluations:
            picked = self.moves[self.random.integers(len(self.moves), size=_SAMPLE)]
            steps = np.concatenate([*(step[None] for step in carried), picked])
            candidates, timed = self._time(order[steps])
            ranked = np.argsort(timed, kind="stable")[:_KEEP]
            first = ranked[0]
            idle = 0 if timed[first] < value else idle + 1
            carried = []
            if timed[first] <= value:
                carried = _carry([steps[i] for i in ranked[1:] if timed[i] < value])
                order, value = candidates[first], float(timed[first])
                if value < best_value:
                    best, best_value = order, value
            if idle >= _PATIENCE:
                order, value, carried, idle = self._kick(best), np.inf, [], 0

    def _time(self, orders: Ints) -> tuple[Ints, Floats]:
        if self.repair is not None:
            orders = self.repair(orders)
        values = self.measure(orders)
        self.evaluations += len(orders)
        first = values.argmin()
        if values[first] < self.best_value:
            self.best, self.best_value = orders[first].copy(), float(values[first])
        return orders, values

    def _kick(self, order: Ints) -> Ints:
        for _ in range(int(self.random.integers(*_KICK))):
            order = order[self.moves[self.random.integers(len(self.moves))]]
        return order if self.repair is None else self.repair(order[None])[0]


def _carry(steps: Sequence[Ints]) -> list[Ints]:
    """Return the steps, and the first of them joined one after the other."""
    joined: list[Ints] = []
    for step in steps[1:_JOIN]:
        joined.append((joined[-1] if joined else steps[0])[step])
    return [*steps, *joined]


def _distinct(orders: Ints, values: Floats, number: int) -> tuple[Ints, Floats]:
    _, first = np.unique(orders, axis=0, return_index=True)
    kept = np.sort(first)[:number]
    return orders[kept], values[kept]


@lru_cache(maxsize=32)
def _moves(m: int) -> Ints:
    """Return every swap and every insertion, as ``new order = order[move]``."""
    places = np.arange(m)
    first, second = (pairs.ravel() for pairs in np.meshgrid(places, places, indexing="ij"))
    upward = first < second
    swaps = np.tile(places, (int(upward.sum()), 1))
    rows = np.arange(len(swaps))
    swaps[rows, first[upward]], swaps[rows, second[upward]] = second[upward], first[upward]
    far = np.abs(first - second) > 1  # An insertion next door is a swap.
    source, target = first[far, None], second[far, None]
    # Those between move up by one: down the line if the source lies before, else up.
    inserts = places + ((source <= places) & (places < target)).astype(np.int64)
    inserts -= (target < places) & (places <= source)
    np.put_along_axis(inserts, target, source, axis=1)
    return np.concatenate([swaps, inserts]).astype(np.int64)
