"""The order of micro-batches that costs least, by rule or by search."""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import Evaluator, OrderCosts, check_fits
from pipeswift_lightning.plan.ordering import OrderError
from pipeswift_lightning.plan.orders.rules import ORDER_RULES, seeds
from pipeswift_lightning.plan.orders.search import Found, search_orders
from pipeswift_lightning.plan.orders.sessions import session_repair

__all__ = ["ORDERS", "default_evaluations", "find_order"]

ORDERS = (*ORDER_RULES, "searched")

_INSTANT = Link()
# Computations times candidates that take about 20 ms for up to ten micro-batches, 100 ms above.
_FEW, _FEW_CELLS, _MANY_CELLS = 10, 1_200_000, 12_000_000
_MOST = 40_000
_FOR_EACH_ORDER = 20  # Most orders timed for each one there is.
_WIRE_FACTOR = 4  # How much longer a candidate takes when messages occupy links.


def find_order(
    evaluator: Evaluator,
    costs: StepCosts,
    *,
    method: str = "searched",
    link: Link = _INSTANT,
    overlap: bool = True,
    sessions: Sequence[Hashable] | None = None,
    evaluations: int | None = None,
) -> Found:
    """Return the order of the micro-batches by a rule, or the best that a search finds.

    What is minimised is the makespan; without backwards, where no order changes it much, the mean
    time at which a micro-batch is done.

    Args:
        evaluator: Of the schedule that will run.
        costs: Of the same stages and micro-batches.
        method: One of ``ORDERS``.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on.
        sessions: Session of each micro-batch; those of one session keep their order.
        evaluations: Budget of the search; None takes ``default_evaluations``.

    Raises:
        OrderError: The method is unknown, or ``sessions`` has another length.
        CostError: The costs are for another schedule.

    Example:
        >>> from pipeswift_lightning.plan.evaluator import evaluator_for
        >>> costs = StepCosts(forward_s=[[3, 1, 2, 1]] * 2, backward_s=[[6, 2, 4, 2]] * 2)
        >>> evaluator = evaluator_for("1f1b", 2, 4)
        >>> find_order(evaluator, costs, method="fifo").value
        32.0
        >>> find_order(evaluator, costs)
        Found(order=(3, 0, 2, 1), value=26.0, evaluations=...)
    """
    if method not in ORDERS:
        message = (
            f"order {method!r} is not known. Rule: one of {', '.join(ORDERS)}. Remedy: take "
            "'searched' for the least step time, 'fifo' to keep the order of the data"
        )
        raise OrderError(message)
    check_fits(evaluator, costs)
    prepared = OrderCosts.of(costs, link=link, overlap=overlap)
    repair = session_repair(sessions, costs.num_micro_batches)

    def measure(orders: np.ndarray) -> np.ndarray:
        if evaluator.has_backward:
            return prepared.makespans_s(evaluator, orders)
        return prepared.completions_s(evaluator, orders)

    if method != "searched":
        starts, budget = np.array([ORDER_RULES[method](costs)]), 0
    else:
        starts = seeds(costs)
        budget = default_evaluations(evaluator, prepared) if evaluations is None else evaluations
    return search_orders(measure, starts, evaluations=budget, repair=repair)


def default_evaluations(evaluator: Evaluator, costs: OrderCosts) -> int:
    """Return the number of orders that take about 20 ms (100 ms above ten micro-batches)."""
    if costs.equal:
        return 0
    m = evaluator.num_micro_batches
    cells = _FEW_CELLS if m <= _FEW else _MANY_CELLS
    number = cells // evaluator.num_computes // (1 if costs.wire_s is None else _WIRE_FACTOR)
    return min(number, _MOST, _FOR_EACH_ORDER * math.factorial(min(m, _FEW)))
