"""What each micro-batch counts for the loss of its batch: its samples, its tokens, or its own word.

A loss that is a mean over tokens is the mean of its micro-batches' losses too, if each counts by
its tokens. Hugging Face's losses are of that kind: a mean over the labels that are not -100.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from pipeswift_lightning.strategies.hugging_face import predicts_next_token
from pipeswift_lightning.strategies.options import LossScope, LossWeight, PipelineOptions

__all__ = ["Rule", "WeightError", "Weighting", "ranked", "rules_for", "shares"]

_IGNORED = -100


class WeightError(ValueError):
    """The weights of micro-batches cannot be told."""


class Rule(StrEnum):
    """A way to weigh a micro-batch."""

    HOOK = "micro_batch_weight()"
    SAMPLES = "samples"
    TOKENS = "labels that are not -100"
    NEXT_TOKENS = "labels that are not -100, without the first of each row"


@dataclass(frozen=True, slots=True)
class Weighting:
    """The shares of a batch's micro-batches, chosen for the loss and for each logged value.

    Attributes:
        loss: Shares of the loss; they sum to 1. ``None``: by samples.
        logged: Shares by name of the logged value, as checks have found them; ``None``: by
            samples, or by the ``batch_size`` that they were logged with. Names that are missing go
            by that ``batch_size`` if they have one, else with the loss.
    """

    loss: tuple[float, ...] | None = None
    logged: Mapping[str, tuple[float, ...] | None] = field(default_factory=dict)

    def of_log(self, name: str, sized: bool) -> tuple[float, ...] | None:  # noqa: FBT001 -- a callback
        """Return the shares for the value logged as ``name``, ``sized`` by a ``batch_size``."""
        return self.logged.get(name, None if sized else self.loss)


def rules_for(module: LightningModule, options: PipelineOptions) -> tuple[Rule, ...]:
    """Return the rules that may be the loss's, the likeliest first."""
    if callable(getattr(module, "micro_batch_weight", None)):
        return (Rule.HOOK,)
    tokens = [Rule.TOKENS, Rule.NEXT_TOKENS]
    if predicts_next_token(module):
        tokens.reverse()
    checked = options.loss is LossScope.AUTO
    match options.loss_weight:
        case LossWeight.SAMPLES:
            return (Rule.SAMPLES,)
        case LossWeight.TOKENS:
            return tuple(tokens)
        case LossWeight.AUTO:
            return (Rule.SAMPLES, *tokens) if checked else (Rule.SAMPLES,)
        case _:
            assert_never(options.loss_weight)


def ranked(rules: Sequence[Rule], *, own_loss: bool) -> tuple[Rule, ...]:
    """Return rules in the order of likelihood for a step.

    A causal model's own loss shifts the labels. A loss that the step computes need not: it is
    taken to count all labels.

    Example:
        >>> ranked([Rule.NEXT_TOKENS, Rule.TOKENS], own_loss=False)[0]
        <Rule.TOKENS: 'labels that are not -100'>
    """
    if own_loss:
        return tuple(rules)
    return tuple(sorted(rules, key=lambda rule: rule is Rule.NEXT_TOKENS))


def shares(
    rule: Rule, module: LightningModule, micro_batches: Sequence[Any], sizes: Sequence[int]
) -> tuple[float, ...] | None:
    """Return the micro-batches' shares in the batch by ``rule``; ``None`` if it has no labels.

    If nothing counts, as in a batch without any label, the samples decide.

    Raises:
        WeightError: The module's ``micro_batch_weight`` returned no finite number of 0 or more.
    """
    weights: Sequence[float]
    match rule:
        case Rule.SAMPLES:
            weights = sizes
        case Rule.HOOK:
            weights = [_own(module, batch) for batch in micro_batches]
        case Rule.TOKENS | Rule.NEXT_TOKENS:
            labels = [_labels(batch) for batch in micro_batches]
            present = [x for x in labels if x is not None]
            if len(present) < len(labels):
                return None
            start = int(rule is Rule.NEXT_TOKENS)
            counted = [(x[:, start:] if x.dim() > 1 else x) != _IGNORED for x in present]
            weights = torch.stack([x.sum() for x in counted]).tolist()
        case _:
            assert_never(rule)
    total = sum(weights)
    if not total:
        weights, total = sizes, sum(sizes)
    return tuple(weight / total for weight in weights)


def _own(module: LightningModule, batch: Any) -> float:
    hook: Any = module.micro_batch_weight
    given = hook(batch)
    weight = float(given)
    if not (math.isfinite(weight) and weight >= 0):
        msg = (
            f"{type(module).__name__}.micro_batch_weight returned {given!r}. Rule: a micro-batch's "
            "weight is a finite number, 0 or more. Remedy: return what its loss is a mean over, "
            "such as its number of tokens"
        )
        raise WeightError(msg)
    return weight


def _labels(batch: Any) -> Tensor | None:
    """Return the batch's labels, if it has integer ones under that name."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    return labels
