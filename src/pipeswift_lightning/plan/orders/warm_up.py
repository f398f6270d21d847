"""Choose the order of the micro-batches and 1F1B's depth of warm-up together.

A deeper warm-up hides latency and evens out unequal micro-batches, at the memory of more of them in
flight; which order is best depends on it.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import Evaluator, Floats, Ints, OrderCosts, evaluator_for
from pipeswift_lightning.plan.orders.rules import seeds
from pipeswift_lightning.plan.orders.search import Found, search_orders
from pipeswift_lightning.plan.orders.sessions import Repair, session_repair
from pipeswift_lightning.plan.schedules.one_f_one_b import WarmUpError

__all__ = ["WarmFound", "find_order_and_warm_up", "standard_depths"]

Depths: TypeAlias = tuple[int, ...]

_INSTANT = Link()
_ALL = 128  # Depths that are all tried, if there are no more.
_SEARCHED = 4  # Depths for which an order is searched, each round.
_ROUNDS = 3
_CELLS, _MANY_CELLS = 700_000, 3_000_000  # Of one search; see orders.default_evaluations.
_MOST = 12_000  # Orders timed by one search.
_FEW = 10


@dataclass(frozen=True, slots=True)
class WarmFound:
    """The best pair of order and depths.

    Args:
        order: ``order[position] = micro-batch id``.
        warm_up: Depth of each stage. Shape ``[num_stages]``.
        makespan_s: Its simulated makespan.
    """

    order: tuple[int, ...]
    warm_up: Depths
    makespan_s: float


def standard_depths(num_stages: int, num_micro_batches: int, factor: float = 1.0) -> Depths:
    """Return 1F1B's depths, ``ceil(factor * (p-1-r)) + 1``, at most ``m``.

    Example:
        >>> standard_depths(4, 8), standard_depths(4, 6, factor=2.0)
        ((4, 3, 2, 1), (6, 5, 3, 1))
    """
    return tuple(
        min(num_micro_batches, math.ceil(round(factor * (num_stages - 1 - r), 9)) + 1)
        for r in range(num_stages)
    )


def find_order_and_warm_up(
    costs: StepCosts,
    in_flight_limit: Sequence[int],
    *,
    link: Link = _INSTANT,
    overlap: bool = True,
    sessions: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> WarmFound:
    """Return the order and the depths of 1F1B's warm-up with the least makespan found.

    All depths within the limit are tried with a set of starting orders, or a family of them if
    there are more than some hundred; orders are searched for the best, and tried on all again.

    Args:
        costs: Of the stages and micro-batches.
        in_flight_limit: Micro-batches that may be in flight on each stage. Shape ``[num_stages]``.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on.
        sessions: Session of each micro-batch; those of one session keep their order.
        seed: Of the search.

    Raises:
        WarmUpError: A limit is below 1, or there is not one a stage.

    Example:
        >>> costs = StepCosts(forward_s=[[3, 1, 2, 1]] * 2, backward_s=[[6, 2, 4, 2]] * 2)
        >>> find_order_and_warm_up(costs, [4, 1])
        WarmFound(order=(3, 0, 2, 1), warm_up=(3, 1), makespan_s=25.0)
    """
    stages, m = costs.num_stages, costs.num_micro_batches
    if len(in_flight_limit) != stages or min(in_flight_limit) < 1:
        message = (
            f"in_flight_limit={list(in_flight_limit)} does not fit {stages} stages. Rule: one "
            "limit of 1 or more a stage. Remedy: if not even one micro-batch fits, make it smaller"
        )
        raise WarmUpError(message)
    limits = tuple(min(m, *in_flight_limit[: r + 1]) for r in range(stages))
    search = _Search(OrderCosts.of(costs, link=link, overlap=overlap), stages, m, limits)
    return search.run(seeds(costs), session_repair(sessions, m), seed)


class _Search:
    """Orders and depths tried so far."""

    def __init__(self, costs: OrderCosts, stages: int, m: int, limits: Depths) -> None:
        self.costs, self.stages, self.m, self.limits = costs, stages, m, limits
        self.all_tried = False
        self.depths = self._family()
        cells = _CELLS if m <= _FEW else _MANY_CELLS
        number = cells // (2 * stages * m) // (1 if costs.wire_s is None else 4)
        self.evaluations = 0 if costs.equal else min(number, _MOST)

    def run(self, orders: Ints, repair: Repair | None, seed: int) -> WarmFound:
        """Search orders for the best depths, then depths for the best orders, and so on."""
        if repair is not None:
            orders = repair(orders)
        best: WarmFound | None = None
        done: dict[Depths, Found] = {}
        for _ in range(_ROUNDS):
            values = {depths: self._values(depths, orders) for depths in self.depths}
            ranked = sorted(values, key=lambda d: (float(values[d].min()), d))
            for depths in [d for d in ranked if d not in done][:_SEARCHED]:
                good = np.argsort(values[depths], kind="stable")
                found = search_orders(
                    partial(self.costs.makespans_s, self._evaluator(depths)),
                    orders[good],
                    evaluations=self.evaluations,
                    repair=repair,
                    seed=seed,
                )
                done[depths] = found
            depths, found = min(done.items(), key=lambda item: (item[1].value, item[0]))
            now = WarmFound(found.order, depths, found.value)
            if best is not None and not now.makespan_s < best.makespan_s:
                break
            best = now
            orders = np.vstack([orders, *(np.array([f.order]) for f in done.values())])
            if not self.all_tried:
                self.depths = list(dict.fromkeys([*self.depths, *self._near(depths)]))
        assert best is not None  # for the type checker: there is a round
        return best

    def _values(self, depths: Depths, orders: Ints) -> Floats:
        return self.costs.makespans_s(self._evaluator(depths), orders)

    def _evaluator(self, depths: Depths) -> Evaluator:
        return evaluator_for("1f1b", self.stages, self.m, warm_up=depths)

    def _family(self) -> list[Depths]:
        """Return all depths if they are few, else those between the standard's and the limit."""
        few = list(itertools.islice(_falling(self.limits), _ALL + 1))
        if len(few) <= _ALL:
            self.all_tried = True
            return few
        family = [
            standard_depths(self.stages, self.m, factor) for factor in (1.0, 1.25, 1.5, 1.75, 2.0)
        ]
        family.append((self.m,) * self.stages)
        return list(dict.fromkeys(self._within(depths) for depths in family))

    def _near(self, depths: Depths) -> Iterable[Depths]:
        """Yield depths that differ by one on a run of stages."""
        for a in range(self.stages):
            for b in range(a + 1, self.stages + 1):
                for step in (-1, 1):
                    moved = [d + step * (a <= r < b) for r, d in enumerate(depths)]
                    yield self._within(moved)

    def _within(self, depths: Sequence[int]) -> Depths:
        """Return the depths cut down to the limits, so that they never rise."""
        out: list[int] = []
        for depth, limit in zip(depths, self.limits, strict=True):
            out.append(max(1, min(depth, limit, *out[-1:])))
        return tuple(out)


def _falling(limits: Depths, above: int | None = None) -> Iterable[Depths]:
    """Yield every sequence of depths within the limits that never rises."""
    if not limits:
        yield ()
        return
    top = limits[0] if above is None else min(limits[0], above)
    for depth in range(top, 0, -1):
        for rest in _falling(limits[1:], depth):
            yield (depth, *rest)
