"""Whether the user's loss sees a micro-batch at a time or the whole batch, and with what weight."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pipeswift_lightning.strategies.loss_weights import Rule, WeightError, Weighting
from pipeswift_lightning.strategies.options import LossScope
from pipeswift_lightning.strategies.records import (
    LogRecord,
    merge_outputs,
    merge_records,
)

__all__ = [
    "NOTHING_FITS",
    "LossPolicy",
    "Matches",
    "Shares",
    "StepResult",
    "compare",
    "is_checked",
    "joined_states",
]

_ALWAYS_CHECKED = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_LOSS = ""  # among the names of logged values

Shares = Mapping[Rule, tuple[float, ...]]
Matches = Mapping[str, Mapping[Rule, float]]  # the rules that fit each value, with relative errors
NOTHING_FITS: Matches = {_LOSS: {}}


class LossPolicy:
    """Chooses the scope of each training step and its weights, alike on every rank.

    A loss that is a mean over samples (or over tokens) may be taken micro-batch by micro-batch,
    each weighted by its samples (or tokens), which lets a backward begin early. Whether it is one
    cannot be seen in the code. So ``"auto"`` takes the first steps whole, which is always exact,
    and compares them with what the micro-batches give under each rule: the loss and every logged
    value. If all agree, later steps run micro-batch by micro-batch, and the check is repeated after
    4, 8, 16, ... steps, and on each batch for which the rules that are left give different weights;
    at the first value that no rule explains the whole batch is kept for good.

    Args:
        chosen: What the user asked for.
        rules: The rules that may be the loss's.
    """

    def __init__(self, chosen: LossScope, rules: tuple[Rule, ...]) -> None:
        self._chosen = chosen
        self._steps = 0
        self._left: dict[str, tuple[Rule, ...]] = {_LOSS: rules}
        # Logged values may be means over samples, whatever the loss is.
        self._rules = tuple(dict.fromkeys((*rules, Rule.SAMPLES)))
        self._told_apart: dict[str, dict[Rule, float]] = {}
        self._checks_apart: dict[str, int] = {}
        self.whole = chosen is LossScope.WHOLE_BATCH

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to choose alike."""
        left = {name: [str(rule) for rule in rules] for name, rules in self._left.items()}
        return {
            "chosen": str(self._chosen),
            "steps": self._steps,
            "whole": self.whole,
            "left": left,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, unless the user has chosen otherwise since."""
        if state["chosen"] != self._chosen:
            return
        self._steps, self.whole = state["steps"], state["whole"]
        for name, rules in state["left"].items():
            left = tuple(Rule(rule) for rule in rules if rule in self._rules)
            self._left[name] = left or self._left.get(name, self._rules)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules whose weights the next step needs."""
        if self.whole:
            return ()
        if self._chosen is LossScope.AUTO and not self._steps:
            return self._rules
        return tuple(dict.fromkeys(rule for left in self._left.values() for rule in left))

    def next_step(self, shares: Shares) -> tuple[LossScope, bool]:
        """Return the scope of the next training step, and whether to check it.

        Args:
            shares: The micro-batches' shares by each of ``rules`` that has some for this batch.
        """
        if self._chosen is LossScope.PER_SAMPLE:
            return LossScope.PER_SAMPLE, False
        if self.whole:
            return LossScope.WHOLE_BATCH, False
        step, self._steps = self._steps, self._steps + 1
        check = is_checked(step) or any(_undecided(left, shares) for left in self._left.values())
        return (LossScope.WHOLE_BATCH if check else LossScope.PER_SAMPLE), check

    def weighting(self, shares: Shares) -> Weighting:
        """Return the weights of a step that runs micro-batch by micro-batch."""
        chosen = {name: self._choose(name, shares) for name in self._left}
        loss = chosen.pop(_LOSS)
        return Weighting(loss, chosen)

    def _choose(self, name: str, shares: Shares) -> tuple[float, ...] | None:
        rule = next((r for r in self._left[name] if r in shares), None)
        if rule is None:
            msg = (
                'loss_weight="tokens", but the batch has no integer tensor named "labels". '
                'Rule: tokens are counted in batch["labels"]. Remedy: define '
                "micro_batch_weight(micro_batch) on the LightningModule, returning the number of "
                "tokens that its loss is a mean over"
            )
            raise WeightError(msg)
        return None if rule is Rule.SAMPLES else shares[rule]

    def settled(self, shares: Shares) -> Weighting | None:
        """Return the weights of the loss for a batch, if training has found them."""
        left = self._left[_LOSS]
        if self.whole or not self._steps or _undecided(left, shares):
            return None
        return Weighting(self._choose(_LOSS, shares))

    def learn(self, matches: Matches, shares: Shares) -> None:
        """Take the result of a check."""
        for name, fitting in matches.items():
            left = self._left.get(name, self._rules)
            kept = tuple(rule for rule in left if rule in fitting)
            if not kept:
                self._keep_whole("the loss" if name == _LOSS else f"the logged value {name!r}")
                return
            if _apart(kept, shares):
                kept = self._settle(name, kept, fitting)
            self._left[name] = kept

    def _settle(
        self, name: str, kept: tuple[Rule, ...], fitting: Mapping[Rule, float]
    ) -> tuple[Rule, ...]:
        """Choose the better of rules that a low precision cannot tell apart, after a few checks."""
        errors = self._told_apart.setdefault(name, {})
        for rule in kept:
            errors[rule] = errors.get(rule, 0.0) + fitting[rule]
        self._checks_apart[name] = self._checks_apart.get(name, 0) + 1
        if self._checks_apart[name] < _ALWAYS_CHECKED:
            return kept
        return (min(kept, key=lambda rule: errors[rule]),)

    def _keep_whole(self, what_differs: str) -> None:
        if self.whole:
            return
        self.whole = True
        if self._steps > _ALWAYS_CHECKED:
            rank_zero_warn(
                "pipeswift: some of the steps since the last check weighted micro-batches in a "
                "way that the loss of this batch does not allow. Set "
                'PipeSwiftStrategy(loss="whole_batch") to rule that out from the start.'
            )
        rank_zero_info(
            f"pipeswift: {what_differs} of a batch is not the mean of its micro-batches', so "
            "the loss sees whole batches: exact, in GPipe's order, with all micro-batches in "
            'flight. PipeSwiftStrategy(loss="per_sample") would weight micro-batches by their '
            "samples instead."
        )


def joined_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of `LossPolicy` for any replica, from those of all of them before.

    What one replica has refuted is refuted: a loss that is no mean there is none anywhere.

    Example:
        >>> some = {"chosen": "auto", "steps": 3, "whole": False}
        >>> first = {**some, "left": {"": ["samples", "tokens"]}}
        >>> joined_states([first, {**first, "left": {"": ["tokens"]}}])["left"]
        {'': ['tokens']}
        >>> joined_states([first, {**first, "whole": True}])["whole"]
        True
    """
    lefts = [state["left"] for state in states]
    names = dict.fromkeys(name for left in lefts for name in left)
    left: dict[str, list[str]] = {}
    for name in names:
        given = [left[name] for left in lefts if name in left]
        left[name] = [rule for rule in given[0] if all(rule in rules for rules in given)]
    whole = any(state["whole"] for state in states) or not all(left.values())
    return {**states[0], "whole": whole, "left": left}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: of the whole batch, or of each micro-batch."""

    outputs: Sequence[Any]
    records: Sequence[Sequence[LogRecord]]
    sizes: Sequence[int]


def compare(whole: StepResult, parts: StepResult, shares: Shares) -> Matches:
    """Return the rules under which the micro-batches give the loss and each value of the batch."""
    found: dict[str, dict[Rule, float]] = {}
    output, logs = whole.outputs[0], merge_records(whole.records, whole.sizes)
    values = {_LOSS: _loss(output)} | {entry.name: entry.value for entry in logs}
    for rule, share in shares.items():
        weights = None if rule is Rule.SAMPLES else share
        merged = merge_records(parts.records, parts.sizes, lambda _, w=weights: w)  # type: ignore[misc]
        mine = {_LOSS: _loss(merge_outputs(parts.outputs, parts.sizes, weights))}
        mine |= {entry.name: entry.value for entry in merged}
        for name, value in values.items():
            error = _error(value, mine.get(name)) if name in mine else None
            fitting = found.setdefault(name, {})
            if error is not None:
                fitting[rule] = error
    return found


def is_checked(step: int) -> bool:
    """Whether a step is compared with the whole batch whatever is known: the first, then fewer.

    Example:
        >>> [step for step in range(20) if is_checked(step)]
        [0, 1, 2, 3, 4, 8, 16]
    """
    return step < _ALWAYS_CHECKED or step & (step - 1) == 0


def _undecided(rules: Collection[Rule], shares: Shares) -> bool:
    return _apart(rules, shares) or not any(rule in shares for rule in rules)


def _apart(rules: Collection[Rule], shares: Shares) -> bool:
    """Whether the rules give different weights for a batch."""
    known = [shares[rule] for rule in rules if rule in shares]
    return any(abs(x - y) > 1e-12 for a, b in pairwise(known) for x, y in zip(a, b, strict=True))


def _loss(output: object) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _error(whole: Tensor | None, merged: Tensor | None) -> float | None:
    """Return the relative error of ``merged``, or ``None`` if it is more than rounding."""
    if whole is None or merged is None:
        return 0.0 if whole is merged else None
    tolerance = _TOLERANCE.get(whole.dtype, 1e-2)
    a, b = whole.double(), merged.double()
    if not torch.allclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True):
        return None
    return float(((a - b).abs() / b.abs().clamp(min=1e-300)).nan_to_num().max())
