"""Measured costs are scaled to what steps take, at the same step on every rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.partition import explicit_partition
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recorder import StepRecord
from pipeswift_lightning.strategies import cost_calibration, planning
from pipeswift_lightning.strategies.cost_calibration import CostCalibration
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.planning import StepPlanner
from tests.helpers.networks import Padded, pad
from tests.helpers.parity import differences, fit, plain
from tests.helpers.planned import LAYERS, costs, quick_choice
from tests.strategies.test_look_ahead import Streamed
from tests.strategies.test_planning import call

SLOWER = 1.25, 0.75  # than its costs, by stage
LENGTHS = [3, 5, 2, 8]
OPTIONS = PipelineOptions.of(costs="measure")


def planner(stages: int, source: str = "measure") -> StepPlanner:
    made = StepPlanner(Padded(), PipelineOptions.of(costs=source), stages)
    begin(made, costs())
    return made


def begin(made: StepPlanner, model: CostModel) -> None:
    partition = explicit_partition(LAYERS, starts=[0, LAYERS // 2][: made._num_stages])
    made.begin(model, partition, number=2, num_samples=len(LENGTHS), schedule="1f1b")


def groups_of(stages: int) -> MeshGroups:
    return MeshGroups.create(Mesh(num_stages=stages, num_replicas=1), dist.get_rank())


def chosen_by(made: StepPlanner) -> Candidate:
    choice = made.planned(call(LENGTHS)).choice
    assert choice is not None
    return choice


def run(made: StepPlanner, stage: int) -> tuple[Candidate, StepRecord]:
    """Plan a step, and have the stage compute as much longer as it does."""
    chosen, factor = chosen_by(made), made.slowdown[stage] if made.slowdown else 1.0
    record, now = StepRecord(stage, None), 0.0
    for kind, seconds in (
        (EventKind.FORWARD, chosen.costs.forward_s),
        (EventKind.BACKWARD, chosen.costs.backward_s),
    ):
        for micro_batch, cost_s in enumerate(seconds[stage]):
            end = now + cost_s * SLOWER[stage] / factor
            record.add(kind, stage, micro_batch, now, end)
            now = end + 1.0  # idle, which counts for nothing
    return chosen, record


def calibrated(made: StepPlanner, groups: MeshGroups, steps: int, **options: Any) -> list[Any]:
    """Return what is planned with after each step."""
    calibration, found = CostCalibration(made, groups, Progress(), **options), []
    for _ in range(steps):
        calibration.note(*run(made, groups.coordinate.stage))
        calibration.apply()
        calibration.apply()  # as before a validation batch that follows
        found.append(made.slowdown)
    return found


@pytest.fixture
def alone() -> Iterator[MeshGroups]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = groups_of(1)
    yield groups
    groups.close()
    dist.destroy_process_group()


def test_one_stage_is_scaled_after_eight_steps(alone: MeshGroups) -> None:
    made = planner(1)
    before = chosen_by(made)
    found = calibrated(made, alone, 17)
    assert found[:7] == [None] * 7
    assert found[7] == pytest.approx(SLOWER[:1])
    assert found[7:] == [found[7]] * 10  # what has not changed changes nothing
    assert chosen_by(made).step_s == pytest.approx(before.step_s * SLOWER[0])


def test_compiled_layers_take_longer_to_be_compared(alone: MeshGroups) -> None:
    found = calibrated(planner(1), alone, 64, compiles=True)
    assert found[:63] == [None] * 63
    assert found[63] == pytest.approx(SLOWER[:1])


def test_a_file_of_costs_is_taken_as_it_is(alone: MeshGroups) -> None:
    assert calibrated(planner(1, "costs.json"), alone, 17) == [None] * 17


def test_a_resumed_run_plans_with_the_same_factors() -> None:
    made = planner(2)
    made.slow_down(SLOWER)
    state = made.state()
    resumed, early = planner(2), StepPlanner(Padded(), OPTIONS, 2)
    resumed.load_state(state)
    early.load_state(state)  # as it is: before the first batch
    begin(early, costs())
    for each in (resumed, early):
        assert each.slowdown == SLOWER
        assert chosen_by(each) == chosen_by(made)


def test_factors_of_other_stages_or_costs_are_left() -> None:
    made = planner(2)
    made.slow_down(SLOWER)
    others = planner(1), planner(2, "costs.json"), StepPlanner(Padded(), OPTIONS, 2)
    for each in others:
        each.load_state(made.state())
    begin(others[-1], costs(error=0.5))
    assert [each.slowdown for each in others] == [None] * 3


@pytest.mark.world_size(2)
def test_steps_are_counted_anew_when_layers_have_moved() -> None:
    made = planner(2)
    calibration = CostCalibration(made, groups_of(2), Progress())
    for step in range(6 + 8):
        if step == 6:
            made.repartition(explicit_partition(LAYERS, starts=[0, 1]))
        assert made.slowdown is None
        calibration.note(*run(made, dist.get_rank()))
        calibration.apply()
    assert made.slowdown == pytest.approx(SLOWER)


@pytest.mark.world_size(2)
def test_every_rank_plans_with_the_factors_of_all() -> None:
    made, groups = planner(2), groups_of(2)
    before = chosen_by(made)
    assert calibrated(made, groups, 9)[7:] == [pytest.approx(SLOWER)] * 2
    after = chosen_by(made)
    assert (after.step_s, after.formation) != (before.step_s, before.formation)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, (made.slowdown, after))
    assert everywhere[0] == everywhere[1]


class Factors(Callback):
    """Notes what each step was planned with."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found.append(trainer.strategy.session.planner.slowdown)


def streamed() -> DataLoader:
    return DataLoader(Streamed(), batch_size=8, collate_fn=pad)


class Slow:
    """In place of what is measured: the stages take turns in being slow."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, busy_s: float, chosen: Any, stage: int, **_: Any) -> float:
        assert busy_s > 0
        self.calls += 1
        return 4.0 if (self.calls > 5) == (stage == 0) else 1.0


@pytest.mark.world_size(2, deadline_s=180)
def test_training_is_exact_while_factors_change_and_batches_are_planned_ahead(
    tmp_path: Path,
) -> None:
    fits = {"max_epochs": 4, "default_root_dir": tmp_path}
    want = plain(Padded, streamed, **fits)
    cost_calibration.slowdown_of = Slow()  # type: ignore[assignment]
    planning.choose_plan = quick_choice
    found: list[Any] = []
    strategy = PipeSwiftStrategy(costs="measure", micro_batches=4, loss="per_sample")
    got = fit(Padded, streamed, strategy, callbacks=lambda: [Factors(found)], **fits)
    assert differences(got, want) == []
    assert found == [None] * 8 + [(1.0, 4.0)] * 8 + [(4.0, 1.0)] * 4
