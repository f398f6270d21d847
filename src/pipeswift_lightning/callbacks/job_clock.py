"""Hears of what the Trainer does, and keeps the job's account."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer

from pipeswift_lightning.callbacks.job_account import JobAccount, Part
from pipeswift_lightning.callbacks.job_times import job_age_s, note_job_end
from pipeswift_lightning.callbacks.topology_checkpoint import TopologyCheckpoint
from pipeswift_lightning.strategies.action_listener import ActionListener

__all__ = ["JobClock", "planned_steps"]

_SAVE = "save_checkpoint"
_IN_FIRST_STEP = ("profile", "plan", "load")


class JobClock:
    """Tells assembly's parts, training, checkpoints' stalls, evaluation and clean-up apart.

    What checkpoint callbacks do in their hooks is a stall, and so is ``trainer.save_checkpoint``.

    Attributes:
        account: Where the seconds are.
        assembly: Seconds of assembly's parts; their sum is the account's.
    """

    def __init__(self) -> None:
        age_s = job_age_s()
        self._born_s = time.monotonic() - age_s
        self.started = time.time() - age_s
        self.account = JobAccount(self._born_s)
        self.assembly: dict[str, float] = {}
        self._listener = ActionListener(self._action_started, self._action_stopped)
        self._saves: dict[str, bool] = {}
        self._prefixes: tuple[str, ...] = ()
        self._depth = 0
        self._known: Mapping[str, float] = {}
        self._marked_s = self._born_s
        self._first_step_done = False

    def listen(self, trainer: Trainer) -> None:
        """Begin to listen; the time so far was the process's start and the process groups'."""
        kinds = (Checkpoint, TopologyCheckpoint)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        keys = [c.state_key for c in callbacks if isinstance(c, kinds)]
        self._prefixes = tuple(f"[Callback]{key}." for key in keys)
        self._listener.install(trainer.profiler)  # type: ignore[attr-defined]
        groups_s = _assembly_times(trainer).get("groups", 0.0)
        self.mark("process_start")
        groups_s = min(groups_s, self.assembly["process_start"])
        self.assembly["process_start"] -= groups_s
        self.assembly["groups"] = groups_s

    def stop(self) -> None:
        """Listen no more: the job is over."""
        self._listener.remove()
        note_job_end()

    def mark(self, name: str) -> None:
        """Put the time since the last mark down to a part of assembly."""
        now_s = time.monotonic()
        self.assembly[name] = self.assembly.get(name, 0.0) + now_s - self._marked_s
        self._marked_s = now_s
        self.account.advance(now_s)

    def begin_steps(self, trainer: Trainer, part: Part) -> None:
        """Assembly is over, but for what the strategy does in the first step."""
        self.mark("first_batch")
        self.account.switch(part, self._marked_s)
        self._known = _assembly_times(trainer)
        for name in _IN_FIRST_STEP:  # the sanity check may have been the first step
            seconds = min(self._known.get(name, 0.0), self.assembly["first_batch"])
            if seconds > 0:
                self.assembly[name] = self.assembly.get(name, 0.0) + seconds
                self.assembly["first_batch"] -= seconds

    def end_step(self, trainer: Trainer) -> None:
        """After the first step, take from it what was assembly; its batch has been trained on."""
        self.account.advance(time.monotonic())
        if self._first_step_done:
            return
        self._first_step_done = True
        part = self.account.part
        for name, seconds in _assembly_times(trainer).items():
            new_s = min(seconds - self._known.get(name, 0.0), self.account.seconds[part])
            if name in _IN_FIRST_STEP and new_s > 0:
                self.account.move(part, Part.ASSEMBLY, new_s)
                self.assembly[name] = self.assembly.get(name, 0.0) + new_s

    # -- checkpoints --------------------------------------------------------------------------

    def _is_save(self, action: str) -> bool:
        known = self._saves.get(action)
        if known is None:
            known = self._saves[action] = action == _SAVE or action.startswith(self._prefixes)
        return known

    def _action_started(self, action: str) -> None:
        if self._is_save(action) and self.account.part is not Part.ASSEMBLY:
            self._depth += 1
            self.account.enter(Part.CHECKPOINT, time.monotonic())

    def _action_stopped(self, action: str) -> None:
        if self._depth and self._is_save(action):
            self._depth -= 1
            self.account.leave(time.monotonic())


def _assembly_times(trainer: Trainer) -> Mapping[str, float]:
    times: Any = getattr(trainer.strategy, "assembly_times", None)
    return times() if callable(times) else {}


def planned_steps(trainer: Trainer) -> float:
    """Return the optimizer steps after which training ends; infinite if nothing says so."""
    steps = float("inf") if trainer.max_steps < 0 else float(trainer.max_steps)
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if epochs is not None and epochs >= 0:
        accumulate = max(1, trainer.accumulate_grad_batches)
        steps = min(steps, epochs * -(-batches // accumulate))
    return steps


def time_limit_s(trainer: Trainer) -> float:
    """Return the seconds that ``max_time`` leaves; infinite without it."""
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in timers]
    return min((s for s in left if s is not None), default=float("inf"))
