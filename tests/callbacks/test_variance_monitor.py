import gc
import statistics
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from pipeswift_lightning.callbacks import VarianceMonitor
from pipeswift_lightning.callbacks.garbage import GarbageClock
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.variance_report import (
    Cause,
    CauseKind,
    Spread,
    StageWindow,
    VarianceReport,
)
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import makespan_s, simulate
from pipeswift_lightning.plan.timeline import Timeline
from tests.callbacks.sleepers import BACKWARD_S, FORWARD_S, Sleeps, measured, slow_link, train
from tests.helpers.modules import Regression, loaders, stack, vectors
from tests.helpers.parity import RecordingLogger, fit

STAGES, MICRO_BATCHES = 4, 4
SCHEDULE = one_f_one_b(STAGES, MICRO_BATCHES)


def costs(*factors: float) -> StepCosts:
    return StepCosts(
        forward_s=[[f * FORWARD_S] * MICRO_BATCHES for f in factors],
        backward_s=[[f * BACKWARD_S] * MICRO_BATCHES for f in factors],
    )


def windows(
    timelines: list[Timeline],
    data_wait_s: Callable[[int], float] = lambda step: 0.0,
    garbage_s: Callable[[int, int], float] = lambda stage, step: 0.0,
) -> list[StageWindow]:
    """What the stages would note of these steps."""
    every = []
    for stage in range(STAGES):
        window = StageWindow()
        for step, timeline in enumerate(timelines):
            events = tuple(e for e in timeline.events if e.stage == stage)
            parts = StepParts.of(events, 0.0, timeline.end_s + data_wait_s(step))
            window.steps_s.append(parts.step_s)
            window.compute_s.append(parts.compute_s)
            window.data_wait_s.append(data_wait_s(step))
            window.garbage_s.append(garbage_s(stage, step))
            window.sums.add(parts)
            if step % 4 == 0:
                window.samples[step] = events
        every.append(window)
    return every


def report_of(every: list[StageWindow], least_share: float = 0.01) -> VarianceReport:
    return VarianceReport.of(SCHEDULE, every, least_share=least_share)


def equal(num: int = 20, latency_s: float = 0.0) -> list[Timeline]:
    return [simulate(SCHEDULE, costs(1, 1, 1, 1), link=Link(latency_s=latency_s))] * num


def test_even_steps_have_no_cause() -> None:
    report = report_of(windows(equal(latency_s=0.002)))
    assert report.causes == ()
    assert report.step.variance_s2 == pytest.approx(0.0, abs=1e-20)
    assert set(report.links_s) == {(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)}
    assert list(report.links_s.values()) == pytest.approx([0.002] * 6)


def test_a_slow_stage_costs_what_the_step_would_gain_without_it() -> None:
    slow = simulate(SCHEDULE, costs(1, 1, 1.3, 1))
    (cause,) = report_of(windows([slow] * 20)).causes
    assert (cause.kind, cause.stage) == (CauseKind.SLOW_STAGE, 2)
    assert cause.cost_s == pytest.approx(slow.makespan_s - equal()[0].makespan_s)
    assert cause.excess_s == pytest.approx(0.3 * MICRO_BATCHES * (FORWARD_S + BACKWARD_S))


def test_a_stage_that_is_slow_now_and_then_jitters() -> None:
    fast, slow = costs(1, 1, 1, 1), costs(1, 1.5, 1, 1)
    steps = [simulate(SCHEDULE, slow if i % 4 == 1 else fast) for i in range(20)]
    (cause,) = report_of(windows(steps)).causes
    assert (cause.kind, cause.stage) == (CauseKind.JITTER, 1)
    extra_s = makespan_s(SCHEDULE, slow) - makespan_s(SCHEDULE, fast)
    assert cause.cost_s == pytest.approx(extra_s / 4)


def test_a_slow_link_is_not_its_receiver() -> None:
    normal = equal()[0]
    activations = [[0.0] * 4, [0.01] * 4, [0.0] * 4]  # bytes, at one a second
    slow = simulate(
        SCHEDULE,
        StepCosts(
            forward_s=costs(1, 1, 1, 1).forward_s,
            backward_s=costs(1, 1, 1, 1).backward_s,
            activation_bytes=activations,
            gradient_bytes=[[0.0] * 4] * 3,
        ),
        link=Link(bandwidth_bytes_per_s=1.0),
    )
    (cause,) = report_of(windows([slow] * 8)).causes
    assert (cause.kind, cause.stage, cause.target) == (CauseKind.SLOW_LINK, 1, 2)
    assert cause.excess_s == pytest.approx(0.01)
    assert cause.cost_s == pytest.approx(slow.makespan_s - normal.makespan_s)


def test_loading_and_garbage_are_the_longest_of_the_stages() -> None:
    loading = report_of(windows(equal(), data_wait_s=lambda step: 0.05))
    assert [(c.kind, c.cost_s) for c in loading.causes] == [
        (CauseKind.DATA_LOADING, pytest.approx(0.05))
    ]
    garbage = report_of(
        windows(equal(), garbage_s=lambda stage, step: 0.1 * (stage == 3 and step % 2))
    )
    (cause,) = garbage.causes
    assert (cause.kind, cause.stage) == (CauseKind.GARBAGE_COLLECTION, 3)
    assert cause.cost_s == pytest.approx(0.05)


def test_causes_below_the_share_are_left_out_and_the_rest_are_in_order() -> None:
    slow = [simulate(SCHEDULE, costs(1, 1, 1, 1.3))] * 20
    every = windows(slow, data_wait_s=lambda step: 0.02)
    kinds = [c.kind for c in report_of(every).causes]
    assert kinds == [CauseKind.SLOW_STAGE, CauseKind.DATA_LOADING]
    assert [c.kind for c in report_of(every, least_share=0.1).causes] == [CauseKind.SLOW_STAGE]


def test_a_change_of_plan_is_compared() -> None:
    before = report_of(windows([simulate(SCHEDULE, costs(1, 1, 2, 1))] * 8))
    after = VarianceReport.of(SCHEDULE, windows(equal(8)), least_share=0.05, before=before)
    assert before.explain_change() is None
    text = after.explain_change()
    assert text is not None
    assert "takes 210.0 ms (0.0%), -32.3%" in text
    assert not after.varies_more
    uneven = [simulate(SCHEDULE, costs(1, 1, 1 + i % 2, 1)) for i in range(8)]
    worse = VarianceReport.of(SCHEDULE, windows(uneven), least_share=0.05, before=after)
    assert worse.varies_more
    assert "Remedy: the plan before" in str(worse.explain_change())


def test_words_of_every_cause() -> None:
    for kind in CauseKind:
        text = Cause(kind=kind, stage=1, target=2, cost_s=0.01, excess_s=0.02).explain(0.1)
        assert "stage 1" in text
        assert "10.0 ms longer (10%). Remedy: " in text


def test_spread() -> None:
    values = [0.1, 0.3, 0.2, 0.2]
    spread = Spread.of(values)
    assert spread.variance_s2 == pytest.approx(statistics.variance(values))
    assert spread.variation == pytest.approx(statistics.stdev(values) / 0.2)
    assert Spread.of([0.0]).variation == 0.0


def test_garbage_clock_hears_collections_until_it_is_stopped() -> None:
    clock = GarbageClock()
    clock.start()
    start = time.perf_counter()
    gc.collect()
    spans = clock.take()
    assert any(start <= a <= b <= time.perf_counter() for a, b in spans)
    clock.stop()
    gc.collect()
    assert clock.take() == []


def test_without_a_pipeline_it_rests() -> None:
    monitor = VarianceMonitor(window=1)
    before = list(gc.callbacks)
    fit(lambda: Regression(stack()), loaders(vectors), "auto", callbacks=[monitor], max_epochs=1)
    assert monitor.reports == []
    assert gc.callbacks == before


# -- injected into a real run ---------------------------------------------------------------

STEPS = 6
TOLERANCE_S = 0.05 * (MICRO_BATCHES + STAGES - 1) * (FORWARD_S + BACKWARD_S)  # 5 % of a step


def watched(sleeps: Sleeps, logger: RecordingLogger | None = None) -> dict[CauseKind, Cause]:
    """Train, and return the costliest cause of each kind."""
    monitor = VarianceMonitor(window=STEPS, warn_above=0.001)
    train(sleeps, [monitor], steps=STEPS, logger=logger or RecordingLogger())
    (report,) = monitor.reports
    causes: dict[CauseKind, Cause] = {}
    for cause in report.causes:
        causes.setdefault(cause.kind, cause)
    return causes


def slow_stage() -> None:
    logger = RecordingLogger()
    causes = watched(Sleeps(factors=(1.0, 1.0, 1.3, 1.0)), logger)
    cause = causes[CauseKind.SLOW_STAGE]
    assert cause.stage == 2
    truth_s = makespan_s(SCHEDULE, costs(1, 1, 1.3, 1)) - makespan_s(SCHEDULE, costs(1, 1, 1, 1))
    assert cause.cost_s == pytest.approx(truth_s, abs=TOLERANCE_S)
    assert cause.cost_s == max(c.cost_s for c in causes.values())
    if dist.get_rank() == 0:
        rows = [row for _, row in logger.history if "variance/step_mean_s" in row]
        assert len(rows) == 1
        assert rows[0]["variance/slow_stage_s"] >= cause.cost_s


def late_link() -> None:
    with slow_link(1, 2, 0.005):
        causes = watched(Sleeps(factors=(1.0,) * STAGES))
    cause = causes[CauseKind.SLOW_LINK]
    assert (cause.stage, cause.target) == (1, 2)
    assert cause.excess_s == pytest.approx(0.005, abs=0.002)
    assert 0 < cause.cost_s < 0.005 * 2 * MICRO_BATCHES + TOLERANCE_S


def slow_loader() -> None:
    causes = watched(Sleeps(factors=(1.0,) * STAGES, loader_s=0.05))
    cause = causes[CauseKind.DATA_LOADING]
    assert cause.cost_s == pytest.approx(0.05, abs=TOLERANCE_S)
    assert cause.cost_s == max(c.cost_s for c in causes.values())


def jittery_rank() -> None:
    extra_s = 0.09

    def extra(stage: int, call: int) -> None:
        if stage == 2 and call % (3 * MICRO_BATCHES) == MICRO_BATCHES:  # in every third step
            time.sleep(extra_s)

    causes = watched(Sleeps(factors=(1.0,) * STAGES, extra=extra))
    cause = causes[CauseKind.JITTER]
    assert cause.stage == 2
    assert cause.cost_s == pytest.approx(extra_s * 2 / STEPS, abs=TOLERANCE_S)
    assert cause.cost_s == max(c.cost_s for c in causes.values())


GARBAGE_S = 0.04


class _Slow:
    """A cycle whose collection takes a while."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(GARBAGE_S)


def garbage() -> None:
    def extra(stage: int, call: int) -> None:
        if stage == 1 and call % MICRO_BATCHES == 0:
            _Slow()
            gc.collect(0)

    causes = watched(Sleeps(factors=(1.0,) * STAGES, extra=extra))
    cause = causes[CauseKind.GARBAGE_COLLECTION]
    assert cause.stage == 1
    assert cause.cost_s == pytest.approx(GARBAGE_S, abs=TOLERANCE_S)
    assert cause.cost_s == max(c.cost_s for c in causes.values())


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=280)
def test_injected_delays_are_found_with_their_size() -> None:
    measured(slow_stage, late_link, slow_loader, jittery_rank, garbage)
