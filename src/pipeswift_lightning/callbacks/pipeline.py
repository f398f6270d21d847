"""What the monitors ask of a strategy, how they follow its steps, and how they log."""

from abc import abstractmethod
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.plan.timeline import Event, Timeline

__all__ = [
    "CallbackError",
    "ObservablePipeline",
    "PlanKey",
    "StepObserver",
    "log_scalars",
    "pipeline_of",
    "plan_key",
]

PlanKey = tuple[int, Partition] | None


class CallbackError(ValueError):
    """An argument of a callback is of another type, out of its range, or not known."""


class ObservablePipeline(Protocol):
    """A strategy that lets its steps be looked at; `PipeSwiftStrategy` is one."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step; None where every rank runs whole steps."""
        ...

    def step_events(self) -> tuple[Event, ...]:
        """Return this rank's events of the last step; their rank is the stage."""
        ...

    def timeline(self) -> Timeline:
        """Return all stages' events of the last step; collective."""
        ...

    def micro_batch_tokens(self, batch: Any) -> tuple[int, ...] | None:
        """Return each micro-batch's tokens in the last training step; None if not known."""
        ...

    def gather_over_stages(self, what: str, value: Any) -> list[Any]:
        """Return every stage's ``value``; collective."""
        ...

    def gather_over_replicas(self, what: str, value: Any) -> list[Any]:
        """Return every replica's ``value``; collective."""
        ...


def pipeline_of(trainer: Trainer, observer: str) -> ObservablePipeline | None:
    """Return the trainer's strategy if it is a pipeline, else say that ``observer`` rests.

    So one configuration of callbacks serves the pipeline and plain Lightning beside it.
    """
    strategy = trainer.strategy
    if callable(getattr(strategy, "step_events", None)):
        return cast("ObservablePipeline", strategy)
    rank_zero_info(f"{observer}: {type(strategy).__name__} is no pipeline, so nothing is observed")
    return None


class StepObserver(Callback):
    """Follows the training steps of a pipeline; without one it rests."""

    def __init__(self) -> None:
        self._pipeline: ObservablePipeline | None = None
        self._step_start_s = 0.0

    @abstractmethod
    def _begin(self) -> None:
        """Forget an earlier fit; ``_pipeline`` is this one's."""

    @abstractmethod
    def _step_ended(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        """Look at the step that has just ended."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._pipeline = pipeline_of(trainer, type(self).__name__)
            self._begin()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_start_s = perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._pipeline is not None:
            self._step_ended(trainer, self._pipeline)

    def _step_parts(self, pipeline: ObservablePipeline) -> StepParts:
        """Return this rank's parts of the step that has just ended."""
        # On a GPU the events are waited for, and the step ends after them.
        return StepParts.of(pipeline.step_events(), self._step_start_s, perf_counter())


def plan_key(plan: Plan | None) -> PlanKey:
    """Return what is equal for steps that may be averaged: the same order of the same layers.

    A schedule's identity stands for it, so keep a reference to it: the planner has one object of
    each. When layers move, it stays, and the partition tells.
    """
    return None if plan is None else (id(plan.schedule), plan.partition)


def log_scalars(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Give ``values`` to all loggers, in the row of the step that has just ended.

    Not by ``self.log``: that drops what does not fall on a multiple of ``log_every_n_steps``.
    """
    if not trainer.is_global_zero:
        return
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)
