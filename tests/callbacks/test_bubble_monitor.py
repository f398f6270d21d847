import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeswift_lightning.callbacks import BubbleMonitor, TimelineTrace, VarianceMonitor
from pipeswift_lightning.callbacks.bubble_report import (
    SHARES,
    BubbleReport,
    IdleCause,
)
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.step_sums import StepSums
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import make_plan
from pipeswift_lightning.plan.schedules import gpipe, one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline
from tests.callbacks.sleepers import BACKWARD_S, FORWARD_S, Sleeps, measured, train
from tests.helpers.modules import Regression, loaders, stack, vectors
from tests.helpers.parity import RecordingLogger, fit

MICRO_BATCH_S = FORWARD_S + BACKWARD_S


def sums_of(timeline, num_steps: int = 3) -> list[StepSums]:
    every = []
    for stage in range(timeline.num_ranks):
        sums = StepSums()
        events = [e for e in timeline.events if e.stage == stage]
        for _ in range(num_steps):
            sums.add(StepParts.of(events, 0.0, timeline.end_s))
        every.append(sums)
    return every


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), gpipe(3, 4)])
def test_a_simulated_step_is_measured_as_it_is(schedule) -> None:
    costs = StepCosts(
        forward_s=[[1.0, 1.0, 2.0, 1.0], [2.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3.0]],
        backward_s=[[2.0] * 4, [3.0] * 4, [2.0] * 4],
    )
    timeline = simulate(schedule, costs)
    report = BubbleReport.of(schedule, sums_of(timeline))
    assert report.measured == pytest.approx([timeline.bubble(s) for s in range(3)])
    assert report.predicted == pytest.approx(report.measured)
    assert report.num_steps == 3
    for shares in report.shares:
        assert sum(shares.values()) == pytest.approx(1.0)
    assert report.shares[1]["compute"] == pytest.approx(timeline.busy_s(1) / timeline.makespan_s)
    for predicted, shares in zip(report.predicted_shares, report.shares, strict=True):
        assert sum(predicted.values()) == pytest.approx(1.0)
        assert predicted["compute"] == pytest.approx(shares["compute"])
    assert list(report.idle_stages(1.0)) == []


def test_parts_of_a_step() -> None:
    kinds = [
        (EventKind.DATA_WAIT, None, 0.0, 1.0),
        (EventKind.RECEIVE_WAIT, 0, 2.0, 3.0),
        (EventKind.FORWARD, 0, 3.0, 5.0),
        (EventKind.SEND_WAIT, None, 5.0, 5.5),
        (EventKind.RECEIVE_WAIT, 0, 5.5, 7.0),
        (EventKind.BACKWARD, 0, 7.0, 11.0),
        (EventKind.GRADIENT_REDUCE, None, 11.0, 11.25),
        (EventKind.OPTIMIZER, None, 11.25, 12.0),
    ]
    events = [Event(1, 1, i, kind, start, end) for kind, i, start, end in kinds]
    parts = StepParts.of(events, 1.0, 13.0)
    assert (parts.step_s, parts.span_s, parts.compute_s) == (13.0, 8.0, 6.0)
    assert (parts.activation_wait_s, parts.gradient_wait_s, parts.send_wait_s) == (1.0, 1.5, 0.5)
    assert (parts.data_wait_s, parts.reduce_s, parts.optimizer_s) == (1.0, 0.25, 0.75)
    assert parts.is_whole(1)
    assert not parts.is_whole(2)
    assert parts.other_s == pytest.approx(13 - 1 - 6 - 3 - 0.25 - 0.75)
    assert parts.computed_s == {(EventKind.FORWARD, 0): 2.0, (EventKind.BACKWARD, 0): 4.0}


def explained(schedule, costs: StepCosts, stage: int, latency_s: float = 0.0):
    timeline = simulate(schedule, costs)
    report = BubbleReport.of(schedule, sums_of(timeline))
    if latency_s:
        busy = [b / (timeline.makespan_s + latency_s) for b in report.busy_s]
        report = replace(report, measured=tuple(1 - b for b in busy))
    idle = next(i for i in report.idle_stages(0.1) if i.stage == stage)
    return idle, report.explain(idle, schedule.num_micro_batches)


def test_too_few_micro_batches_are_told() -> None:
    costs = StepCosts.uniform(4, 2, forward_s=1.0, backward_s=2.0)
    idle, text = explained(one_f_one_b(4, 2), costs, stage=0)
    assert (idle.cause, idle.waits_for) == (IdleCause.FILLING, 1)
    assert "stage 0 stands idle 60%" in text
    assert "Remedy: more micro_batches (4 a stage, 16" in text


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "gradients"), (1, "gradients"), (3, "activations")]
)
def test_the_slow_stage_is_named_not_the_neighbour_that_waits_for_it_too(stage, kind) -> None:
    costs = StepCosts(
        forward_s=[[1.0] * 16, [1.0] * 16, [3.0] * 16, [1.0] * 16],
        backward_s=[[2.0] * 16, [2.0] * 16, [6.0] * 16, [2.0] * 16],
    )
    idle, text = explained(one_f_one_b(4, 16), costs, stage)
    assert (idle.cause, idle.waits_for) == (IdleCause.IMBALANCE, 2)
    assert f"for {kind}" in text
    assert "Stage 2 computes 144000.0 ms a step, the others 48000.0 ms on average" in text


def test_what_computation_does_not_explain_is_messages() -> None:
    costs = StepCosts.uniform(2, 16, forward_s=1.0, backward_s=2.0)
    idle, text = explained(one_f_one_b(2, 16), costs, stage=1, latency_s=40.0)
    assert (idle.cause, idle.waits_for) == (IdleCause.MESSAGES, 0)
    assert "Computation explains 6% only" in text


def test_without_a_pipeline_it_rests() -> None:
    monitor = BubbleMonitor(every_n_steps=1)
    fit(lambda: Regression(stack()), loaders(vectors), "auto", callbacks=[monitor], max_epochs=1)
    assert monitor.reports == []


class TwoPlans:
    """A pipeline that gives its stages other layers, as all of one rank sees it."""

    def __init__(self) -> None:
        sizes = MicroBatches((1,) * 4)
        self.plans = [
            make_plan(partition=Partition((0, cut), 3), micro_batches=sizes) for cut in (1, 2)
        ]
        self.plan = self.plans[0]

    def step_events(self) -> tuple[Event, ...]:
        return tuple(event for event in self.timeline().events if event.rank == 0)

    def timeline(self) -> Timeline:
        costs = StepCosts(forward_s=[[1.0] * 4] * 2, backward_s=[[2.0] * 4] * 2)
        return simulate(self.plan.schedule, costs)

    def gather_over_stages(self, what: str, value: Any) -> list[Any]:
        return [value, value]

    def gather_over_replicas(self, what: str, value: Any) -> list[Any]:
        return [value]


def test_steps_before_and_after_a_move_of_layers_are_not_mixed() -> None:
    pipeline = TwoPlans()
    assert pipeline.plans[0].schedule is pipeline.plans[1].schedule  # so it cannot tell
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(is_global_zero=False, strategy=strategy)
    module: Any = None
    bubbles, variance = BubbleMonitor(every_n_steps=5, warn_above=1.0), VarianceMonitor(window=3)
    for monitor in (bubbles, variance):
        monitor._pipeline = pipeline
        for stages in (0, 0, 1, 1, 1, 0):
            pipeline.plan = pipeline.plans[stages]
            monitor.on_train_batch_end(trainer, module, None, None, 0)
    assert [report.num_steps for report in bubbles.reports] == [3]
    assert len(variance.reports) == 2
    assert variance.reports[1].before is not None  # the other stages', to be compared


def quietest(reports: list[BubbleReport]) -> BubbleReport:
    """The report of the shortest steps: those that the machine's other work disturbed least."""
    return min(reports, key=lambda r: r.step_s)


def closed_form(schedule: str, steps: int) -> None:
    factor = 3.0
    logger = RecordingLogger()
    monitor = BubbleMonitor(every_n_steps=1, warn_above=0.95)
    train(Sleeps(factors=(factor,) * 4), [monitor], steps=steps, schedule=schedule, logger=logger)
    reports = monitor.reports
    assert [r.num_steps for r in reports] == [1] * steps
    best = quietest(reports)
    assert best.measured == pytest.approx([3 / 7] * 4, abs=0.02)
    assert best.predicted == pytest.approx(best.measured, abs=0.02)
    assert best.busy_s == pytest.approx([4 * factor * MICRO_BATCH_S] * 4, rel=0.1)
    for report in reports:
        for stage, shares in enumerate(report.shares):
            assert set(shares) == set(SHARES)
            assert sum(shares.values()) == pytest.approx(1.0)
            own_s = report.busy_s[stage] / shares["compute"]
            assert own_s <= report.step_s * 1.001
    if dist.get_rank() == 0:
        rows = {s: row for s, row in logger.history if "bubble/stage_0" in row}
        assert list(rows) == list(range(steps))  # the rows of the steps' own values
        assert rows[1]["bubble/stage_3"] == reports[1].measured[3]
        assert rows[1]["bubble/stage_3_busy_s"] == reports[1].busy_s[3]
        idle = rows[1]["bubble/predicted_share_communication_wait_stage_3"]
        assert idle == reports[1].predicted_shares[3]["communication_wait"]
        assert {"train/loss"} <= {key for s, row in logger.history if s == 1 for key in row}
    else:
        assert not any("bubble/stage_0" in row for _, row in logger.history)


def of_1f1b() -> None:
    closed_form("1f1b", 3)


def of_gpipe() -> None:
    closed_form("gpipe", 2)


def slow_stage() -> None:
    factors = (1.0, 1.0, 4.0, 1.0)
    monitor = BubbleMonitor(every_n_steps=2, warn_above=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Sleeps(factors=factors), [monitor], steps=3, micro_batches=8, batch_size=8)
    assert [r.num_steps for r in monitor.reports] == [2, 1]  # the last at the end
    costs = StepCosts(
        forward_s=[[f * FORWARD_S] * 8 for f in factors],
        backward_s=[[f * BACKWARD_S] * 8 for f in factors],
    )
    ideal = simulate(one_f_one_b(4, 8), costs)
    expected = [ideal.bubble(s) for s in range(4)]
    assert quietest(monitor.reports).measured == pytest.approx(expected, abs=0.03)
    texts = [str(w.message) for w in caught if "BubbleMonitor" in str(w.message)]
    if dist.get_rank() == 0:
        assert len(texts) == 1  # one cause, though three stages idle in two reports
        assert "waits for stage 2" in texts[0]
    else:
        assert texts == []


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=280)
def test_sleeping_stages() -> None:
    """The bubble of equal stages is the formula's, and of unequal ones the simulator's."""
    measured(of_1f1b, of_gpipe, slow_stage)


def whole_steps(folder: Path) -> None:
    """Nothing is predicted of steps that every rank runs whole, but all is measured."""
    monitor, trace = BubbleMonitor(every_n_steps=2), TimelineTrace(2, folder, png=False)
    variance = VarianceMonitor(window=2)
    logger = RecordingLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(
            Sleeps(factors=(1.0, 1.0)),
            [monitor, trace, variance],
            steps=2,
            loss="transparent",
            logger=logger,
        )
    (report,) = monitor.reports
    assert (report.num_steps, report.predicted, report.predicted_shares) == (2, (), ())
    assert all(busy >= 2 * MICRO_BATCH_S for busy in report.busy_s)
    assert all(0.0 < bubble < 1.0 for bubble in report.measured)
    for shares in report.shares:
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["compute"] > 0
    assert variance.reports == []
    texts = [str(w.message) for w in caught]
    if dist.get_rank() == 0:
        assert sum("VarianceMonitor: every rank runs whole steps" in text for text in texts) == 1
        (row,) = [row for _, row in logger.history if "bubble/measured" in row]
        assert not any("predicted" in name for name in row)
        assert row["memory/stage_1_bytes"] > 0
        text = (folder / "timelines" / "step_000002.html").read_text()
        assert text.count('class="panel"') == 1
        text = report.explain(report.idle_stages(0.0)[0])
        assert "Every rank runs the whole step here" in text


def slow_replica() -> None:
    """Two replicas of one stage; the second one computes five times as long."""
    mine = 5.0 if dist.get_rank() == 1 else 1.0
    monitor, logger = BubbleMonitor(every_n_steps=2, warn_above=1.0), RecordingLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Sleeps(factors=(mine,)), [monitor], steps=2, micro_batches=2, logger=logger)
    texts = [str(w.message) for w in caught if "BubbleMonitor" in str(w.message)]
    if dist.get_rank() == 0:
        assert len(texts) == 1
        assert "replica 1 computes" in texts[0]
        (row,) = [row for _, row in logger.history if "bubble/replica_1" in row]
        assert row["bubble/replica_1_busy_s"] > 1.5 * row["bubble/replica_0_busy_s"]
    else:
        assert texts == []


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=90)
def test_whole_steps_and_replicas(tmp_path) -> None:
    whole_steps(tmp_path)
    measured(slow_replica)
