"""Compare what a step gave for a whole batch with what its micro-batches give, rule by rule."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeswift_lightning.strategies.likeness import relative_error, unlike
from pipeswift_lightning.strategies.loss_weights import Rule
from pipeswift_lightning.strategies.records import LogRecord, merge_outputs, merge_records
from pipeswift_lightning.strategies.rounding import rounding_of

__all__ = ["LOSS", "NOTHING_FITS", "Matches", "Shares", "StepResult", "compare"]
__all__ += ["compare_each", "compare_metrics", "compare_outputs"]

LOSS = ""  # among the names of logged values

Shares = Mapping[Rule, tuple[float, ...]]
Matches = Mapping[str, Mapping[Rule, float]]  # each value's error by rule; 1: as rounding explains
NOTHING_FITS: Matches = {LOSS: {}}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: of the whole batch, or of each micro-batch.

    Attributes:
        outputs: What it returned.
        records: Its calls of ``self.log``.
        sizes: Samples of each micro-batch.
        metrics: What it has added to the states of the module's metrics, all micro-batches
            together.
        failure: What the step raised on the whole batch, once all micro-batches had run.
    """

    outputs: Sequence[Any]
    records: Sequence[Sequence[LogRecord]]
    sizes: Sequence[int]
    metrics: Sequence[Any] = ()
    failure: Exception | None = None


def compare(whole: StepResult, parts: StepResult, shares: Shares, rounding: float) -> Matches:
    """Return how well the micro-batches give the loss and each value of the batch by each rule.

    All is merged in float64, whatever the values' types. An error is relative to the values, or to
    the micro-batches' if these cancel out.

    Args:
        whole: Of the batch.
        parts: Of its micro-batches.
        shares: By rule.
        rounding: The relative error that the precision in use explains.
    """
    found: dict[str, dict[Rule, float]] = {}
    values = _merged(whole, None)
    units = {name: max(rounding, rounding_of(dtype)) for name, dtype in _types(whole).items()}
    for rule, share in shares.items():
        weights = None if rule is Rule.SAMPLES else share
        mine, sizes = _merged(parts, weights), _merged(parts, weights, torch.abs)
        for name, value in values.items():
            error = relative_error(value, mine[name], sizes[name]) if name in mine else math.inf
            found.setdefault(name, {})[rule] = error / units.get(name, rounding)
    return found


def compare_each(some: StepResult, others: StepResult, rounding: float) -> list[Matches]:
    """Return how well two results of the same micro-batches agree, for each micro-batch."""

    def alone(result: StepResult, i: int) -> StepResult:
        return StepResult([result.outputs[i]], [result.records[i]], [result.sizes[i]])

    share = {Rule.SAMPLES: (1.0,)}
    return [
        compare(alone(some, i), alone(others, i), share, rounding) for i in range(len(some.sizes))
    ]


def compare_metrics(some: StepResult, others: StepResult, rounding: float) -> Matches:
    """Return how well two results agree in what they have added to metrics, logged or not."""
    return {"<metrics>": {Rule.SAMPLES: unlike(some.metrics, others.metrics, rounding)}}


def compare_outputs(some: StepResult, others: StepResult, rounding: float) -> Matches:
    """Return how well two results of one batch agree in all that the step has given.

    That is what it returned, what it logged, and what it has added to metrics.
    """
    returned = unlike(list(some.outputs), list(others.outputs), rounding)
    return {
        **compare(some, others, {Rule.SAMPLES: (1.0,)}, rounding),
        **compare_metrics(some, others, rounding),
        "<returned>": {Rule.SAMPLES: returned},
    }


def _merged(
    result: StepResult,
    weights: Sequence[float] | None,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Tensor | None]:
    losses = [_loss(output) for output in result.outputs]
    known = [change(loss.double()) for loss in losses if loss is not None]
    records = [
        [r if r.value is None else replace(r, value=change(r.value.double())) for r in mine]
        for mine in result.records
    ]
    logs = merge_records(records, result.sizes, lambda *_: weights)
    whole = len(known) == len(losses)
    loss = merge_outputs(known, result.sizes, weights) if whole else None
    return {LOSS: loss} | {entry.name: entry.value for entry in logs}


def _types(result: StepResult) -> dict[str, torch.dtype]:
    values = {r.name: r.value for mine in result.records for r in mine}
    values[LOSS] = _loss(result.outputs[0])
    return {name: value.dtype for name, value in values.items() if value is not None}


def _loss(output: object) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None
