"""Rules that order micro-batches by their cost alone. A new one is a function and a line here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.evaluator import Ints

__all__ = ["ORDER_RULES", "OrderRule", "fifo", "heaviest_first", "hill", "lightest_first", "seeds"]

Order: TypeAlias = tuple[int, ...]
OrderRule: TypeAlias = Callable[[StepCosts], Order]

_MAX_LIGHT_START = 8
_MAX_LIGHT_END = 5


def fifo(costs: StepCosts) -> Order:
    """Return first come, first served: for equal costs, or where the order must not change.

    Example:
        >>> fifo(StepCosts(forward_s=[[3, 1, 2]], backward_s=[[0, 0, 0]]))
        (0, 1, 2)
    """
    return tuple(range(costs.num_micro_batches))


def lightest_first(costs: StepCosts) -> Order:
    """Return the micro-batches by increasing cost of forward and backward, all stages together.

    Example:
        >>> lightest_first(StepCosts(forward_s=[[3, 1, 2]], backward_s=[[0, 0, 0]]))
        (1, 2, 0)
    """
    return _ordered(np.array(costs.forward_s).sum(axis=0) + np.array(costs.backward_s).sum(axis=0))


def heaviest_first(costs: StepCosts) -> Order:
    """Return the micro-batches by decreasing cost: good where the last stage is the slowest.

    Example:
        >>> heaviest_first(StepCosts(forward_s=[[3, 1, 2]], backward_s=[[0, 0, 0]]))
        (0, 2, 1)
    """
    return lightest_first(costs)[::-1]


def shortest_first(costs: StepCosts) -> Order:
    """Return the micro-batches by increasing forward cost: least mean wait without backwards.

    Example:
        >>> shortest_first(StepCosts(forward_s=[[3, 1, 2]], backward_s=[[0, 0, 9]]))
        (1, 2, 0)
    """
    return _ordered(np.array(costs.forward_s).sum(axis=0))


def hill(costs: StepCosts) -> Order:
    """Return light ends and a heavy middle: filling and draining the pipeline stay cheap.

    Example:
        >>> hill(StepCosts(forward_s=[[5, 1, 2, 4, 3]], backward_s=[[0, 0, 0, 0, 0]]))
        (1, 4, 0, 3, 2)
    """
    light = lightest_first(costs)
    return light[0::2] + light[1::2][::-1]


ORDER_RULES: Mapping[str, OrderRule] = MappingProxyType(
    {
        "fifo": fifo,
        "heaviest_first": heaviest_first,
        "lightest_first": lightest_first,
        "shortest_first": shortest_first,
        "hill": hill,
    }
)


def seeds(costs: StepCosts) -> Ints:
    """Return orders to start a search from: all rules, and descents between light ends.

    Returns:
        Distinct orders, first come first served first. Shape ``[seeds][m]``.
    """
    light = lightest_first(costs)
    m = len(light)
    orders = dict.fromkeys(rule(costs) for rule in ORDER_RULES.values())
    orders[light[1::2] + light[0::2][::-1]] = None
    for start in range(1, min(m, _MAX_LIGHT_START + 1)):
        orders[light[:start] + light[start:][::-1]] = None
        orders[light[start:] + light[:start][::-1]] = None
        for end in range(1, min(m - start, _MAX_LIGHT_END + 1)):
            heavy = light[start + end :][::-1]
            orders[light[end : end + start] + heavy + light[:end]] = None
            orders[light[:start] + heavy + light[start : start + end]] = None
    return np.array(list(orders), dtype=np.int64)


def _ordered(weights: np.ndarray) -> Order:
    return tuple(np.argsort(weights, kind="stable").tolist())
