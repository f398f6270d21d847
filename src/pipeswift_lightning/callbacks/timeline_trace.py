"""Draws the measured timeline of a step beside the predicted one."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from pipeswift_lightning.callbacks.pipeline import CallbackError, ObservablePipeline, pipeline_of
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.step_sums import StepSums, mean_costs
from pipeswift_lightning.drawing import Panel, page, png, require_matplotlib, write_chrome_trace
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Timeline
from pipeswift_lightning.strategies.argument import COUNT, FLAG, PATH, checked

__all__ = ["TimelineTrace"]


class TimelineTrace(Callback):
    """Every n steps, draw the step: what was measured, and below it what was predicted.

    The prediction simulates the same schedule with this step's own times of computation and instant
    messages. So where the two differ, it is for messages and for what each micro-batch costs beside
    its computation.

    Written into ``<run's folder>/timelines``: ``step_000100.png``, which loggers that take images
    (W&B, TensorBoard) are given too; ``step_000100.html``, a page that zooms and loads nothing, and
    tells a micro-batch's samples, tokens and times where it is pointed at;
    ``step_000100.trace.json.gz`` for https://ui.perfetto.dev or ``chrome://tracing``, with an arrow
    from the computation that made a message to the one that used it. Tokens are told where samples
    are sequences: without padding if the step was planned from costs, else with it.

    The other ranks wait while rank 0 draws: about a second for 4 stages. With replicas, the first
    is drawn. Steps that every rank runs whole follow no schedule, so nothing is predicted of them.

    Args:
        every_n_steps: Batches between two pictures.
        dirpath: The run's folder. None means the trainer's ``log_dir``, which is its
            ``default_root_dir`` when there is no logger.
        png: Whether to draw a PNG, which needs the extra ``plot``.

    Raises:
        CallbackError: An argument is out of its range.
        DrawingError: A PNG is asked for and matplotlib is not installed.
    """

    @checked(
        {
            "every_n_steps": COUNT,
            "dirpath": PATH.or_none("the trainer's log_dir"),
            "png": FLAG,
        },
        CallbackError,
    )
    def __init__(
        self,
        every_n_steps: int = 500,
        dirpath: str | Path | None = None,
        *,
        png: bool = True,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self.png = png
        if png:
            require_matplotlib()
        self._pipeline: ObservablePipeline | None = None
        self._folder = Path()
        self._num_steps = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._pipeline = pipeline_of(trainer, "TimelineTrace")
            self._num_steps = 0
            log_dir = trainer.log_dir  # a collective: every rank asks, once
            self._folder = Path(self.dirpath or log_dir or trainer.default_root_dir) / "timelines"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pipeline = self._pipeline
        if pipeline is None:
            return
        self._num_steps += 1
        if self._num_steps % self.every_n_steps:
            return
        timeline, plan = pipeline.timeline(), pipeline.plan
        if not trainer.is_global_zero:
            return
        panels = [Panel("measured", timeline)]
        if plan is not None:
            sizes, tokens = plan.micro_batches.sizes, pipeline.micro_batch_tokens(batch) or ()
            timelines = {"measured": timeline, "predicted": _predicted(timeline, plan.schedule)}
            panels = [Panel(name, drawn, sizes, tokens) for name, drawn in timelines.items()]
        self._draw(trainer, panels)

    def _draw(self, trainer: Trainer, panels: Sequence[Panel]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._folder / f"step_{self._num_steps:06}"
        title = f"{type(trainer.lightning_module).__name__}, step {self._num_steps}"
        stem.with_suffix(".html").write_text(page(panels, title=title), encoding="utf-8")
        write_chrome_trace(stem.with_suffix(".trace.json.gz"), panels)
        if self.png:
            picture = png(panels)
            stem.with_suffix(".png").write_bytes(picture)
            _give_to_loggers(trainer, picture)


def _predicted(timeline: Timeline, schedule: Schedule) -> Timeline:
    stages = []
    for stage in range(schedule.num_stages):
        sums = StepSums()
        events = [e for e in timeline.events if e.stage == stage and e.is_compute]
        sums.add(StepParts.of(events, timeline.start_s, timeline.end_s))
        stages.append(sums)
    return simulate(schedule, mean_costs(schedule, stages))


def _give_to_loggers(trainer: Trainer, picture: bytes) -> None:
    """Hand the picture to all loggers that take one; the file is there in any case."""
    from matplotlib.image import imread

    for logger in trainer.loggers:
        # W&B counts its steps itself, and drops what comes for an earlier one without a word.
        log_image = getattr(logger, "log_image", None)
        add_image = getattr(getattr(logger, "experiment", None), "add_image", None)
        if callable(log_image):
            log_image(key="timeline", images=[imread(BytesIO(picture))])
        elif callable(add_image):
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            add_image("timeline", imread(BytesIO(picture)), step, dataformats="HWC")
