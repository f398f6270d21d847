"""Agreement, gradients and the mesh's groups, over real ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeswift_lightning.runtime import gradients
from pipeswift_lightning.runtime.agreement import Comparison, DisagreementError, require_agreement
from pipeswift_lightning.runtime.gradients import reduce_gradients
from pipeswift_lightning.runtime.mesh import Coordinate, Mesh, MeshError, MeshGroups

CPU = torch.device("cpu")


@pytest.mark.world_size(2)
def test_ranks_that_differ_all_learn_in_what() -> None:
    world = dist.group.WORLD
    assert world is not None
    require_agreement({"plan": "x"}, world, CPU)
    with pytest.raises(DisagreementError) as raised:
        require_agreement({"plan": "x", "batch": f"b{dist.get_rank()}"}, world, CPU)
    assert "\n  batch: rank 0: b0; rank 1: b1\n" in str(raised.value)
    assert "plan" not in str(raised.value).split("Rule")[0]
    keys = {"a": "1"} if dist.get_rank() else {}
    with pytest.raises(DisagreementError, match=r"a: rank 0: \(absent\); rank 1: 1"):
        require_agreement(keys, world, CPU)
    require_agreement({"plan": "y"}, world, CPU)  # still usable


@pytest.mark.world_size(4)
def test_groups_of_a_mesh_reduce_shared_gradients_once() -> None:
    rank = dist.get_rank()
    groups = MeshGroups.create(Mesh(num_stages=2, num_replicas=2), rank)
    groups.warm(CPU)
    groups.create_shared([(0, 1)])
    stage, replica = groups.coordinate.stage, groups.coordinate.replica
    gradients._BUCKET_BYTES = 64  # several buckets
    own = [nn.Parameter(torch.zeros(5)) for _ in range(4)]
    for i, parameter in enumerate(own):
        parameter.grad = torch.full((5,), float(10 * stage + replica + i))
    own.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))  # no gradient on any rank
    own.append(nn.Parameter(torch.zeros(2)))  # a gradient on one replica
    if replica == 1:
        own[-1].grad = torch.ones(2)
    shared = nn.Parameter(torch.zeros(3))
    if stage == 1:
        shared.grad = torch.full((3,), 4.0 + replica)
    reduce_gradients(own, {groups.shared[0, 1]: [shared]}, groups.replicas)
    for i, parameter in enumerate(own[:4]):
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [10 * stage + 0.5 + i] * 5
    assert own[4].grad is None
    assert own[5].grad is not None
    assert own[5].grad.tolist() == [0.5, 0.5]
    assert shared.grad is not None
    assert shared.grad.tolist() == [4.5] * 3


def test_the_mesh_numbers_stages_within_a_pipeline() -> None:
    mesh = Mesh.of(world_size=6, num_stages=3)
    assert [mesh.coordinate(r) for r in (0, 2, 3)] == [
        Coordinate(0, 0),
        Coordinate(2, 0),
        Coordinate(0, 1),
    ]
    assert all(
        mesh.rank(stage=c.stage, replica=c.replica) == r
        for r in range(6)
        for c in [mesh.coordinate(r)]
    )
    assert (mesh.pipeline_ranks(1), mesh.replica_ranks(1)) == ([3, 4, 5], [1, 4])
    assert Mesh.of(world_size=3, num_stages=None) == Mesh(3, 1)


def test_a_mesh_that_does_not_fit_names_what_would() -> None:
    with pytest.raises(MeshError, match=r"4 devices.*3 stages.*stages=1 or 2 or 4"):
        Mesh.of(world_size=4, num_stages=3)


@pytest.mark.world_size(2)
def test_patience_with_a_late_rank_ends() -> None:
    late = dist.get_rank() == 1
    if late:
        time.sleep(0.5)
    comparison = Comparison({"a": "1"}, None, torch.device("cpu"))
    assert comparison.result(None if late else 0.05) == ((0, 0) if late else None)
    dist.barrier()


@pytest.mark.world_size(2)
def test_patience_is_not_needed_with_a_rank_that_is_there() -> None:
    mine = {"a": str(dist.get_rank())}
    with pytest.raises(DisagreementError, match="rank 0: 0; rank 1: 1"):
        Comparison(mine, None, torch.device("cpu")).result(patience_s=20.0)
    same = Comparison({"a": "1"}, None, torch.device("cpu"), remark=dist.get_rank())
    assert same.result(patience_s=20.0) == (0, 1)
