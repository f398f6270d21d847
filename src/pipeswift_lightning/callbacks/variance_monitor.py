"""Watches how long steps take and how much that varies, and says what is behind it."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pipeswift_lightning.callbacks.garbage import GarbageClock, overlap_s
from pipeswift_lightning.callbacks.pipeline import (
    CallbackError,
    ObservablePipeline,
    PlanKey,
    StepObserver,
    log_scalars,
    plan_key,
)
from pipeswift_lightning.callbacks.variance_report import StageWindow, VarianceReport
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.strategies.argument import COUNT, SHARE, TEXT, checked

__all__ = ["VarianceMonitor"]

_SAMPLES = 16  # Steps of a window whose events are kept, to see how long messages take.
_MAX_PLANS = 8


class VarianceMonitor(StepObserver):
    """Log mean and variance of the step over a window, by stage, and name the causes.

    At the end of a window, all loggers are given, in seconds: ``variance/step_mean_s``,
    ``_variance_s2`` and ``_variation`` (standard deviation over mean), the same of each stage's
    computation (``variance/stage_0_mean_s``), the median transit of messages on each link
    (``variance/link_0_to_1_s``), and by how much the mean step is longer for

    * ``slow_stage``: one that computes longer than the others' median in its fast steps too. The
      cost is what the simulated step would gain if it were as fast as they;
    * ``slow_link``: one whose messages arrive later than the other links'; likewise;
    * ``data_loading``: the wait for the next batch;
    * ``garbage_collection``: Python's; it is taken out of the computation that it interrupted;
    * ``jitter``: a stage whose steps are now fast, now slow, more than the others' are.

    Each cause that costs at least ``warn_above`` of a step is told once, with a remedy. Windows are
    kept by schedule and stages, so that neither a short last batch nor a move of layers spoils
    one; when the plan changes, the next full
    window is compared with the last one of the plan before. Steps that every rank runs whole
    (``loss="transparent"``) are not observed. With replicas, the numbers are the first's.

    Args:
        window: Number of steps.
        warn_above: Share of a step that a cause must cost to be reported.
        prefix: Of the names that are logged.

    Attributes:
        reports: The reports so far, on every rank of the pipeline.

    Raises:
        CallbackError: An argument is out of its range.
    """

    @checked({"window": COUNT, "warn_above": SHARE, "prefix": TEXT}, CallbackError)
    def __init__(
        self, window: int = 100, warn_above: float = 0.05, prefix: str = "variance"
    ) -> None:
        super().__init__()
        self.window = window
        self.warn_above = warn_above
        self.prefix = prefix
        self.reports: list[VarianceReport] = []
        self._garbage = GarbageClock()
        self._clear()

    def _clear(self) -> None:
        self.reports = []
        self._windows: dict[PlanKey, tuple[Plan, StageWindow]] = {}
        self._last: Plan | None = None
        self._told: set[tuple[str, int, int | None]] = set()

    @override
    def _begin(self) -> None:
        self._clear()
        if self._pipeline is not None:
            self._garbage.start()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._garbage.stop()

    @override
    def _step_ended(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        if (plan := pipeline.plan) is None:
            self._rest()
            return
        key = plan_key(plan)
        if key not in self._windows and len(self._windows) >= _MAX_PLANS:
            self._windows.pop(next(iter(self._windows)))
        _, window = self._windows.setdefault(key, (plan, StageWindow()))
        self._add(window, pipeline, plan.schedule.num_micro_batches)
        if len(window.steps_s) >= self.window:
            self._report(trainer, pipeline, plan)

    def _rest(self) -> None:
        """Say that steps which every rank runs whole are no business of this monitor."""
        self._pipeline = None
        self._garbage.stop()
        rank_zero_warn(
            "VarianceMonitor: every rank runs whole steps here, which follow no one schedule, so "
            "what a slow stage or link costs cannot be simulated. Nothing is observed. Remedy: "
            "BubbleMonitor and TimelineTrace observe such steps too"
        )

    def _add(
        self, window: StageWindow, pipeline: ObservablePipeline, num_micro_batches: int
    ) -> None:
        parts = self._step_parts(pipeline)
        garbage = self._garbage.take()
        if not parts.is_whole(num_micro_batches):
            return
        events = pipeline.step_events()
        compute_s, data_wait_s = parts.compute_s, parts.data_wait_s
        if garbage:
            for event in events:
                lost_s = overlap_s(garbage, event.start_s, event.end_s)
                if lost_s and event.is_compute:
                    compute_s -= lost_s
                    parts.computed_s[event.kind, event.micro_batch or 0] -= lost_s
                elif lost_s and event.kind is EventKind.DATA_WAIT:
                    data_wait_s -= lost_s
        place = len(window.steps_s)
        window.steps_s.append(parts.step_s)
        window.compute_s.append(compute_s)
        window.data_wait_s.append(data_wait_s)
        # What fell between two steps makes none of them longer.
        window.garbage_s.append(overlap_s(garbage, parts.end_s - parts.step_s, parts.end_s))
        window.sums.add(parts)
        if place % max(1, self.window // _SAMPLES) == 0:
            window.samples[place] = events

    def _report(self, trainer: Trainer, pipeline: ObservablePipeline, plan: Plan) -> None:
        # All ranks of a pipeline follow one plan, so their windows end together.
        _, window = self._windows.pop(plan_key(plan))
        windows = pipeline.gather_over_stages("gathering the stages' step times", window)
        changed = self._last is not None and plan_key(self._last) != plan_key(plan)
        report = VarianceReport.of(
            plan.schedule,
            windows,
            least_share=self.warn_above,
            before=self.reports[-1] if changed else None,
        )
        self._last = plan
        self.reports.append(report)
        log_scalars(trainer, report.scalars(self.prefix))
        if (change := report.explain_change()) is not None:
            tell = rank_zero_warn if report.varies_more else rank_zero_info
            tell(f"VarianceMonitor: {change}")
        for cause in report.causes:
            key = cause.kind.value, cause.stage, cause.target
            if key not in self._told:
                self._told.add(key)
                rank_zero_warn(f"VarianceMonitor: {cause.explain(report.step.mean_s)}")
