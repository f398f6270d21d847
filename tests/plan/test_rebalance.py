"""The best partition for measured times, against brute force; and when layers move, or back."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan import rebalance
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.rebalance import (
    Blame,
    Decision,
    Measurement,
    RebalanceError,
    RebalancePolicy,
    decide,
)
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.plan.trial import RebalanceState

POLICY = RebalancePolicy()


def times(num_stages: int, m: int):
    row = st.lists(st.integers(1, 9).map(float), min_size=m, max_size=m)
    return st.lists(row, min_size=num_stages, max_size=num_stages)


@st.composite
def cases(draw) -> tuple[Measurement, Partition, list[float]]:
    n = draw(st.integers(2, 7))
    stages = draw(st.integers(2, min(n, 4)))
    m = draw(st.integers(1, 4))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), min_size=stages - 1, max_size=stages - 1)))
    schedule = build_schedule(draw(st.sampled_from(["1f1b", "gpipe"])), stages, m)
    costs = StepCosts(forward_s=draw(times(stages, m)), backward_s=draw(times(stages, m)))
    step_s = makespan_s(schedule, costs) + draw(st.sampled_from([0.0, 5.0]))
    layers = draw(st.lists(st.integers(1, 9).map(float), min_size=n, max_size=n))
    return (
        Measurement(schedule=schedule, costs=costs, step_s=step_s),
        Partition((0, *cuts), n),
        layers,
    )


def predicted_s(
    measured: Measurement, old: Partition, layers: list[float], new: Partition
) -> tuple[float, float]:
    """The makespan if the layers are to blame, and if the devices are: written out slowly."""

    def table(which: tuple[tuple[float, ...], ...], *, devices: bool) -> list[list[float]]:
        sums = [sum(layers[k] for k in run) for run in old.ranges]
        rows = []
        for stage, run in enumerate(new.ranges):
            home = [stage if devices else old.stage_of(k) for k in run]
            pairs = list(zip(run, home, strict=True))
            rows.append(
                [
                    sum(which[s][i] * layers[k] / sums[s] for k, s in pairs)
                    for i in range(measured.schedule.num_micro_batches)
                ]
            )
        return rows

    both = []
    for devices in (False, True):
        costs = StepCosts(
            forward_s=table(measured.costs.forward_s, devices=devices),
            backward_s=table(measured.costs.backward_s, devices=devices),
        )
        both.append(makespan_s(measured.schedule, costs))
    return both[0], both[1]


@settings(max_examples=60, deadline=None)
@given(case=cases(), rejects=st.booleans())
def test_is_the_best_of_all_partitions_by_the_worse_prediction(case, rejects: bool) -> None:
    measured, old, layers = case
    n = old.num_layers
    every = [Partition((0, *c), n) for c in itertools.combinations(range(1, n), old.num_stages - 1)]
    now_s, _ = predicted_s(measured, old, layers, old)
    changes = {p: [s - now_s for s in predicted_s(measured, old, layers, p)] for p in every}
    values = {
        p: max(c) + (rebalance._MEAN * sum(c) / 2 if max(c) < -1e-9 else 0.0)
        for p, c in changes.items()
    }
    taboo = set()
    if rejects:
        taboo = {decide(measured, old, layers, POLICY).best} - {old}
    decision = decide(measured, old, layers, POLICY, taboo)
    least = min(value for p, value in values.items() if p not in taboo)
    assert decision.best not in taboo
    assert values[decision.best] == pytest.approx(least, abs=1e-6)
    assert decision.predicted_s == pytest.approx(
        measured.step_s + max(changes[decision.best]), rel=1e-9
    )
    assert decision.moves == (decision.best != old and decision.gain >= POLICY.threshold)


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_a_search_around_the_best_bottlenecks_is_never_worse_than_what_it_begins_with(case) -> None:
    measured, old, layers = case
    whole = decide(measured, old, layers, POLICY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalance, "_ALL_CELLS", 0)
        found = decide(measured, old, layers, POLICY)
    assert whole.predicted_s <= found.predicted_s + 1e-9
    assert found.predicted_s <= measured.step_s + 1e-9


def measured(forward_s: list[float], m: int = 4, other_s: float = 0.0) -> Measurement:
    schedule = build_schedule("1f1b", len(forward_s), m)
    costs = StepCosts(
        forward_s=[[s] * m for s in forward_s], backward_s=[[2 * s] * m for s in forward_s]
    )
    return Measurement(schedule=schedule, costs=costs, step_s=makespan_s(schedule, costs) + other_s)


def test_a_slow_device_gives_a_layer_away() -> None:
    """Six layers of equal cost on each of three devices, the middle one half as fast."""
    decision = decide(measured([6, 12, 6]), Partition((0, 6, 12), 18), [1.0] * 18, POLICY)
    assert decision.moves
    # (7, 4, 7) is as good if the layers are to blame, but worse if the device is.
    assert [len(run) for run in decision.best.ranges] == [8, 3, 7]
    assert (decision.step_s, decision.predicted_s) == (168.0, pytest.approx(144.0))
    assert decision.busy_s == (72.0, 144.0, 72.0)


def test_balanced_stages_stay() -> None:
    old = Partition((0, 3), 6)
    decision = decide(measured([3, 3]), old, [1.0] * 6, POLICY)
    assert (decision.best, decision.moves, decision.gain) == (old, False, 0.0)


def test_a_gain_is_a_share_of_the_whole_step() -> None:
    old = Partition((0, 3), 6)
    args = old, [1.0] * 6, RebalancePolicy(threshold=0.1)
    assert decide(measured([3, 6]), *args).moves
    assert not decide(measured([3, 6], other_s=1000.0), *args).moves


def test_layers_without_a_cost_can_be_measured_too() -> None:
    decision = decide(measured([1, 8]), Partition((0, 1), 4), [0.0] * 4, POLICY)
    assert decision.best.starts == (0, 3)  # nearly as good as (0, 2) at worst, and better else


def test_a_long_network_is_decided_on_quickly() -> None:
    layers = [1.0 + k % 3 for k in range(400)]
    old = Partition(tuple(range(0, 400, 50)), 400)
    decision = decide(measured([1, 1, 1, 2, 1, 1, 1, 1], m=16), old, layers, POLICY)
    assert decision.moves
    assert decision.gain > 0.2


# -- from move to move ------------------------------------------------------------------------

OLD, NEW = Partition((0, 3), 6), Partition((0, 4), 6)
MOVE = Decision(
    partition=OLD, best=NEW, busy_s=(1.0, 2.0), step_s=10.0, predicted_s=8.0, moves=True
)


@pytest.mark.parametrize(("step_s", "kept"), [(8.0, True), (8.9, True), (9.1, False), (12, False)])
def test_a_move_stays_if_half_of_its_gain_comes(step_s: float, kept: bool) -> None:
    policy = RebalancePolicy(cool_down=20)
    state = RebalanceState().begun(MOVE)
    assert not state.may_move(10**6)
    judgement, state = state.judged(step_s, 100, policy)
    assert judgement.kept is kept
    assert state.rejected == (set() if kept else {NEW})
    assert [state.may_move(step) for step in (101, 119, 120)] == [False, False, True]


def test_what_was_undone_is_not_tried_again() -> None:
    window = measured([3, 6])
    first = decide(window, OLD, [1.0] * 6, POLICY)
    _, state = RebalanceState().begun(first).judged(99.0, 5, POLICY)
    again = decide(window, OLD, [1.0] * 6, POLICY, state.rejected)
    assert again.best != first.best
    # The present partition is never taboo: it is what all others are compared with.
    assert decide(window, OLD, [1.0] * 6, POLICY, {OLD}).partition == OLD


def test_the_first_move_shows_what_is_to_blame() -> None:
    """Rank 1 is three times slower. If the layers were, a second layer would not be worth it."""
    six = [1.0] * 6
    first = decide(measured([3, 9]), OLD, six, POLICY)
    assert first.best == NEW
    assert first.predicted_busy_s == {
        Blame.LAYERS: pytest.approx((72, 72)),
        Blame.DEVICES: pytest.approx((48, 72)),
    }
    window = measured([4, 6])
    _, state = RebalanceState().begun(first).judged(window.step_s, 5, POLICY, window.busy_s)
    assert state.blame is Blame.DEVICES
    assert not decide(window, NEW, six, POLICY).moves
    assert decide(window, NEW, six, POLICY, blame=state.blame).best.starts == (0, 5)
    _, state = RebalanceState().begun(first).judged(window.step_s, 5, POLICY, (60, 72))
    assert state.blame is None
    _, state = RebalanceState().begun(first).judged(window.step_s, 5, POLICY, (71, 72))
    assert state.blame is Blame.LAYERS


def test_refusals_name_value_and_remedy() -> None:
    with pytest.raises(RebalanceError, match="no move waits"):
        RebalanceState().judged(1.0, 0, POLICY)
    for wrong in ({"threshold": 0.0}, {"kept_share": 1.5}, {"cool_down": -1}):
        with pytest.raises(RebalanceError, match=rf"{next(iter(wrong))}=.*Remedy"):
            RebalancePolicy(**wrong)
    window = measured([1, 1])
    with pytest.raises(RebalanceError, match="5 layer costs"):
        decide(window, OLD, [1.0] * 5, POLICY)
    with pytest.raises(RebalanceError, match=r"layer_costs\[2\]=-1"):
        decide(window, OLD, [1, 1, -1, 1, 1, 1], POLICY)
    with pytest.raises(RebalanceError, match="step_s=0"):
        replace(window, step_s=0)
