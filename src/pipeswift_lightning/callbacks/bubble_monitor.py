"""Watches how long each stage stands idle, and says why."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from pipeswift_lightning.callbacks.bubble_report import BubbleReport
from pipeswift_lightning.callbacks.memory import peak_bytes
from pipeswift_lightning.callbacks.pipeline import (
    CallbackError,
    ObservablePipeline,
    PlanKey,
    StepObserver,
    log_scalars,
    plan_key,
)
from pipeswift_lightning.callbacks.replica_report import ReplicaReport
from pipeswift_lightning.callbacks.step_sums import StepSums
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.strategies.argument import COUNT, TEXT, Argument, checked, is_number

__all__ = ["BubbleMonitor"]


_IDLE = Argument(
    "a share of the time, above 0 and at most 1",
    "warn_above=0.5 warns of stages idle half of the time",
    lambda value: is_number(value) and 0 < value <= 1,
)


class BubbleMonitor(StepObserver):
    """Log the measured bubble of each stage beside the predicted one, every n steps.

    Each step, a rank adds its own times up. Every ``every_n_steps`` the stages' sums are gathered,
    and all loggers are given means over these steps:

    * ``bubble/stage_0`` and so on, and ``bubble/measured``, their mean: the share of the time from
      the pipeline's first computation of a step to its last in which a stage does not compute;
    * ``bubble/predicted_stage_0`` and so on, and ``bubble/predicted``: the same schedule simulated
      with the measured times of computation and instant messages. What the measured bubble has
      more is communication and the fixed cost of each micro-batch;
    * ``bubble/share_compute``, ``_communication_wait``, ``_data_wait``, ``_gradient_reduce``,
      ``_optimizer`` and ``_other`` (mean of the stages, and each): parts of the whole step, with
      sum 1. To wait for a neighbour that still computes is a communication wait too;
    * ``bubble/predicted_share_compute`` and so on: the same of the predicted step, to which the
      measured waits for data, reduction and update are added;
    * ``bubble/step_s``: the step in seconds; ``bubble/stage_0_busy_s``: a stage's computation;
    * ``memory/stage_0_bytes``: the most that a stage's GPU has held, or what its process holds;
    * with replicas, ``bubble/replica_0`` (mean bubble) and ``bubble/replica_0_busy_s`` (its busiest
      stage) and so on. All else is the first replica's.

    Steps of another plan than most, such as a short last batch or those before layers moved, are
    left out of the means.
    Where every rank runs whole steps (``loss="transparent"``) there is no schedule: the bubble, the
    shares and all else are measured, and nothing is predicted. On a GPU, times are the device's,
    which each step is waited for.

    Args:
        every_n_steps: Batches between two reports; the end of training makes one too.
        warn_above: Warn if a stage's bubble is above this share: once for each cause and stage
            that is waited for. 1 never warns. A replica that the others wait for is told once.
        prefix: Of the names that are logged.

    Attributes:
        reports: The reports so far, on every rank of the pipeline.

    Raises:
        CallbackError: An argument is out of its range.
    """

    @checked({"every_n_steps": COUNT, "warn_above": _IDLE, "prefix": TEXT}, CallbackError)
    def __init__(
        self, every_n_steps: int = 50, warn_above: float = 0.5, prefix: str = "bubble"
    ) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self.warn_above = warn_above
        self.prefix = prefix
        self.reports: list[BubbleReport] = []
        self._warned: set[tuple[str, int]] = set()
        self._clear()

    def _clear(self) -> None:
        self._num_batches = 0
        self._sums: dict[PlanKey, tuple[Schedule | None, StepSums]] = {}

    @override
    def _begin(self) -> None:
        self.reports = []
        self._warned = set()
        self._clear()

    @override
    def _step_ended(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        parts = self._step_parts(pipeline)
        plan = pipeline.plan
        schedule = None if plan is None else plan.schedule
        if schedule is None or parts.is_whole(schedule.num_micro_batches):
            self._sums.setdefault(plan_key(plan), (schedule, StepSums()))[1].add(parts)
        # All batches count: replicas have as many, but not always the same whole ones.
        self._num_batches += 1
        if self._num_batches >= self.every_n_steps:
            self._report(trainer, pipeline)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pipeline is not None and self._num_batches:
            self._report(trainer, self._pipeline)

    def _report(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        # All ranks of a pipeline follow one plan, so they choose alike.
        found = sorted(self._sums.values(), key=lambda pair: -pair[1].num_steps)
        schedule, sums = found[0] if found else (None, StepSums())
        sums.memory_bytes = peak_bytes(trainer.strategy.root_device)
        stages = pipeline.gather_over_stages("gathering the stages' bubbles", sums)
        replicas = pipeline.gather_over_replicas("gathering the replicas' bubbles", stages)
        self._clear()
        if not sums.num_steps:
            return
        report = BubbleReport.of(schedule, stages)
        self.reports.append(report)
        beside = ReplicaReport.of(replicas)
        log_scalars(trainer, {**report.scalars(self.prefix), **beside.scalars(self.prefix)})
        if (slow := beside.slow_replica) is not None:
            self._warn(("replica", slow), beside.explain(slow))
        num_micro_batches = 0 if schedule is None else schedule.num_micro_batches
        for idle in report.idle_stages(self.warn_above):
            text = report.explain(idle, num_micro_batches)
            self._warn((idle.cause.value, idle.waits_for), text)

    def _warn(self, key: tuple[str, int], text: str) -> None:
        """Warn once of each thing."""
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"BubbleMonitor: {text}")
