"""From one call of a Lightning step hook to a run of the pipeline, and back."""

import zlib
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeswift_lightning.runtime.batching import num_samples, split_batch
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.loss_scope import LossPolicy
from pipeswift_lightning.strategies.options import LossScope, PipelineOptions
from pipeswift_lightning.strategies.records import MergedLog, logged_alike, replay
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.step import StepCall, StepProgram
from pipeswift_lightning.strategies.whole_batch import WholeBatchProgram

__all__ = ["StepHook", "StepRunner"]


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
        self._seed = torch.initial_seed()
        self._evaluations = 0
        self._largest_batch = 0
        self._warned = False
        self._policy = LossPolicy(options.loss)

    def run(self, hook: StepHook, args: tuple[Any, ...], precision: Precision) -> Any:
        """Run one step; returns what the user's step would have returned for the whole batch."""
        self._session.progress.mark(f"preparing {hook.method}")
        batch, *rest = args
        if self._runs_whole():
            return self._run_whole(hook, args, precision)
        call = self._call(hook, batch, tuple(rest), precision)
        trace = self._session.look_at(call)
        if self._runs_whole():  # as the look has shown to be needed
            return self._run_whole(hook, args, precision)
        call, scope, check = self._scope(hook, call, trace)
        program = self._session.run(call, scope)
        output, logs = self._share(program, check=check)
        replicated = self._session.groups.mesh.num_replicas > 1
        replay(self._module, logs, self._session.device, replicated=replicated)
        return output

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
        split = getattr(self._module, "split_batch", split_batch)
        total = num_samples(batch)
        training = hook is StepHook.TRAINING
        smaller = not training or total < self._largest_batch
        plan = self._options.sizes(total, self._session.num_stages, may_be_smaller=smaller)
        if training:
            self._largest_batch = max(self._largest_batch, total)
        trainer = self._module.trainer
        return StepCall(
            hook=hook.method,
            batch=batch,
            micro_batches=split(batch, plan.sizes),
            rest=rest,
            sizes=plan.sizes,
            seed=self._seeds(hook),
            loss_divisor=trainer.accumulate_grad_batches if training else 1,
            context=partial(_context, hook, precision),
            trainable=zlib.crc32(bytes(p.requires_grad for p in self._module.parameters())),
        )

    def _seeds(self, hook: StepHook) -> tuple[int, ...]:
        """Seeds that a resumed run finds again, and that tell replicas apart."""
        step = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        self._evaluations = 0 if hook is StepHook.TRAINING else self._evaluations + 1
        replica = self._session.groups.coordinate.replica
        return (self._seed, replica, hook, step, self._evaluations)

    def _scope(
        self, hook: StepHook, call: StepCall, trace: StepTrace | None
    ) -> tuple[StepCall, LossScope, bool]:
        """Choose what the loss sees. Evaluation sees whole batches: that costs only outputs."""
        if trace is None or len(call.sizes) == 1 or not trace.calls_network:
            return call, LossScope.PER_SAMPLE, False
        if trace.returns_scalar and self._options.loss is not LossScope.PER_SAMPLE:
            self._warn_of_scalar()
            return call.in_one(), LossScope.PER_SAMPLE, False
        if hook is StepHook.TRAINING:
            return call, *self._policy.next_step()
        return call, LossScope.WHOLE_BATCH, False

    def _warn_of_scalar(self) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"pipeswift: {self._session.network.name} returns a scalar, such as a loss of its "
                "own. Whether it is a mean over samples cannot be told, so each batch runs as one "
                "micro-batch: exact, but the stages wait for one another. Compute the loss in the "
                'step instead, or set PipeSwiftStrategy(loss="per_sample") if it is such a mean.'
            )

    def _share(
        self, program: StepProgram | WholeBatchProgram, *, check: bool
    ) -> tuple[Any, list[MergedLog]]:
        """Send the last stage's output and logs to all stages."""
        session = self._session
        result: tuple[Any, list[MergedLog], str | None] = (None, [], None)
        if session.is_last:
            found = session.check(program) if check else None
            result = (*program.result(), found)
        output, logs, found = self._from_last_stage(result)
        if check:
            self._policy.learn(found)
        return output, logs

    def _from_last_stage(self, result: Any) -> Any:
        session = self._session
        if session.num_stages == 1:
            return result
        box = [tree_map_only(Tensor, lambda t: t.cpu(), result)] if session.is_last else [None]
        last = session.groups.mesh.rank(
            stage=session.num_stages - 1, replica=session.groups.coordinate.replica
        )
        with in_collective("waiting for the last stage's loss and logs", session.progress):
            dist.broadcast_object_list(box, src=last, group=session.groups.pipeline)
        output, logs, found = box[0]  # type: ignore[misc]
        return tree_map_only(Tensor, lambda t: t.to(session.device), output), logs, found
