"""Keeps what the run's last steps have cost, for predictions."""

import json
import statistics
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from pipeswift_lightning.callbacks.pipeline import (
    CallbackError,
    ObservablePipeline,
    StepObserver,
    plan_key,
)
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.step_sums import StepSums, mean_costs
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.strategies.argument import COUNT, PATH, checked

__all__ = ["MeasuredStep", "StepRecord"]

STEP_FILE = "measured_step.json"
COSTS_FILE = "step_costs.json"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A run's step.

    Args:
        step_s: Median of the whole steps, in seconds.
        costs: Mean seconds of each stage and micro-batch.
    """

    step_s: float
    costs: StepCosts

    def write(self, folder: Path) -> None:
        """Write ``measured_step.json``, and the costs alone as ``step_costs.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STEP_FILE).write_text(json.dumps(asdict(self)) + "\n")
        (folder / COSTS_FILE).write_text(self.costs.to_json() + "\n")

    @classmethod
    def read(cls, folder: Path) -> "MeasuredStep | None":
        """Return what `write` wrote; None if there is no such file."""
        try:
            found = json.loads((folder / STEP_FILE).read_text())
        except FileNotFoundError:
            return None
        return cls(found["step_s"], StepCosts(**found["costs"]))


class StepRecord(StepObserver):
    """When training ends, write what a step costs: the last steps of the most frequent plan.

    Two files in ``dirpath``: ``step_costs.json``, which ``recipes/simulate.py costs=FILE`` takes,
    and ``measured_step.json``, from which a sweep predicts its next members.

    Args:
        dirpath: The folder.
        window: Number of last steps that count; the first ones, with their allocations, fall out.

    Raises:
        CallbackError: An argument is out of its range.
    """

    @checked({"dirpath": PATH, "window": COUNT}, CallbackError)
    def __init__(self, dirpath: str | Path, window: int = 50) -> None:
        super().__init__()
        self.dirpath = Path(dirpath)
        self._steps: deque[tuple[Plan, StepParts]] = deque(maxlen=window)

    @override
    def _begin(self) -> None:
        self._steps.clear()

    @override
    def _step_ended(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        if (plan := pipeline.plan) is None:
            return
        parts = self._step_parts(pipeline)
        if parts.is_whole(plan.schedule.num_micro_batches):
            self._steps.append((plan, parts))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = self._pipeline
        if pipeline is None or not self._steps:
            return
        # All ranks of a pipeline follow one plan, so they choose alike.
        counts = Counter(plan_key(plan) for plan, _ in self._steps)
        most = counts.most_common(1)[0][0]
        same = [(plan, parts) for plan, parts in self._steps if plan_key(plan) == most]
        sums = StepSums()
        for _, parts in same:
            sums.add(parts)
        stages = pipeline.gather_over_stages("gathering the stages' costs", sums)
        if trainer.is_global_zero:
            step_s = statistics.median(parts.step_s for _, parts in same)
            MeasuredStep(step_s, mean_costs(same[0][0].schedule, stages)).write(self.dirpath)
