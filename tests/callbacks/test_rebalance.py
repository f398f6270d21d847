"""A slow device gives layers away, and gets them back if that did not help."""

import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from pipeswift_lightning.callbacks import Rebalance
from pipeswift_lightning.callbacks import rebalance as module
from pipeswift_lightning.callbacks.pipeline import CallbackError
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.step_window import StepWindow, measurement
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan, make_plan
from pipeswift_lightning.plan.rebalance import Blame, RebalanceError
from pipeswift_lightning.plan.timeline import EventKind
from tests.callbacks.sleepers import BACKWARD_S, FORWARD_S, Sleeper, Sleeps, measured, train
from tests.helpers.modules import loader
from tests.helpers.parity import lone_trainer

SHARE = 0.2  # of the sleepers' usual times
WINDOW = 4


class Last(Callback):
    """Notes the partition at the end."""

    sizes: list[int]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.sizes = [len(layers) for layers in trainer.strategy.partition.ranges]


def _run(extra: Any, *, steps: int, **kwargs: Any) -> tuple[Rebalance, Last, list[str]]:
    said: list[str] = []
    module.rank_zero_info, usual = said.append, module.rank_zero_info
    rebalance, last = Rebalance(every_n_steps=WINDOW, window=WINDOW, **kwargs), Last()
    try:
        sleeps = Sleeps(factors=(SHARE,) * 6, extra=extra)
        train(sleeps, [rebalance, last], steps=steps, micro_batches=3, batch_size=3, stages=2)
    finally:
        module.rank_zero_info = usual
    return rebalance, last, said


def _slow(layer: int, calls: int) -> None:
    """Rank 1's device takes three times as long for every layer."""
    if dist.get_rank() == 1:
        time.sleep(2 * SHARE * (FORWARD_S + BACKWARD_S))


def _slow_and_lying(layer: int, calls: int) -> None:
    """So it does, but its layers take yet longer elsewhere."""
    _slow(layer, calls)
    if dist.get_rank() == 0 and layer > 2:
        time.sleep(0.1)


def _check_healed() -> None:
    rebalance, last, said = _run(_slow, steps=16, cool_down=0)
    first = rebalance.moves[0]
    assert [d.partition.starts for d in rebalance.decisions[:1]] == [(0, 3)]
    assert first.decision.best.starts == (0, 4)
    assert first.judgement is not None
    assert first.judgement.kept
    # A step takes 9 + 9 + 9 + 3 of a layer's times, then 6 + 6 + 6 + 4.
    assert first.judgement.step_s < 0.9 * first.decision.step_s
    # Then it is plain that the device is to blame, and another layer may go: 5 + 5 + 5 + 3.
    assert rebalance._state.blame is Blame.DEVICES
    assert last.sizes == [5, 1]
    assert first.num_bytes > 0
    assert first.seconds > 0
    assert any("[3, 3] -> [4, 2]" in line and "are predicted (-" in line for line in said)
    assert any("[4, 2] is kept: a step takes" in line for line in said)


def _check_reverted() -> None:
    rebalance, last, said = _run(_slow_and_lying, steps=12, cool_down=100)
    (move,) = rebalance.moves
    assert move.judgement is not None
    assert not move.judgement.kept
    assert move.decision.best.starts == (0, 4)
    assert last.sizes == [3, 3]
    assert rebalance.state_dict() == {"rejected": [[[0, 4], 6]]}
    assert any("moved back to [3, 3], not to be tried again" in line for line in said)


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=200)
def test_a_slow_device_is_relieved_and_a_wrong_prediction_undone() -> None:
    measured(_check_healed, _check_reverted)


# -- without processes ------------------------------------------------------------------------


def test_one_stage_says_once_that_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "rank_zero_info", said.append)
    rebalance = Rebalance(every_n_steps=1, window=1)
    from pipeswift_lightning import PipeSwiftStrategy
    from tests.callbacks.sleepers import Samples

    trainer = lone_trainer(PipeSwiftStrategy(), callbacks=[rebalance], max_steps=3)
    trainer.fit(Sleeper(Sleeps(factors=(0.0, 0.0))), loader(partial(Samples, 6, 2, 0.0), 2))
    assert rebalance.decisions == []
    assert len(said) == 1
    assert "there is one stage" in said[0]


PLAN = make_plan(partition=Partition((0, 1), 2), micro_batches=MicroBatches((1, 1)))


def window(step_s: list[float], factor: float = 1.0, plan: Plan = PLAN) -> StepWindow:
    """Steps of two micro-batches; in each, a computation takes ``factor`` of its step."""
    result = StepWindow(length=4)
    for batch, seconds in enumerate(step_s, start=1):
        kinds = (EventKind.FORWARD, EventKind.BACKWARD)
        computed = {(kind, i): factor * seconds for kind in kinds for i in range(2)}
        result.add(batch, plan, StepParts(step_s=seconds, computed_s=computed))
    return result


def test_a_window_is_known_by_its_medians_and_its_slowest_replica() -> None:
    every = [
        [window([9.0, 1.0, 1.0, 1.5, 50.0]), window([9.0, 1.0, 1.0, 1.5, 50.0], 2.0)],
        [window([9.0, 1.0, 1.0, 1.5, 50.0], 3.0), window([9.0, 2.0, 1.0, 1.5, 50.0], 0.5)],
    ]
    found = measurement(every)
    assert found is not None
    assert found.step_s == 1.75  # of 2, 1, 1.5 and 50: the first has left the window
    assert found.costs.forward_s == ((3.75, 3.75), (2.5, 2.5))
    assert found.schedule is PLAN.schedule


def test_a_window_with_few_steps_of_one_kind_says_nothing() -> None:
    assert measurement([[StepWindow(4), StepWindow(4)]]) is None
    assert measurement([[window([1.0]), window([1.0])]]) is None
    assert measurement([[window([1.0, 1.0]), window([1.0, 1.0])]]) is not None
    other = make_plan(
        partition=PLAN.partition, micro_batches=PLAN.micro_batches, schedule_name="gpipe"
    )
    assert measurement([[window([1.0, 1.0]), window([1.0, 1.0], plan=other)]]) is None


def test_what_was_undone_is_remembered_in_checkpoints() -> None:
    first, second = Rebalance(), Rebalance()
    second.load_state_dict({"rejected": [[[0, 4], 6]]})
    first.load_state_dict(second.state_dict())
    assert first._state.rejected == {Partition((0, 4), 6)}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"every_n_steps": 0}, CallbackError),
        ({"window": 0}, CallbackError),
        ({"every_n_steps": 10, "window": 20}, CallbackError),
        ({"threshold": 1.0}, RebalanceError),
        ({"kept_share": -0.1}, RebalanceError),
    ],
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"{next(iter(wrong))}=.*Remedy"):
        Rebalance(**wrong)
