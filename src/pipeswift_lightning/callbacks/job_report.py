"""The job's time, part by part: what its user waited for, and where it went."""

import json
import statistics
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from pipeswift_lightning.callbacks.job_times import process_age_s, slurm_queue_s

__all__ = ["JobReport", "count_batch"]

Report = dict[str, Any]
MASK_NAMES = ("mask", "attention_mask")


def count_batch(module: LightningModule, batch: Any) -> tuple[str, Tensor | int]:
    """Return the unit a batch is counted in and its count, without waiting for a device.

    In this order: ``tokens`` by the module's own ``tokens_per_batch(batch)``; ``tokens`` by the sum
    of a ``mask`` or ``attention_mask`` in the batch; ``samples`` by the size of its first tensor.
    """
    hook = getattr(module, "tokens_per_batch", None)
    if callable(hook):
        return "tokens", hook(batch)
    if isinstance(batch, Mapping):
        for name in MASK_NAMES:
            mask = batch.get(name)
            if isinstance(mask, Tensor) and not mask.is_floating_point():
                return "tokens", mask.sum()
    try:
        return "samples", extract_batch_size(batch)
    except MisconfigurationException:
        return "samples", 0


class JobReport(Callback):
    """Print a table when ``fit`` ends, and write it as ``job_report.json``.

    Job completion time = queue + assembly + training + validation + clean-up, where

    * *queue* is SLURM's, from submission to start; without a scheduler it is left out;
    * *assembly* runs from the start of this process to the first training step: imports, data,
      model, plan, Lightning's sanity check. One process, one ``fit``: a second one in the same
      process counts the first as its assembly;
    * *training* runs from there to the last step's end, checkpoints included, validation not;
    * *validation* is what ran between the training steps and after the last;
    * *clean-up* runs from the end of training to the last hook Lightning calls.

    A step is one batch. On a GPU each step ends with a device synchronisation, or its time would
    be the launch's. Any strategy will do; a strategy with a method ``measured_bubbles() ->
    list[float] | None`` has each stage's idle share shown. That method is called on every rank.

    Args:
        monitor: A logged metric whose first and last validation values are shown.
        dirpath: Folder of ``job_report.json``. None means the trainer's ``log_dir``, which is its
            ``default_root_dir`` when there is no logger.
    """

    def __init__(self, monitor: str | None = None, dirpath: str | Path | None = None) -> None:
        self.monitor = monitor
        self.dirpath = dirpath
        self.report: Report = {}
        self._clear()

    def _clear(self) -> None:
        self._born = time.monotonic() - process_age_s()
        self._folder = self.dirpath
        self._first_step: float | None = None
        self._train_end: float | None = None
        self._step_start = self._validation_start = 0.0
        self._validation_s = 0.0
        self._step_times = array("d")
        self._unit = "samples"
        self._count: Tensor | int = 0
        self._monitored: list[tuple[int, float]] = []
        self._bubbles: list[float] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._clear()
            log_dir = trainer.log_dir  # a collective: every rank asks, once
            self._folder = self.dirpath or log_dir or trainer.default_root_dir

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_start = time.monotonic()
        if self._first_step is None:
            self._first_step = self._step_start

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._step_times.append(time.monotonic() - self._step_start)
        self._unit, count = count_batch(pl_module, batch)
        self._count = self._count + count

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.monotonic()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._first_step is not None:
            self._validation_s += time.monotonic() - self._validation_start
        value = trainer.callback_metrics.get(self.monitor) if self.monitor else None
        if value is not None:
            self._monitored.append((trainer.global_step, float(value)))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._train_end = time.monotonic()
        count = torch.as_tensor(self._count, device=trainer.strategy.root_device)
        self._count = int(trainer.strategy.reduce(count, reduce_op="sum"))
        measured_bubbles = getattr(trainer.strategy, "measured_bubbles", None)
        if callable(measured_bubbles):
            self._bubbles = measured_bubbles()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self._first_step is None or self._train_end is None:
            return  # another loop, or training did not end
        if not trainer.is_global_zero:
            return
        queue_s = slurm_queue_s()
        self.report = self._summarise(queue_s, self._first_step, self._train_end)
        self.report["strategy"] = type(trainer.strategy).__name__
        self.report["world_size"] = trainer.world_size
        Console().print(job_table(self.report))
        folder = Path(self._folder or ".")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job_report.json").write_text(json.dumps(self.report, indent=2) + "\n")

    def _summarise(self, queue_s: float | None, first_step: float, train_end: float) -> Report:
        assembly_s = first_step - self._born
        training_s = train_end - first_step - self._validation_s
        clean_up_s = time.monotonic() - train_end
        parts_s = (queue_s or 0.0, assembly_s, training_s, self._validation_s, clean_up_s)
        times = list(self._step_times)
        quartiles = _quartiles(times)
        report: Report = {
            "job_completion_s": sum(parts_s),
            "queue_s": queue_s,
            "assembly_s": assembly_s,
            "training_s": training_s,
            "validation_s": self._validation_s,
            "clean_up_s": clean_up_s,
            "steps": len(times),
            "step_s": dict(zip(("quartile_1", "median", "quartile_3"), quartiles, strict=True)),
        }
        if self._count:
            report[f"{self._unit}_per_s"] = int(self._count) / training_s
        if self._bubbles is not None:
            report["bubble_by_stage"] = list(self._bubbles)
        if self.monitor and self._monitored:
            steps_and_values = [list(pair) for pair in self._monitored]
            report["monitor"] = {"name": self.monitor, "by_step": steps_and_values}
        return report


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3


def job_table(report: Report) -> Table:
    """Lay ``report`` out as the table that is printed, with the stages' bubbles if measured."""
    table = Table(title="Job report", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_row("job completion time", f"{report['job_completion_s']:.1f} s")
    queue_s = report["queue_s"]
    table.add_row("  queue", "no scheduler" if queue_s is None else f"{queue_s:.1f} s")
    for part in ("assembly", "training", "validation", "clean_up"):
        table.add_row(f"  {part.replace('_', '-')}", f"{report[f'{part}_s']:.1f} s")
    table.add_section()
    table.add_row("steps", str(report["steps"]))
    step_ms = [f"{1e3 * s:.1f}" for s in report["step_s"].values()]
    table.add_row("step time, median", f"{step_ms[1]} ms")
    table.add_row("step time, quartiles", f"{step_ms[0]} to {step_ms[2]} ms")
    for unit in ("tokens", "samples"):
        if f"{unit}_per_s" in report:
            table.add_row(f"{unit} per second", f"{report[f'{unit}_per_s']:,.0f}")
    for stage, bubble in enumerate(report.get("bubble_by_stage", ())):
        table.add_row(f"stage {stage}, measured bubble", f"{bubble:.1%}")
    if "monitor" in report:
        name, by_step = report["monitor"]["name"], report["monitor"]["by_step"]
        for step, value in by_step[:1] + by_step[1:][-1:]:
            table.add_row(f"{name}, step {step}", f"{value:.4f}")
    return table
