"""A slow device gives layers away, and gets them back if that did not help."""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from pipeswift_lightning.callbacks import Rebalance
from pipeswift_lightning.callbacks import rebalance as module
from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.callbacks.step_window import StepWindow, measurement
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition, explicit_partition
from pipeswift_lightning.plan.planner import Plan, make_plan
from pipeswift_lightning.plan.rebalance import Blame
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.plan.trial import RebalanceState
from pipeswift_lightning.strategies.repartition import Moved, RepartitionError
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


class Fake:
    """One rank of two replicas of two stages; ranks are threads, which meet in gathering."""

    def __init__(self, rank: int, costs: list[float], ranks: "Ranks") -> None:
        self.rank, self.costs, self.ranks = rank, costs, ranks
        self.partition = Partition((0, 3), 6)
        self.plan = make_plan(partition=self.partition, micro_batches=MicroBatches((1, 1)))
        self.wanted: list[list[int]] = []
        self.refuses = False

    def why_fixed(self) -> None:
        return None

    def layer_costs(self) -> list[float]:
        return self.costs

    def all_stages(self, what: str, value: Any) -> list[list[Any]]:
        found = self.ranks.gather(self.rank, value)
        return [found[:2], found[2:]]

    def repartition(self, layers: list[int]) -> Moved:
        self.wanted.append(list(layers))
        if self.refuses:
            raise RepartitionError("no room")
        self.partition = explicit_partition(6, layers_per_stage=layers)
        return Moved(seconds=0.0, num_bytes=0)


class Ranks:
    """Where threads exchange values."""

    def __init__(self, number: int) -> None:
        self.values: list[Any] = [None] * number
        self.barrier = Barrier(number, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


IDLE: Any = SimpleNamespace(is_global_zero=False, loggers=[])  # all that is asked of a Trainer


def look(rebalance: Rebalance, fake: Fake, batches: int, step_s: float, factor: float) -> None:
    """Let a rank look after steps in each of which it computes ``4 * factor`` of the time."""
    rebalance._batches = batches
    rebalance._steps = window([step_s] * 4, factor, fake.plan)
    rebalance._look(IDLE, cast("Any", fake))


def decided(costs: list[list[float]]) -> list[list[int]]:
    """Return what each of four ranks wants to have moved."""
    ranks = Ranks(4)
    fakes = [Fake(rank, own, ranks) for rank, own in enumerate(costs)]

    def decide(fake: Fake) -> None:
        rebalance = Rebalance(every_n_steps=4, window=4)
        look(rebalance, fake, 4, 1.0, 0.1 if fake.rank % 2 == 0 else 0.2)

    with ThreadPoolExecutor(len(fakes)) as pool:
        list(pool.map(decide, fakes))
    return [sizes for fake in fakes for sizes in fake.wanted]


def test_ranks_with_costs_of_their_own_decide_alike() -> None:
    """Each replica has the costs of its own last batch: they wanted other stages, and hung."""
    even, uneven = [1.0] * 6, [1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    (wanted,) = {tuple(sizes) for sizes in decided([even] * 4)}
    assert decided([uneven] * 4)[0] != list(wanted)
    assert decided([even, even, uneven, uneven]) == [list(wanted)] * 4
    assert decided([even, uneven, uneven, uneven]) == [list(wanted)] * 4


def alone(**kwargs: Any) -> tuple[Rebalance, Fake]:
    """A callback and its pipeline, whose second stage is slow; the other ranks say the same."""
    fake = Fake(0, [1.0] * 6, Ranks(1))
    fake.all_stages = lambda what, value: [[value, (_slower(value[0]), value[1])]]  # type: ignore[method-assign]
    return Rebalance(every_n_steps=4, window=4, **kwargs), fake


def _slower(steps: StepWindow) -> StepWindow:
    slow = [
        replace(s, computed_s={key: 2 * seconds for key, seconds in s.computed_s.items()})
        for s in steps.steps
    ]
    return replace(steps, steps=deque(slow))


def test_a_second_fit_begins_without_the_firsts_trial() -> None:
    rebalance, fake = alone()
    rejected = Partition((0, 5), 6)
    rebalance.load_state_dict({"rejected": [[[0, 5], 6]]})
    look(rebalance, fake, 1000, 1.0, 0.1)
    assert len(rebalance.moves) == 1
    assert rebalance._state.trial is not None  # and this run ends before its gain is known
    trainer = SimpleNamespace(strategy=SimpleNamespace(step_events=tuple))
    rebalance.setup(cast("Any", trainer), cast("Any", None), "fit")
    assert rebalance._state == RebalanceState(rejected=frozenset({rejected}))
    look(rebalance, fake, 4, 1.0, 0.1)
    assert len(rebalance.decisions) == 1


@pytest.mark.parametrize("refuses", [True, False])
def test_a_move_back_that_is_refused_ends_no_training(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "rank_zero_info", said.append)
    rebalance, fake = alone(cool_down=10)
    look(rebalance, fake, 4, 1.0, 0.1)
    moved = fake.partition
    fake.refuses = refuses
    look(rebalance, fake, 10, 1.0, 0.1)  # no faster than before
    assert fake.wanted[1:] == [[3, 3]]
    (move,) = rebalance.moves
    assert move.judgement is not None
    assert move.judgement.kept is refuses
    assert fake.partition == (moved if refuses else Partition((0, 3), 6))
    text = "but stays, since [3, 3] is refused (no room)" if refuses else "moved back to [3, 3]"
    assert text in said[-1]
    assert rebalance._state.rejected == {moved}
    look(rebalance, fake, 14, 1.0, 0.1)  # it is quiet, then goes on
    assert len(rebalance.decisions) == 1
    fake.refuses = False
    look(rebalance, fake, 20, 1.0, 0.1)
    assert len(rebalance.decisions) == 2


def test_what_was_undone_is_remembered_in_checkpoints() -> None:
    first, second = Rebalance(), Rebalance()
    second.load_state_dict({"rejected": [[[0, 4], 6]]})
    first.load_state_dict(second.state_dict())
    assert first._state.rejected == {Partition((0, 4), 6)}
