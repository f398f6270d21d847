"""From one call of a Lightning step hook to a run of the pipeline, and back."""

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, assert_never

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.runtime.batching import num_samples, split_batch
from pipeswift_lightning.runtime.formed import form_batches
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.room import forget_peak
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.assembly_times import AssemblyPart
from pipeswift_lightning.strategies.comparison import (
    NOTHING_FITS,
    Matches,
    Shares,
    StepResult,
    compare,
)
from pipeswift_lightning.strategies.cost_calibration import CostCalibration
from pipeswift_lightning.strategies.look_ahead import LookAhead
from pipeswift_lightning.strategies.loss_scope import LossPolicy, is_checked
from pipeswift_lightning.strategies.loss_weights import Rule, ranked, rules_for, shares
from pipeswift_lightning.strategies.options import LossScope, LossWeight, PipelineOptions
from pipeswift_lightning.strategies.records import MergedLog, logged_alike, replay
from pipeswift_lightning.strategies.rounding import rounding_in_use
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.step import StepCall, StepProgram
from pipeswift_lightning.strategies.trim_checks import TrimChecks
from pipeswift_lightning.strategies.whole_batch import WholeBatchProgram

__all__ = ["StepHook", "StepRunner"]

_PATIENCE_S = 1.0  # for a loader that does not give its next batch, when training ends


class StepHook(IntEnum):
    """The step hooks; the value enters the random streams' seeds."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2
    PREDICT = 3

    @property
    def method(self) -> str:
        """Name of the LightningModule's method."""
        return f"{self.name.lower()}_step"


def _in_words(trainer: Trainer, hook: StepHook) -> str:
    """Return which batch a step is at, as the user counts."""
    match hook:
        case StepHook.TRAINING:
            where, index = f" of epoch {trainer.current_epoch}", trainer.fit_loop.batch_idx
        case StepHook.PREDICT:
            where, index = "", trainer.predict_loop.batch_progress.current.ready - 1
        case StepHook.VALIDATION | StepHook.TEST:
            loop = trainer._evaluation_loop
            where, index = "", loop.batch_progress.current.ready - 1
        case _:
            assert_never(hook)
    kind = "sanity-check" if trainer.sanity_checking else hook.name.lower()
    return f"{kind} batch {index}{where} (global step {trainer.global_step})"


def _context(hook: StepHook, precision: Precision) -> AbstractContextManager[Any]:
    """Return the precision plugin's context for a hook."""
    match hook:
        case StepHook.TRAINING:
            return precision.train_step_context()
        case StepHook.VALIDATION:
            return precision.val_step_context()
        case StepHook.TEST:
            return precision.test_step_context()
        case StepHook.PREDICT:
            return precision.predict_step_context()


class StepRunner:
    """Runs step hooks over a session, and gives every rank the same result."""

    def __init__(self, session: PipelineSession, options: PipelineOptions) -> None:
        self._session = session
        self._module: LightningModule = session.module
        self._options = options
        self._planner = session.planner
        self._seed = torch.initial_seed()
        self._evaluations = 0
        self._largest_batch = 0
        self._warned = False
        self._evaluated: dict[StepHook, int | None] = {}
        self._policy = LossPolicy(
            options.loss,
            rules_for(session.module, options),
            told=options.loss_weight is not LossWeight.AUTO,
        )
        self._last: StepCall | None = None
        self._ahead = LookAhead(self._plan_ahead)
        self._calibration = CostCalibration(
            session.planner,
            session.groups,
            session.progress,
            compiles=options.compile is not None,
        )
        self._trims = TrimChecks(session, self._policy, session.talk.from_last)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to draw and to choose as this one would have."""
        return {
            "seed": self._seed,
            "evaluations": self._evaluations,
            "largest_batch": self._largest_batch,
            "loss": self._policy.state(),
            "planner": self._session.planner.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""
        self._seed, self._evaluations = state["seed"], state["evaluations"]
        self._largest_batch = state["largest_batch"]
        self._policy.load_state(state["loss"])
        if "planner" in state:
            self._session.planner.load_state(state["planner"])

    def run(self, hook: StepHook, args: tuple[Any, ...], precision: Precision) -> Any:
        """Run one step; returns what the user's step would have returned for the whole batch."""
        self._session.progress.batch = _in_words(self._module.trainer, hook)
        self._session.progress.mark(f"preparing {hook.method}")
        batch, *rest = args
        if self._runs_whole():
            return self._run_whole(hook, args, precision)
        call = self._call(hook, batch, tuple(rest), precision)
        trace = self._look_at(call)
        if self._runs_whole():  # as the look has shown to be needed
            return self._run_whole(hook, args, precision)
        self._ahead.finish()
        self._calibration.apply()
        step, scope, counted = self._scope(hook, call, trace)
        if hook is StepHook.TRAINING:
            self._planner.note(step)
        if hook is StepHook.TRAINING and self._planner.active and not self._policy.whole:
            self._last = replace(call, micro_batches=(), batch=None, source=None)  # hold no data
            self._ahead.begin(self._module.trainer.fit_loop)
        program = self._session.run(step, scope)
        if hook is StepHook.TRAINING and step.choice is not None:
            self._calibration.note(step.choice, self._session.recorder.step)
        output, logs = self._share(program, counted)
        replicated = self._session.groups.mesh.num_replicas > 1
        replay(self._module, logs, self._session.device, replicated=replicated)
        return output

    def _look_at(self, call: StepCall) -> StepTrace | None:
        """Look how the step hangs together; the first look cuts the module too."""
        if self._session.partition is not None:
            return self._session.look_at(call)
        with self._session.assembly.timing(AssemblyPart.PLAN):
            trace = self._session.look_at(call)
        forget_peak(self._session.device)  # else a step would seem to take what profiling took
        return trace

    def _runs_whole(self) -> bool:
        return self._session.transparent is not None

    def _run_whole(self, hook: StepHook, args: tuple[Any, ...], precision: Precision) -> Any:
        """Run the user's step itself: every rank has what it needs for it."""
        session = self._session
        replicated = session.groups.mesh.num_replicas > 1
        with (
            session.whole_step(hook.method, args[0], self._seeds(hook)),
            logged_alike(self._module, replicated=replicated),
            _context(hook, precision),
        ):
            return getattr(self._module, hook.method)(*args)

    def _call(
        self, hook: StepHook, batch: Any, rest: tuple[Any, ...], precision: Precision
    ) -> StepCall:
        source, packed = batch, isinstance(batch, PackedBatch)
        batch, total = _unpacked(source)
        training = hook is StepHook.TRAINING
        plan = self._sizes(total, smaller=not training or total < self._largest_batch)
        if training:
            self._largest_batch = max(self._largest_batch, total)
        trainer = self._module.trainer
        if packed:
            parts = form_batches(source, [list(part) for part in plan.ranges])
        else:
            parts = getattr(self._module, "split_batch", split_batch)(batch, plan.sizes)
        return StepCall(
            hook=hook.method,
            batch=batch,
            source=source,
            micro_batches=parts,
            rest=rest,
            sizes=plan.sizes,
            seed=self._seeds(hook),
            loss_divisor=trainer.accumulate_grad_batches if training else 1,
            # Plain precision has none, and to ask takes long, for each micro-batch.
            context=nullcontext
            if type(precision) is Precision
            else partial(_context, hook, precision),
            scale=_scale(precision),
            trainable=zlib.crc32(bytes(p.requires_grad for p in self._module.parameters())),
        )

    def _sizes(self, total: int, *, smaller: bool) -> MicroBatches:
        """Return the micro-batches of a batch where no costs choose them."""
        recorded = self._session.recorded
        if recorded is not None and self._options.micro_batches is None and recorded.fits(total):
            return MicroBatches(recorded.sizes)
        return self._options.sizes(total, self._session.num_stages, may_be_smaller=smaller)

    def _plan_ahead(self, batch: Any) -> None:
        """Plan the next batch, as it comes from its loader."""
        assert self._last is not None
        plain, total = _unpacked(batch)
        sizes = self._sizes(total, smaller=total < self._largest_batch).sizes
        ahead = replace(self._last, batch=plain, source=batch, sizes=sizes)
        self._planner.plan_ahead(ahead)

    def close(self) -> None:
        """Wait for what runs beside the steps."""
        self._ahead.finish(_PATIENCE_S)

    def _seeds(self, hook: StepHook) -> tuple[int, ...]:
        """Seeds that a resumed run finds again, and that tell replicas apart."""
        step = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        self._evaluations = 0 if hook is StepHook.TRAINING else self._evaluations + 1
        replica = self._session.groups.coordinate.replica
        return (self._seed, replica, hook, step, self._evaluations)

    def _scope(
        self, hook: StepHook, call: StepCall, trace: StepTrace | None
    ) -> tuple[StepCall, LossScope, Shares | None]:
        """Choose what the loss sees, and the shares that a check of this step compares.

        Evaluation sees whole batches: that costs only outputs.
        """
        if trace is None or len(call.sizes) == 1:
            return call, LossScope.PER_SAMPLE, None
        whole = self._options.loss is not LossScope.PER_SAMPLE
        if (trace.returns_scalar or call.packed) and whole and trace.calls_network:
            return self._scope_of_scalar(hook, call, trace)
        evaluated = hook is not StepHook.TRAINING and trace.calls_network and not call.packed
        if evaluated and not trace.returns_scalar:
            return self._trims.of_evaluation(call), LossScope.WHOLE_BATCH, None
        if evaluated or not trace.calls_network or hook is not StepHook.TRAINING:
            scope = LossScope.WHOLE_BATCH if evaluated else LossScope.PER_SAMPLE
            if call.packed and trace.calls_network:
                call = self._planner.planned(call)
            return self._weighted(call, self._shares(call, trace)), scope, None
        planned = self._planner.planned(call) if not self._policy.whole else call
        counted = self._shares(planned, trace)
        scope, check = self._policy.next_step(counted)
        if scope is LossScope.PER_SAMPLE:
            return self._trimmed(self._weighted(planned, counted), call, trace), scope, None
        return call, scope, self._shares(call, trace) if check else None

    def _trimmed(self, step: StepCall, call: StepCall, trace: StepTrace) -> StepCall:
        """Return the step to run, as it was planned, or with its padding if that matters."""
        if self._trims.may_run(step):
            return step
        plain = self._planner.planned(call)
        return self._weighted(plain, self._shares(plain, trace))

    def _weighted(self, call: StepCall, counted: Shares) -> StepCall:
        return replace(call, weighting=self._policy.weighting(counted))

    def _shares(self, call: StepCall, trace: StepTrace) -> Shares:
        rules = ranked(self._policy.rules, own_loss=trace.returns_scalar)
        given = {r: shares(r, self._module, call.micro_batches, call.sizes) for r in rules}
        return {rule: share for rule, share in given.items() if share is not None}

    def _scope_of_scalar(
        self, hook: StepHook, call: StepCall, trace: StepTrace
    ) -> tuple[StepCall, LossScope, None]:
        """Choose for a network that returns a loss of its own: it sees what the network sees.

        The loss of a whole batch takes one pass of the whole batch, without a pipeline's benefit,
        so it is compared before the step and not in its place.
        """
        if hook is not StepHook.TRAINING:
            return self._scope_of_evaluation(hook, call, trace)
        planned = self._planner.planned(call) if not self._policy.whole else call
        _, check = self._policy.next_step(self._shares(planned, trace))
        counted = self._shares(call, trace)
        if check:
            whole = self._session.look(call.in_one(), LossScope.PER_SAMPLE)
            parts = self._session.look(call, LossScope.PER_SAMPLE)
            found = self._compare(call, whole, parts, counted) if self._session.is_last else {}
            self._policy.learn(self._session.talk.from_last(found), counted)
        if not self._policy.whole:
            step = self._weighted(planned, self._shares(planned, trace))
            return self._trimmed(step, call, trace), LossScope.PER_SAMPLE, None
        self._warn_of_scalar()
        return call.in_one(), LossScope.PER_SAMPLE, None

    def _scope_of_evaluation(
        self, hook: StepHook, call: StepCall, trace: StepTrace
    ) -> tuple[StepCall, LossScope, None]:
        """Join the network's own loss by the weights that training has found, if they hold here.

        Packed rows are no samples: there is nothing that could be split as the micro-batches are.
        """
        if call.packed:
            return call.in_one(), LossScope.PER_SAMPLE, None
        weighting = self._policy.settled(self._shares(call, trace))
        step = self._evaluated.get(hook, 0)
        if weighting is not None and step is not None:
            self._evaluated[hook] = step + 1
            weighted = replace(call, weighting=weighting)
            if not is_checked(step) or self._holds(weighted):
                return self._own_loss_trimmed(weighted, trace), LossScope.WHOLE_BATCH, None
            self._evaluated[hook] = None  # for good
        return call.in_one(), LossScope.PER_SAMPLE, None

    def _own_loss_trimmed(self, call: StepCall, trace: StepTrace) -> StepCall:
        """Return an evaluation's step without padding, if the weights hold for it too."""

        def weighted(planned: StepCall) -> StepCall | None:
            weighting = self._policy.settled(self._shares(planned, trace))
            return None if weighting is None else replace(planned, weighting=weighting)

        return self._trims.of_evaluation(call, weighted)

    def _holds(self, call: StepCall) -> bool:
        """Whether a step gives the same with the network's outputs joined as with one piece."""
        whole = self._session.look(call.in_one(), LossScope.PER_SAMPLE)
        joined = self._session.look(call, LossScope.WHOLE_BATCH)
        share = {Rule.SAMPLES: (1.0,)}
        found = self._compare(call, whole, joined, share) if self._session.is_last else {}
        return self._policy.explained(self._session.talk.from_last(found))

    def _compare(
        self, call: StepCall, whole: StepResult, parts: StepResult, counted: Shares
    ) -> Matches:
        rounding = rounding_in_use(self._module, call.context, self._session.device)
        return compare(whole, parts, counted, rounding)

    def _warn_of_scalar(self) -> None:
        if not self._warned and self._options.loss is LossScope.AUTO:
            self._warned = True
            rank_zero_warn(
                f"pipeswift: {self._session.network.name} returns a scalar, such as a loss of its "
                "own, not known to be a mean of its micro-batches' by samples or by labels, so "
                "each batch runs as one micro-batch: exact, but the stages wait for one another. "
                "Compute the loss in the step instead, set loss_weight, or define "
                "micro_batch_weight(micro_batch) on the LightningModule, returning what the "
                "scalar is a mean over."
            )

    def _share(
        self, program: StepProgram | WholeBatchProgram, counted: Shares | None
    ) -> tuple[Any, list[MergedLog]]:
        """Send the last stage's output and logs to all stages."""
        session = self._session
        result: tuple[Any, list[MergedLog], Matches] = (None, [], {})
        if session.is_last:
            found: Matches = {}
            if counted is not None and isinstance(program, WholeBatchProgram):
                found = NOTHING_FITS
                if program.sizes == program.call.sizes:  # else rows are no samples
                    parts = session.by_micro_batch(program)
                    found = self._compare(program.call, program.whole(), parts, counted)
            result = (*program.result(), found)
        output, logs, matches = session.talk.from_last(result)
        if counted is not None:
            self._policy.learn(matches, counted)
        return output, logs


def _unpacked(source: Any) -> tuple[Any, int]:
    """Return a batch as its step sees it, and its number of samples."""
    if isinstance(source, PackedBatch):
        return dict(source), len(source.lengths)
    return source, num_samples(source)


def _scale(precision: Precision) -> Callable[[Tensor], Tensor]:
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler.scale if scaler is not None else lambda loss: loss
