"""The overhead of an instruction is what explains the time of empty stages."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.runtime.profiler import measure_overhead
from pipeswift_lightning.runtime.profiler.overhead import overhead_of
from pipeswift_lightning.runtime.transport import C10dTransport, LoopbackHub, LoopbackTransport

CPU = torch.device("cpu")


@given(
    stages=st.integers(2, 5),
    number=st.integers(1, 9),
    overhead_s=st.floats(1e-6, 1e-2),
    latency_s=st.floats(0, 1e-3),
)
def test_the_simulator_gives_the_measured_step_back(
    stages: int, number: int, overhead_s: float, latency_s: float
) -> None:
    schedule = lower(build_schedule("1f1b", stages, number))
    costs = StepCosts.uniform(stages, number, forward_s=overhead_s, backward_s=overhead_s)
    link = Link(latency_s=latency_s)
    step_s = makespan_s(schedule, costs, link=link)
    assert overhead_of(schedule, step_s, link) == pytest.approx(overhead_s, rel=1e-6)


def test_a_step_that_the_link_explains_has_none() -> None:
    schedule = lower(build_schedule("1f1b", 2, 8))
    assert overhead_of(schedule, 0.001, Link(latency_s=1.0)) == 0.0


def test_one_stage_has_none() -> None:
    assert measure_overhead(LoopbackTransport(LoopbackHub(), 0), 1, None, None) == 0.0


@pytest.mark.world_size(2)
def test_all_ranks_get_the_same() -> None:
    groups = MeshGroups.create(Mesh(num_stages=2, num_replicas=1), dist.get_rank())
    transport = C10dTransport(groups, CPU)
    mine = measure_overhead(transport, 2, Link(latency_s=1e-6), groups.pipeline)
    every = [0.0, 0.0]
    dist.all_gather_object(every, mine)
    assert every[0] == every[1]
    assert 1e-6 < mine < 1.0, "a computation and its messages take time, but no second"
    slow = Link(latency_s=10.0)
    assert measure_overhead(transport, 2, slow, groups.pipeline) == 0.0


@pytest.mark.world_size(2)
def test_it_is_measured_where_gradients_are_off() -> None:
    groups = MeshGroups.create(Mesh(num_stages=2, num_replicas=1), dist.get_rank())
    transport = C10dTransport(groups, CPU)
    with torch.inference_mode():
        assert measure_overhead(transport, 2, None, groups.pipeline) > 0
