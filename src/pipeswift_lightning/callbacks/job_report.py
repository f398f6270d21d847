"""The job's time, part by part: what its user waited for, and where it went."""

import json
import math
import os
import statistics
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from typing_extensions import override

from pipeswift_lightning.callbacks.job_account import Part
from pipeswift_lightning.callbacks.job_clock import JobClock, planned_steps, time_limit_s
from pipeswift_lightning.callbacks.job_progress import Attempt, Progress, ProgressFile
from pipeswift_lightning.callbacks.job_table import job_table
from pipeswift_lightning.callbacks.job_times import slurm_queue_s
from pipeswift_lightning.callbacks.pipeline import CallbackError, log_scalars
from pipeswift_lightning.callbacks.rates import Rates
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.strategies.argument import (
    COUNT,
    PATH,
    TEXT,
    Argument,
    checked,
    is_positive,
)
from pipeswift_lightning.strategies.logged_facts import log_facts

__all__ = ["JobReport"]

Report = dict[str, Any]
_REPORT, _PROGRESS = "job.json", "progress.json"
_WORK = (Part.TRAINING, Part.REPEATED, Part.CHECKPOINT, Part.EVALUATION)


_ARGUMENTS = {
    "monitor": TEXT.or_none("no metric"),
    "dirpath": PATH.or_none("the trainer's log_dir"),
    "every_n_steps": COUNT,
    "peak_flops": Argument("a number above 0", "peak_flops=312e12, say", is_positive).or_none(
        "what is known of the GPU"
    ),
}


class JobReport(Callback):
    """Say where a job's time goes: to the loggers while it runs, then as a table and ``job.json``.

    Job completion time = queue + assembly + training + repeated + checkpoint + evaluation +
    clean-up, where

    * *queue* is SLURM's, from submission to start; without a scheduler it is left out;
    * *assembly* runs from the start of this process to the first training step: the process's start
      (imports, configuration), the process groups (and the wait for the other processes), the
      model and data (``build``), the checkpoint that is resumed (``load``), Lightning's sanity
      check and the first batch; and, of the first step, what the strategy needs to ``profile`` and
      ``plan``. A second job in the same process begins where the first one ends;
    * *training* is the steps and the waits for their batches;
    * *repeated* is the steps that an earlier attempt had done after the checkpoint that this one
      resumed. ``progress.json`` says how far a job has come; a checkpoint says where that file is;
    * *checkpoint* is how long training stands still for saves: ``trainer.save_checkpoint`` and what
      checkpoint callbacks do in their hooks;
    * *evaluation* is what ran between the training steps and after the last;
    * *clean-up* runs from the end of training to the last hook Lightning calls.

    Every ``every_n_steps`` batches all loggers are given ``job/<part>_s``, ``job/share_<part>`` (of
    the time so far), ``job/elapsed_s``, ``job/left_s`` (at the pace so far; without an end in sight
    there is none), and ``throughput/tokens_per_s``, ``samples_per_s``, ``batches_per_s``; also
    ``flops_per_s`` where the module has ``flops_per_batch`` (a number, or a method that is given
    the batch), and ``mfu`` where the devices' peak is known.

    A step is one batch. On a GPU each step ends with a device synchronisation, or its time would
    be the launch's. Any strategy will do; a strategy with a method ``measured_bubbles() ->
    list[float] | None`` has each stage's idle share shown. That method is called on every rank.

    Args:
        monitor: A logged metric whose first and last validation values are shown.
        dirpath: Folder of ``job.json``. None means the trainer's ``log_dir``, which is its
            ``default_root_dir`` when there is no logger.
        every_n_steps: Batches between two reports to the loggers.
        peak_flops: Of one device, a second, for ``mfu``. None: known for many GPUs.

    Attributes:
        report: What ``job.json`` says, on rank 0.

    Raises:
        CallbackError: An argument is out of its range.
    """

    @checked(_ARGUMENTS, CallbackError)
    def __init__(
        self,
        monitor: str | None = None,
        dirpath: str | Path | None = None,
        every_n_steps: int = 50,
        peak_flops: float | None = None,
    ) -> None:
        self.monitor = monitor
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self.report: Report
        self._file = ProgressFile(Path(_PROGRESS))
        self._earlier: Progress | None = None
        self._clear()

    def _clear(self) -> None:
        self.report = {}
        self._plan_facts: Report = {}
        self._clock = JobClock()
        self._folder = Path()
        self._rates: Rates | None = None
        self._queue_s: float | None = None
        self._progress = Progress(attempts=[])
        self._resumed = self._ended = self._plan_told = False
        self._step_start = 0.0
        self._step_times = array("d")
        self._count = 0
        self._monitored: list[tuple[int, float]] = []
        self._bubbles: list[float] | None = None

    # -- set-up -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"progress": str(self._file.path)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = True
        self._earlier = Progress.read(Path(state_dict["progress"]))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._clear()
        self._earlier = None
        self._clock.listen(trainer)
        log_dir = trainer.log_dir  # a collective: every rank asks, once
        self._folder = Path(self.dirpath or log_dir or trainer.default_root_dir).resolve()
        self._file = ProgressFile(self._folder / _PROGRESS)
        self._rates = Rates(trainer, self.peak_flops)
        if trainer.is_global_zero:
            self._queue_s = slurm_queue_s()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.mark("build")

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.mark("load")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.mark("first_batch" if "load" in self._clock.assembly else "load")
        earlier = self._earlier.attempts if self._earlier is not None else []
        started, step = self._clock.started, trainer.global_step
        attempt = Attempt(started=started, ended=time.time(), from_step=step, to_step=step)
        self._progress = Progress(attempts=[*earlier, attempt])
        if trainer.is_global_zero:
            self._file.write(self._progress, now=True)

    # -- steps --------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_start = time.monotonic()
        again = trainer.global_step < self._progress.reached
        part = Part.REPEATED if again else Part.TRAINING
        if self._clock.account.part is Part.ASSEMBLY:
            self._clock.begin_steps(trainer, part)
        else:
            self._clock.account.switch(part, self._step_start)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._rates is not None
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._clock.end_step(trainer)
        self._step_times.append(time.monotonic() - self._step_start)
        self._rates.add(pl_module, batch)
        if not trainer.is_global_zero:
            return
        self._note_progress(trainer)
        if not self._plan_told:
            self._tell_plan(trainer)
        if len(self._step_times) % self.every_n_steps == 0:
            values = {**self._scalars(trainer), **self._rate_scalars()}
            log_scalars(trainer, values)

    def _note_progress(self, trainer: Trainer, *, now: bool = False) -> None:
        attempt = self._progress.attempts[-1]
        attempt.to_step, attempt.ended = trainer.global_step, time.time()
        attempt.parts_s = {part.value: s for part, s in self._clock.account.seconds.items()}
        self._file.write(self._progress, now=now)

    def _scalars(self, trainer: Trainer) -> dict[str, float]:
        account = self._clock.account
        elapsed_s = account.elapsed_s + (self._queue_s or 0.0)
        values = {"job/elapsed_s": elapsed_s}
        if self._queue_s is not None:
            values |= {"job/queue_s": self._queue_s, "job/share_queue": self._queue_s / elapsed_s}
        for part, seconds in account.seconds.items():
            values[f"job/{part.value}_s"] = seconds
            values[f"job/share_{part.value}"] = seconds / elapsed_s
        left_s = self._left_s(trainer)
        if math.isfinite(left_s):
            values["job/left_s"] = left_s
        return values

    def _left_s(self, trainer: Trainer) -> float:
        """Return the seconds until training ends, if it goes on as it has since its first step."""
        done = trainer.global_step - self._progress.attempts[-1].from_step
        limit_s = time_limit_s(trainer)
        if self._ended or done < 1:
            return 0.0 if self._ended else limit_s
        pace_s = sum(self._clock.account.seconds[part] for part in _WORK) / done
        return min(limit_s, max(0.0, planned_steps(trainer) - trainer.global_step) * pace_s)

    def _rate_scalars(self) -> dict[str, float]:
        assert self._rates is not None
        rates = self._rates.since_last(self._training_s)
        return {f"throughput/{name}": value for name, value in rates.items()}

    @property
    def _training_s(self) -> float:
        seconds = self._clock.account.seconds
        return seconds[Part.TRAINING] + seconds[Part.REPEATED]

    def _tell_plan(self, trainer: Trainer) -> None:
        """Give the plan to the loggers, beside the configuration; and what ran, to the report."""
        self._plan_told = True
        facts = {"strategy": type(trainer.strategy).__name__, **_plan_facts(trainer)}
        log_facts(trainer.loggers, {"job": facts})

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock.account.part is not Part.ASSEMBLY:
            self._clock.account.enter(Part.EVALUATION, time.monotonic())

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock.account.part is Part.EVALUATION:
            self._clock.account.leave(time.monotonic())
        value = trainer.callback_metrics.get(self.monitor) if self.monitor else None
        if value is not None:
            self._monitored.append((trainer.global_step, float(value)))

    # -- the end ------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._step_times or self._rates is None:
            return
        self._clock.account.switch(Part.CLEAN_UP, time.monotonic())
        self._ended = True
        self._count = self._rates.reduced_count(trainer)
        measured_bubbles = getattr(trainer.strategy, "measured_bubbles", None)
        if callable(measured_bubbles):
            self._bubbles = measured_bubbles()
        self._plan_facts = _plan_facts(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._clock.stop()
        if self._ended and trainer.is_global_zero:
            self._finish(trainer, "finished")
            log_scalars(trainer, self._scalars(trainer))
            Console().print(job_table(self.report))

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._clock.stop()
        if trainer.is_global_zero and self._rates is not None:
            stopped = isinstance(exception, KeyboardInterrupt)
            status = "interrupted" if stopped else "failed"
            if self.report:  # training is over: its times stay as they are
                self.report["status"] = status
            else:
                self._finish(trainer, status)
            first_line = next(iter(str(exception).splitlines()), "")
            self.report["error"] = f"{type(exception).__name__}: {first_line}"
            self._write()

    def _finish(self, trainer: Trainer, status: str) -> None:
        self._clock.account.advance(time.monotonic())
        plan = self._plan_facts or _plan_facts(trainer)
        self.report = {"status": status, **self._summary(), **plan}
        self.report["strategy"] = type(trainer.strategy).__name__
        self.report["world_size"] = trainer.world_size
        if self._rates is not None:
            self.report["stages"] = self._rates.num_stages
            self.report["replicas"] = self._rates.num_replicas
        self._write()
        if self._progress.attempts:
            self._note_progress(trainer, now=True)

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{_REPORT}.tmp"
        draft.write_text(json.dumps(self.report, indent=2) + "\n")
        os.replace(draft, self._folder / _REPORT)

    def _summary(self) -> Report:
        assert self._rates is not None
        account, times = self._clock.account, list(self._step_times)
        report: Report = {
            "job_completion_s": account.elapsed_s + (self._queue_s or 0.0),
            "queue_s": self._queue_s,
            **{f"{part.value}_s": seconds for part, seconds in account.seconds.items()},
            "assembly": dict(self._clock.assembly),
            **self._attempts(),
            "steps": len(times),
            "step_s": _quartiles(times),
        }
        if self._count and self._training_s > 0:
            report |= self._rates.overall(self._count, self._training_s)
        if self._bubbles is not None:
            report["bubble_by_stage"] = list(self._bubbles)
        if self.monitor and self._monitored:
            steps_and_values = [list(pair) for pair in self._monitored]
            report["monitor"] = {"name": self.monitor, "by_step": steps_and_values}
        return report

    def _attempts(self) -> Report:
        attempts = self._progress.attempts
        first = attempts[0].started if attempts else self._clock.started
        known = self._earlier is not None or not self._resumed
        return {
            "attempt": max(1, len(attempts)),
            "from_step": attempts[-1].from_step if attempts else 0,
            "lost_steps": self._progress.lost_steps if attempts and known else None,
            "since_first_start_s": time.time() - first,
        }


def _plan_facts(trainer: Trainer) -> Report:
    """Return what was planned, where there was a plan."""
    plan = getattr(trainer.strategy, "plan", None)
    return {"plan": plan.summary()} if isinstance(plan, Plan) else {}


def _quartiles(values: list[float]) -> Mapping[str, float]:
    if not values:
        return {}
    three = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return dict(zip(("quartile_1", "median", "quartile_3"), three, strict=True))
