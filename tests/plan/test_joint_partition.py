import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan import joint_partition
from pipeswift_lightning.plan.bottleneck import LayerMemory, PartitionError, StageProblem
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.joint_partition import StepShape, simulated_partition
from pipeswift_lightning.plan.partition import best_partition
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import makespan_s


def simulated(problem: StageProblem, shape: StepShape, starts, warm_up: float) -> float:
    bounds = (*starts, len(problem.costs_s))
    slowdown = problem.slowdown or (1.0,) * problem.num_stages
    loads = [
        sum(problem.costs_s[a:b]) * slow
        for slow, (a, b) in zip(slowdown, itertools.pairwise(bounds), strict=True)
    ]
    forward = np.outer(loads, shape.scales)
    sent = None
    if shape.cut_bytes is not None and problem.num_stages > 1:
        sent = np.outer([shape.cut_bytes[k] for k in starts[1:]], shape.scales)
    costs = StepCosts(
        forward_s=forward, backward_s=forward * shape.backward_ratio, activation_bytes=sent
    )
    schedule = one_f_one_b(problem.num_stages, len(shape.scales), warm_up=warm_up)
    return makespan_s(schedule, costs, link=shape.link, overlap=shape.overlap)


@pytest.mark.parametrize("all_cells", [10**9, 0], ids=["all partitions", "search"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_is_the_best_of_all_partitions(all_cells, seed, data) -> None:
    random = np.random.default_rng(seed)
    stages = data.draw(st.integers(1, 4))
    n, m = data.draw(st.integers(stages, 9)), data.draw(st.integers(1, 6))
    wired, slow = data.draw(st.booleans()), data.draw(st.booleans())
    problem = StageProblem(
        costs_s=random.uniform(0.5, 2, n),
        num_stages=stages,
        slowdown=random.uniform(1, 2, stages) if slow else None,
    )
    shape = StepShape(
        scales=random.uniform(0.5, 2, m),
        cut_bytes=random.uniform(0, 2, n) if wired else None,
        link=Link(latency_s=0.1, bandwidth_bytes_per_s=3.0),
        overlap=data.draw(st.booleans()),
    )
    evaluator = evaluator_for("1f1b", stages, m, warm_up=1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_partition, "_ALL_CELLS", all_cells)
        partition, value = simulated_partition(problem, evaluator, shape)
    options = [
        simulated(problem, shape, (0, *cuts), 1.5)
        for cuts in itertools.combinations(range(1, n), stages - 1)
    ]
    assert value == pytest.approx(simulated(problem, shape, partition.starts, 1.5), rel=1e-12)
    assert value <= min(options) * (1 + 1e-9 if all_cells else 1.003)


def test_many_layers_are_never_worse_than_the_least_bottleneck() -> None:
    random = np.random.default_rng(5)
    problem = StageProblem(costs_s=random.uniform(0.5, 2, 60), num_stages=6)
    shape = StepShape(scales=random.uniform(0.3, 3, 12), link=Link(latency_s=0.5))
    _, value = simulated_partition(problem, evaluator_for("1f1b", 6, 12, warm_up=2.0), shape)
    assert value <= simulated(problem, shape, best_partition(problem).starts, 2.0)


def test_memory_and_forbidden_cuts_hold() -> None:
    memory = LayerMemory(
        static_bytes=(1,) * 6, activation_bytes=(1,) * 6, in_flight=(2, 1), capacity_bytes=(6, 99)
    )
    problem = StageProblem(
        costs_s=(1.0,) * 6, num_stages=2, memory=memory, forbidden_cuts=frozenset({2})
    )
    partition, _ = simulated_partition(
        problem, evaluator_for("1f1b", 2, 4), StepShape(scales=(1,) * 4)
    )
    assert partition.starts == (0, 1)


def test_a_schedule_of_another_step() -> None:
    problem = StageProblem(costs_s=(1.0,) * 6, num_stages=2)
    with pytest.raises(PartitionError, match=r"2 stages and 4 micro-batches. Rule: as many as"):
        simulated_partition(problem, evaluator_for("1f1b", 2, 4), StepShape(scales=(1,) * 3))
