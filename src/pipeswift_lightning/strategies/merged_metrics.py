"""States of torchmetrics of several replicas, for another number of replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

__all__ = ["merged_metrics"]

States = Mapping[str, Any]


def merged_metrics(
    module: nn.Module, replicas: Sequence[States], replica: int, num: int
) -> dict[str, Any]:
    """Return what one replica takes, so that all together compute what those before would have.

    Sums and lists go to the first replica; the others start from nothing. Means and extremes go to
    all. A metric that joins its states in another way is started anew, with a warning.

    Args:
        module: The user's, whose metrics say how their states are joined.
        replicas: What `metric_states` returned on each replica.
        replica: The one to return it for.
        num: How many there are now.
    """
    found: dict[str, Any] = {}
    lost = []
    for name, metric in module.named_modules():
        states = [states[name] for states in replicas if name in states]
        if not isinstance(metric, Metric) or not states:
            continue
        if not all(_is_known(metric, key) for key in metric._defaults):
            lost.append(name)
            continue
        updates = max(1, sum(state["updates"] for state in states) // num)
        values = {
            key: _joined(metric, key, [state["values"][key] for state in states], replica)
            for key in metric._defaults
        }
        found[name] = {"updates": updates, "values": values}
    if lost:
        rank_zero_warn(
            f"pipeswift: the metrics {lost} start anew within the epoch: the checkpoint is of "
            "another number of replicas, and their states are joined by functions of their own. "
            "Rule: sum, mean, max, min and cat are known. Remedy: the same number of replicas, or "
            "a checkpoint of an epoch's end"
        )
    return found


def _is_known(metric: Metric, key: str) -> bool:
    reduce: Any = metric._reductions[key]
    if isinstance(metric._defaults[key], list):
        return reduce is dim_zero_cat
    return reduce in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)


def _joined(metric: Metric, key: str, parts: list[Any], replica: int) -> Tensor | list[Tensor]:
    default = metric._defaults[key]
    reduce: Any = metric._reductions[key]
    if isinstance(default, list):
        lists = [part if isinstance(part, list) else [part] for part in parts]
        return [] if replica else [value for part in lists for value in part]
    if reduce is dim_zero_sum and replica:
        return default.clone()
    joined: Tensor = reduce(torch.stack(parts))
    return joined
