"""Whether the user's loss sees a micro-batch at a time or the whole batch, and with what weight."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pipeswift_lightning.strategies.comparison import LOSS, Matches, Shares
from pipeswift_lightning.strategies.loss_weights import Rule, WeightError, Weighting
from pipeswift_lightning.strategies.options import LossScope

__all__ = ["LossPolicy", "is_checked", "joined_states"]

_ALWAYS_CHECKED = 4
_PATIENCE = 16  # checks that leave the loss's rule open
_EXCLUDED = 4.0  # times what rounding explains
_CLEARLY = 4.0  # times the best rule's errors
_NOISE = 0.05  # errors of this size, in units of rounding, say nothing


@dataclass(slots=True)
class _Evidence:
    """What checks have shown of rules that gave a value different weights, yet all fitted it."""

    checks: int = 0
    errors: dict[Rule, float] = field(default_factory=dict)

    def better(self, rules: tuple[Rule, ...], errors: Mapping[Rule, float]) -> tuple[Rule, ...]:
        """Take a check's errors, and return the rules that are not clearly worse than the best."""
        self.checks += 1
        for rule in rules:
            self.errors[rule] = self.errors.get(rule, 0.0) + errors[rule]
        if self.checks < _ALWAYS_CHECKED:
            return rules
        bound = max(_NOISE * self.checks, _CLEARLY * min(self.errors[rule] for rule in rules))
        return tuple(rule for rule in rules if self.errors[rule] <= bound)

    def badness(self, rule: Rule) -> float:
        """Return by how much a rule has been off so far, beyond noise: the first of equals wins."""
        return max(_NOISE * self.checks, self.errors.get(rule, math.inf))


class LossPolicy:
    """Chooses the scope of each training step and its weights, alike on every rank.

    A loss that is a mean over samples (or over tokens) may be taken micro-batch by micro-batch,
    each weighted by its samples (or tokens), which lets a backward begin early. Whether it is one
    cannot be seen in the code. So ``"auto"`` takes the first steps whole, which is always exact,
    and compares them with what the micro-batches give under each rule: the loss and every logged
    value. If all agree, later steps run micro-batch by micro-batch, and the check is repeated after
    4, 8, 16, ... steps, and on each batch for which the rules that are left give different weights;
    at the first value that no rule explains the whole batch is kept for good.

    A coarse precision may let several rules fit. One is chosen only if it fits clearly better over
    some checks; else the loss sees whole batches. A logged value goes with the loss meanwhile, and
    a loss that is not computed on whole batches (the network's own) with the rule that fits best.

    Args:
        chosen: What the user asked for.
        rules: The rules that may be the loss's.
        told: Whether the user has named the weights, so that of rules that fit alike the likeliest
            is meant.
    """

    def __init__(self, chosen: LossScope, rules: tuple[Rule, ...], *, told: bool = False) -> None:
        self._chosen = chosen
        self._told = told
        self._steps = 0
        self._left: dict[str, tuple[Rule, ...]] = {LOSS: rules}
        # Logged values may be means over samples, whatever the loss is.
        self._rules = tuple(dict.fromkeys((*rules, Rule.SAMPLES)))
        self._options = [str(chosen), told, *map(str, rules)]
        self._evidence: dict[str, _Evidence] = {}
        self._misses = 0  # checks in a row that rounding may or may not explain
        self.whole = chosen is LossScope.WHOLE_BATCH

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to choose alike."""
        left = {name: [str(rule) for rule in rules] for name, rules in self._left.items()}
        evidence = {
            name: (mine.checks, {str(rule): error for rule, error in mine.errors.items()})
            for name, mine in self._evidence.items()
        }
        return {
            "options": self._options,
            "steps": self._steps,
            "whole": self.whole,
            "left": left,
            "evidence": evidence,
            "misses": self._misses,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, unless the scope or the rules are others since: then begin anew."""
        if state.get("options") != self._options:
            return
        self._steps, self.whole, self._misses = state["steps"], state["whole"], state["misses"]
        self._left = {name: tuple(map(Rule, rules)) for name, rules in state["left"].items()}
        self._evidence = {
            name: _Evidence(checks, {Rule(rule): error for rule, error in errors.items()})
            for name, (checks, errors) in state["evidence"].items()
        }

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
            shares: The micro-batches' shares by each of ``rules`` that has some for this batch,
                the likeliest rule first.
        """
        if self._chosen is LossScope.PER_SAMPLE:
            return LossScope.PER_SAMPLE, False
        if self.whole:
            return LossScope.WHOLE_BATCH, False
        step, self._steps = self._steps, self._steps + 1
        check = (
            is_checked(step) or self._misses > 0 or any(self._open(n, shares) for n in self._left)
        )
        return (LossScope.WHOLE_BATCH if check else LossScope.PER_SAMPLE), check

    def _open(self, name: str, shares: Shares) -> bool:
        """Whether a value's weights for a batch need a check."""
        if not _undecided(self._left[name], shares):
            return False
        # A logged value that never told its rules apart, such as a constant, holds nothing up.
        mine = self._evidence.get(name)
        return name == LOSS or mine is None or mine.checks < _ALWAYS_CHECKED

    def weighting(self, shares: Shares) -> Weighting:
        """Return the weights of a step that runs micro-batch by micro-batch."""
        loss = self._choose(LOSS, shares)
        logged = {
            name: self._choose(name, shares, first=loss) for name in self._left if name != LOSS
        }
        return Weighting(
            None if loss is Rule.SAMPLES else shares[loss],
            {name: None if r is Rule.SAMPLES else shares[r] for name, r in logged.items()},
        )

    def _choose(self, name: str, shares: Shares, *, first: Rule | None = None) -> Rule:
        left = self._left[name]
        if first in left and first is not None:
            return first
        fitting = [rule for rule in shares if rule in left]
        if not fitting:
            msg = (
                'loss_weight="tokens", but the batch has no integer tensor named "labels". '
                'Rule: tokens are counted in batch["labels"]. Remedy: define '
                "micro_batch_weight(micro_batch) on the LightningModule, returning the number of "
                "tokens that its loss is a mean over"
            )
            raise WeightError(msg)
        mine = self._evidence.get(name)
        return fitting[0] if mine is None else min(fitting, key=mine.badness)

    def settled(self, shares: Shares) -> Weighting | None:
        """Return the weights of the loss for a batch, if training has found them."""
        if self.whole or not self._steps or _undecided(self._left[LOSS], shares):
            return None
        return Weighting(self.weighting(shares).loss)

    def learn(self, matches: Matches, shares: Shares) -> None:
        """Take the result of a check."""
        for name, errors in matches.items():
            left = self._left.get(name, self._rules)
            kept = tuple(rule for rule in left if errors.get(rule, math.inf) <= _EXCLUDED)
            if not kept:
                if self._steps > _ALWAYS_CHECKED:
                    rank_zero_warn(
                        "pipeswift: some of the steps since the last check may have weighted "
                        "micro-batches in a way that this batch does not allow. Set "
                        'PipeSwiftStrategy(loss="whole_batch") to rule that out from the start.'
                    )
                what = "the loss" if name == LOSS else f"the logged value {name!r}"
                self._keep_whole(
                    f"{what} of a batch differs from the mean of its micro-batches' by more than "
                    "rounding",
                    'PipeSwiftStrategy(loss="per_sample") would weight micro-batches by their '
                    "samples instead.",
                )
                return
            if _apart(kept, shares):
                kept = self._evidence.setdefault(name, _Evidence()).better(kept, errors)
            if name == LOSS:
                missed = min(errors[rule] for rule in kept) > 1
                self._misses = self._misses + 1 if missed else 0
                kept = self._not_for_ever(kept, shares)
            self._left[name] = kept

    @staticmethod
    def explained(matches: Matches) -> bool:
        """Whether rounding may explain what differs in each value."""
        return all(
            min(errors.values(), default=math.inf) <= _EXCLUDED for errors in matches.values()
        )

    def _not_for_ever(self, kept: tuple[Rule, ...], shares: Shares) -> tuple[Rule, ...]:
        """End the checks of a loss that they do not decide."""
        evidence = self._evidence.get(LOSS)
        open_still = evidence is not None and _apart(kept, shares) and evidence.checks >= _PATIENCE
        if open_still and self._told:
            kept = (next(rule for rule in shares if rule in kept),)
        elif open_still or self._misses >= _PATIENCE:
            self._keep_whole(
                f"{_PATIENCE} checks in this precision do not tell whether the loss is a mean by "
                + " or by ".join(kept),
                'If you know, set PipeSwiftStrategy(loss_weight="samples") or "tokens", or define '
                "micro_batch_weight(micro_batch) on the LightningModule.",
            )
        return kept

    def _keep_whole(self, why: str, remedy: str) -> None:
        if self.whole:
            return
        self.whole = True
        rank_zero_info(
            f"pipeswift: {why}, so the loss sees whole batches: exact, in GPipe's order, with all "
            f"micro-batches in flight. {remedy}"
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
