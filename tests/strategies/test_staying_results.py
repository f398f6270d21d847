"""Logged results are moved only where they have to be."""

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from torchmetrics.aggregation import MeanMetric

from pipeswift_lightning.strategies.staying_results import staying_results


def _logged(value: object, **options: object) -> _ResultCollection:
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", value, on_step=True, batch_size=2, **options)  # type: ignore[arg-type]
    return results


def test_a_result_in_place_is_left_alone() -> None:
    results = _logged(torch.tensor(1.0))
    metric = results["training_step.loss"]
    meta = metric.meta
    with staying_results():
        results.log("training_step", "loss", torch.tensor(4.0), on_step=True, batch_size=1)
    assert metric.meta is meta, "a move copies it"
    assert metric.value == 6.0
    assert metric.cumulated_batch_size == 3
    results.log("training_step", "loss", torch.tensor(4.0), on_step=True, batch_size=1)
    assert metric.meta is not meta, "Lightning moves it in any case: if not, delete the module"


def test_a_result_elsewhere_moves() -> None:
    results = _logged(torch.tensor(1.0))
    metric = results["training_step.loss"]
    with staying_results():
        metric.to(torch.device("meta"))
    assert metric.value.is_meta
    assert metric.cumulated_batch_size.is_meta
    with staying_results(), pytest.raises(NotImplementedError):
        metric.to(torch.device("cpu"))  # it would have to be moved back, which cannot be


def test_a_metric_object_moves_as_ever() -> None:
    own = MeanMetric()
    results = _logged(own, metric_attribute="own")
    with staying_results():
        results["training_step.loss"].to(torch.device("meta"))
    assert own.mean_value.is_meta


def test_lightnings_own_move_is_back_afterwards() -> None:
    before = _ResultMetric.to
    with staying_results():
        assert _ResultMetric.to is not before
    assert _ResultMetric.to is before
