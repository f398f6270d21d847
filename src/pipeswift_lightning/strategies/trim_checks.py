"""Compare steps with and without the padding that micro-batches can do without."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.strategies.comparison import (
    NOTHING_FITS,
    Matches,
    compare_each,
    compare_metrics,
    compare_outputs,
)
from pipeswift_lightning.strategies.loss_scope import LossPolicy
from pipeswift_lightning.strategies.options import LossScope
from pipeswift_lightning.strategies.rounding import rounding_in_use
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["TrimChecks"]


class TrimChecks:
    """Sees at times whether a step gives the same without padding, and turns trimming off if not.

    Args:
        session: Runs steps.
        policy: Says what rounding may explain.
        announced: Sends what the last stage has found to all stages.
    """

    def __init__(
        self, session: PipelineSession, policy: LossPolicy, announced: Callable[[Any], Any]
    ) -> None:
        self._session, self._policy, self._announced = session, policy, announced
        self._planner = session.planner

    def may_run(self, step: StepCall) -> bool:
        """Whether a training step, just planned and weighted, may run without its padding."""
        if not self._planner.is_checked(step):
            return True
        if not self._takes_widths(step):
            return False
        with _told_of_padding():
            padded = self._session.look(self._planner.untrimmed(step), LossScope.PER_SAMPLE)
            trimmed = self._session.look(step, LossScope.PER_SAMPLE)
        found: list[Matches] = []
        if self._session.is_last:
            rounding = self._rounding(step)
            found = compare_each(padded, trimmed, rounding)
            found.append(compare_metrics(padded, trimmed, rounding))
        return self._explained(found, step)

    def of_evaluation(
        self, call: StepCall, weighted: Callable[[StepCall], StepCall | None] = lambda step: step
    ) -> StepCall:
        """Return an evaluation's step to run, planned and trimmed if that changes nothing.

        Its network sees micro-batches as they are planned, its other code the whole batch.

        Args:
            call: The step as it is.
            weighted: Gives a planned step its weights, if they are known.
        """
        planned = weighted(self._planner.planned(call))
        trim = None if planned is None else planned.trim
        if planned is None or trim is None or not (trim.cuts and trim.is_reversible):
            return call
        if not self._planner.is_checked(planned):
            return planned
        if not self._takes_widths(planned):
            return call
        with _told_of_padding():
            whole = self._session.look(call, LossScope.WHOLE_BATCH)
            hostile = replace(planned, trim=replace(trim, is_hostile=True))
            trimmed = self._session.look(hostile, LossScope.WHOLE_BATCH)
        found: list[Matches] = []
        if self._session.is_last:
            same = compare_outputs(whole, trimmed, self._rounding(call))
            found = [NOTHING_FITS if trimmed.failure else same]
        return planned if self._explained(found, call) else call

    def _takes_widths(self, step: StepCall) -> bool:
        """Whether a step runs on its narrowest micro-batch: a network may want rows of one width.

        Tried without data, since a run that fails on one stage alone would end all.
        """
        assert step.samples is not None
        assert step.lengths is not None
        lengths = step.lengths
        widths = [max(lengths[i] for i in part) for part in step.samples]
        found: list[Matches] = []
        try:
            self._session.try_out(step, step.micro_batches[widths.index(min(widths))])
        except Exception:  # noqa: BLE001 -- it has run on the shapes of the whole batch
            found = [NOTHING_FITS]
        return self._explained(found, step, "does not run")

    def _explained(
        self, found: list[Matches], call: StepCall, what: str = "gives other values"
    ) -> bool:
        """Whether rounding explains what the last stage has found to differ."""
        if all(map(self._policy.explained, self._announced(found))):
            return True
        self._planner.keep_padding(call.hook)
        rank_zero_info(
            f"pipeswift: {call.hook} {what} without its padding, so micro-batches keep it, and "
            "samples stay in the data's order."
        )
        return False

    def _rounding(self, call: StepCall) -> float:
        return rounding_in_use(self._session.module, call.context, self._session.device)


@contextmanager
def _told_of_padding() -> Iterator[None]:
    """Say what is compared in a block, if that fails."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "pipeswift: while comparing micro-batches with and without their padding. If the step "
            "needs the padding, set PipeSwiftStrategy(trim=False)."
        )
        raise
