"""Metrics of several replicas are worth the same on another number of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric

from pipeswift_lightning.strategies.epoch_position import EpochPosition, metric_states
from pipeswift_lightning.strategies.merged_metrics import merged_metrics


class Own(Metric):
    """Joins its states in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:
        self.total += value

    def compute(self) -> Tensor:
        return self.total


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.cat, self.largest, self.own = MeanMetric(), CatMetric(), MaxMetric(), Own()


def _updated(*values: float) -> Several:
    module = Several()
    for value in values:
        for metric in module.children():
            metric.update(torch.tensor(value))
    return module


@pytest.mark.parametrize("num", [1, 2, 4])
def test_they_are_joined_as_their_states_are(num: int) -> None:
    saved = [metric_states(m) for m in (_updated(1.0, 2.0), _updated(6.0, 9.0), _updated(-3.0))]
    modules: list[Any] = []
    for replica in range(num):
        module = Several()
        with pytest.warns(UserWarning, match=r"\['own'\] start anew.* Rule: .* Remedy: "):
            states = merged_metrics(module, saved, replica, num)
        EpochPosition(0, {}, {}, states).load_metrics(module)  # type: ignore[arg-type]
        modules.append(module)
    total = sum(m.mean.mean_value for m in modules) / sum(m.mean.weight for m in modules)
    assert total == 3.0
    listed = [float(v) for m in modules for v in m.cat.value]
    assert listed == [1.0, 2.0, 6.0, 9.0, -3.0]
    assert all(m.largest.max_value == 9.0 for m in modules)
    assert all(m.own.total == 0 for m in modules)
