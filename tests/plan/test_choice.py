"""The choice of a whole plan: candidates, workload, search."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.bottleneck import PartitionError
from pipeswift_lightning.plan.cost_model import CostModel, LayerModel, TimeModel
from pipeswift_lightning.plan.costs import CostError, Link
from pipeswift_lightning.plan.formation import Formation
from pipeswift_lightning.plan.microbatches import MicroBatchError, split_batch_size
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.report import describe_choice
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.search import choose_plan
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.plan.workload import Layout, Workload

LENGTHS = tuple(np.random.default_rng(0).lognormal(5, 0.9, 24).astype(int).tolist())


def network(layers: int = 8, *, fixed_s: float = 0.0, error: float = 0.0) -> CostModel:
    times = TimeModel(fixed_s=fixed_s, token_s=1e-3, square_s=1e-6)
    layer = LayerModel(
        forward=times,
        backward=times.plus(times),
        static_bytes=1000,
        output_bytes_per_token=4,
        activation_bytes_per_token=2,
        recomputed_bytes_per_token=0.1,
    )
    return CostModel(layers=(layer,) * layers, relative_error=error)


def first_come_first_served(workload: Workload, name: str, m: int) -> float:
    """Predict what a strategy that knows no costs would run."""
    sizes = split_batch_size(len(workload.lengths), m)
    ends = np.cumsum([0, *sizes])
    formation = Formation(tuple(tuple(range(a, b)) for a, b in pairwise(ends)))
    size = len(workload.model.layers) // workload.num_stages
    partition = Partition(tuple(range(0, len(workload.model.layers), size)), 8)
    costs = workload.step_costs(partition, formation)
    schedule = build_schedule(name, workload.num_stages, m)
    return makespan_s(schedule, costs, link=workload.link, overlap=workload.overlap)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    layout=st.sampled_from(Layout),
    overlap=st.booleans(),
    sessions=st.booleans(),
)
def test_never_predicted_worse_than_first_come_first_served(
    seed, layout, overlap, sessions
) -> None:
    random = np.random.default_rng(seed)
    lengths = random.lognormal(5, 0.9, 16).astype(int) + 1
    workload = Workload(
        model=network(error=0.05),
        lengths=tuple(lengths.tolist()),
        num_stages=4,
        layout=layout,
        link=Link(latency_s=0.01, bandwidth_bytes_per_s=1e5),
        overlap=overlap,
        sessions=tuple(random.integers(0, 5, 16).tolist()) if sessions else None,
    )
    choice = choose_plan(workload, num_micro_batches=[8])
    for name in ("1f1b", "gpipe"):
        bound = first_come_first_served(workload, name, 8)
        assert choice.chosen.step_s <= bound * (1 + 1e-9)
    timeline = choice.chosen.timeline(workload)
    assert timeline.makespan_s == pytest.approx(choice.chosen.step_s, rel=1e-12)
    ran = [i for part in choice.chosen.formation.samples for i in part]
    assert sorted(ran) == list(range(16))
    if workload.sessions is not None:
        for session in set(workload.sessions):
            ids = [i for i in ran if workload.sessions[i] == session]
            assert ids == sorted(ids)


@pytest.mark.parametrize("layout", Layout)
def test_uneven_samples_gain_much(layout: Layout) -> None:
    workload = Workload(model=network(), lengths=LENGTHS, num_stages=4, layout=layout)
    chosen = choose_plan(workload, num_micro_batches=8).chosen
    assert chosen.step_s < 0.8 * first_come_first_served(workload, "1f1b", 8)
    assert chosen.reorders


def test_reorders_only_for_more_than_the_prediction_may_be_off() -> None:
    sure = Workload(model=network(error=0.0), lengths=LENGTHS, num_stages=4)
    unsure = replace(sure, model=network(error=0.9))
    first = choose_plan(sure, num_micro_batches=8)
    second = choose_plan(unsure, num_micro_batches=8)
    assert first.chosen.reorders
    assert not second.chosen.reorders
    best = second.rejected[0]
    assert best.step_s is not None
    assert best.step_s < second.chosen.step_s
    assert "within the prediction's error of 90.0%" in best.reason
    assert all(other.reason.endswith("slower") for other in first.rejected)


def test_a_layout_may_be_given_by_name() -> None:
    workload = Workload(model=network(), lengths=LENGTHS, num_stages=4, layout="padded")
    assert workload == replace(workload, layout=Layout.PADDED)
    assert workload.layout is Layout.PADDED


def test_equal_samples_stay_in_their_order() -> None:
    workload = Workload(model=network(), lengths=(64,) * 16, num_stages=4)
    choice = choose_plan(workload, num_micro_batches=8)
    assert not choice.chosen.reorders
    assert choice.chosen.step_s == pytest.approx(first_come_first_served(workload, "1f1b", 8))


def test_the_order_of_the_data_can_be_kept() -> None:
    workload = Workload(model=network(), lengths=LENGTHS, num_stages=4, reorder=False)
    choice = choose_plan(workload, num_micro_batches=[4, 8])
    samples = [i for part in choice.chosen.formation.samples for i in part]
    assert samples == list(range(len(LENGTHS)))
    assert not any("ordered" in other.name for other in choice.rejected)


@pytest.mark.parametrize("order", ["fifo", "heaviest_first", "lightest_first", "hill"])
def test_an_order_that_is_asked_for_is_kept_whatever_it_gains(order: str) -> None:
    workload = Workload(model=network(error=0.5), lengths=LENGTHS, num_stages=4, order=order)
    choice = choose_plan(workload, num_micro_batches=8, evaluations=50)
    costs = choice.chosen.costs
    weights = np.sum(costs.forward_s, axis=0) + np.sum(costs.backward_s, axis=0)
    rises = np.diff(weights)
    assert choice.chosen.order == order
    match order:
        case "heaviest_first":
            assert (rises <= 1e-12).all()
        case "lightest_first":
            assert (rises >= -1e-12).all()
        case "hill":
            peak = int(weights.argmax())
            assert (rises[:peak] >= -1e-12).all()
            assert (rises[peak:] <= 1e-12).all()
        case _:
            assert not any("ordered" in plan.name for plan in choice.rejected)


def test_prediction_runs_the_shortest_first_for_the_least_mean_wait() -> None:
    def mean_end(order: str) -> float:
        workload = Workload(
            model=network(), lengths=LENGTHS, num_stages=2, layout="packed", order=order
        )
        choice = choose_plan(workload, num_micro_batches=8, schedules=("forward_only",))
        timeline = choice.chosen.timeline(workload)
        ends = [e.end_s for e in timeline.events if e.stage == 1 and e.kind is EventKind.FORWARD]
        assert "a micro-batch is done after" in describe_choice(choice, workload)
        return float(np.mean(ends))

    assert mean_end("shortest_first") <= mean_end("heaviest_first")


def test_a_fixed_cost_keeps_the_number_of_micro_batches_down() -> None:
    best = []
    for fixed_s in (0.0, 1.0):
        model = network(fixed_s=fixed_s)
        workload = Workload(model=model, lengths=(100,) * 32, num_stages=2)
        choice = choose_plan(workload, schedules=("1f1b",))
        assert [m for m, _ in choice.sweep] == [2, 4, 6, 8, 12, 16]
        assert min(choice.sweep, key=lambda entry: entry[1])[1] == choice.chosen.step_s
        best.append(len(choice.chosen.formation.samples))
    assert best[0] > best[1]


def test_gpipe_is_out_where_its_micro_batches_in_flight_do_not_fit() -> None:
    model = network()
    tokens = 100
    # A stage of four layers: 4000 static, and 4 x 2 x 100 for each micro-batch in flight.
    workload = Workload(
        model=model, lengths=(tokens,) * 8, num_stages=2, capacity_bytes=(4000 + 3 * 800,) * 2
    )
    choice = choose_plan(workload, num_micro_batches=8)
    assert choice.chosen.schedule_name == "1f1b"
    assert choice.chosen.warm_up is not None
    assert max(choice.chosen.warm_up) <= 3
    unfit = [other for other in choice.rejected if other.step_s is None]
    assert any(other.name.startswith("gpipe") for other in unfit)
    assert all("do not fit the memory of 2 stages" in other.reason for other in unfit)
    with pytest.raises(PartitionError, match="recompute the layers in backward"):
        choose_plan(replace(workload, capacity_bytes=(4100,) * 2), num_micro_batches=8)


def test_most_tokens_of_a_micro_batch() -> None:
    workload = Workload(
        model=network(), lengths=LENGTHS, num_stages=2, layout=Layout.PACKED, max_tokens=700
    )
    choice = choose_plan(workload, num_micro_batches=12)
    assert max(shape.tokens for shape in workload.shapes(choice.chosen.formation)) <= 700
    with pytest.raises(MicroBatchError, match="at most 100"):
        choose_plan(replace(workload, max_tokens=100), num_micro_batches=12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, r"lengths=\[\] make no batch"),
        ({"lengths": (3, 0)}, r"lengths=\[3, 0\] make no batch"),
        ({"slowdown": (1.0,)}, "slowdown has 1 entries"),
        ({"layout": "ragged"}, r"layout='ragged' is not known\. Rule: one of padded, packed"),
        ({"sessions": (1,)}, r"sessions has 1 entries\. Rule: one for each of the 24 samples"),
    ],
)
def test_what_makes_no_workload(change, message) -> None:
    with pytest.raises(CostError, match=message):
        Workload(**{"model": network(), "lengths": LENGTHS, "num_stages": 2, **change})
