"""Every rank gets the same numbers: measured by one, by all in parts, or read from a file."""

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.profile import CostProfile
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.runtime.profiler import (
    ProfileError,
    ProfileOptions,
    Subject,
    measure_link,
    obtain_profile,
    origin_of,
    profile_network,
    profile_stages,
    shared_link,
)
from pipeswift_lightning.runtime.transport import C10dTransport, LoopbackHub, LoopbackTransport
from tests.runtime.profiler.networks import Delicate, delicate_batch, loss_of

CPU = torch.device("cpu")
ONCE = ProfileOptions(repeats=1)
BATCHES = [delicate_batch(*shape) for shape in ((1, 2), (2, 3))]


def sent_of(profile: CostProfile) -> list[object]:
    return [
        (x.name, x.static_bytes, [(s.output_bytes, s.input_bytes) for s in x.samples])
        for x in profile.layers
    ]


def saved_of(profile: CostProfile) -> list[int]:
    return [x.samples[-1].saved_bytes for x in profile.layers]


def same_everywhere(profile: CostProfile) -> bool:
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, profile.to_json())
    return len(set(every)) == 1


def delicate_subject(device: str = "cpu") -> Subject:
    torch.manual_seed(0)
    network = Delicate()
    if device == "meta":  # as a module is before its weights are read; its buffers exist
        for parent in network.modules():
            for name, parameter in list(parent._parameters.items()):
                if parameter is not None:
                    meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                    setattr(parent, name, meta)
        network.head.weight = network.embedding.weight
    return Subject(network, list(network.blocks), partial(loss_of, network), CPU)


@pytest.mark.world_size(2)
def test_two_ranks_measure_parts_and_links_and_share_them(tmp_path: Path) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    here = profile_network(delicate_subject(), BATCHES, options=ONCE)
    for device in ("cpu", "meta"):
        parts = profile_stages(delicate_subject(device), BATCHES, world, options=ONCE)
        assert same_everywhere(parts)
        assert sent_of(parts) == sent_of(here)
        # A rank cannot know that a layer of another one has kept what its first layer keeps.
        more = [a - b for a, b in zip(saved_of(parts), saved_of(here), strict=True)]
        assert more[2] > 0
        assert more[:2] + more[3:] == [0, 0, 0]
        assert min(s.forward_s for x in parts.layers for s in x.samples) > 0
    alone = [0, 1, 2, 3] if rank == 1 else []
    parts = profile_stages(delicate_subject(), BATCHES, world, owned=alone, options=ONCE)
    assert same_everywhere(parts)
    with pytest.raises(ProfileError, match=r"layers \[3\] \(in call order\) were measured by no"):
        profile_stages(delicate_subject(), BATCHES, world, owned=[rank, 2], options=ONCE)

    groups = MeshGroups.create(Mesh(num_stages=2, num_replicas=1), rank)
    link = shared_link(C10dTransport(groups, CPU), 2, groups.pipeline)
    assert link is not None
    assert 0 <= link.latency_s < 1
    assert link.bandwidth_bytes_per_s > 1e5

    calls: list[int] = []

    def profile() -> CostProfile:
        calls.append(rank)
        return here.with_link(link)

    path = tmp_path / "deep" / "profile.json"
    for _ in range(2):  # measured, then read
        obtained = obtain_profile(path, here.origin, profile, world)
        assert same_everywhere(obtained)
        assert obtained.link == link
        assert calls == ([0] if rank == 0 else [])
    changed = replace(here.origin, device="another")
    assert same_everywhere(obtain_profile(path, changed, profile, world, together=True))
    assert len(calls) == (2 if rank == 0 else 1)


def test_a_link_is_measured_over_any_transport() -> None:
    hub = LoopbackHub()
    found: dict[int, Link | None] = {}

    def rank(position: int) -> None:
        transport = LoopbackTransport(hub, position)
        found[position] = measure_link(transport, 3, sizes=(8, 4096), repeats=2)

    threads = [threading.Thread(target=rank, args=(position,)) for position in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[2] is None
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].latency_s >= 0


def test_a_file_is_used_only_for_what_it_was_measured_of(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "profile.json"
    small, large = (nn.Sequential(nn.Linear(2, width), nn.ReLU()) for width in (3, 4))
    calls: list[nn.Module] = []

    def obtain(network: nn.Sequential, **settings: str) -> CostProfile:
        options = replace(ONCE, settings=settings)
        subject = Subject(network, list(network), network, CPU)

        def profile() -> CostProfile:
            calls.append(network)
            return profile_network(subject, [torch.ones(1, 2)], options=options)

        return obtain_profile(path, origin_of(network, list(network), CPU, settings), profile)

    first = obtain(small)
    assert obtain(small) == first
    with torch.no_grad():
        small[0].weight.add_(1)  # values decide nothing
    assert obtain(small) == first
    assert calls == [small]
    assert caplog.messages == []
    obtain(large)
    assert "is measured anew: structure '" in caplog.messages[-1]
    obtain(large, precision="bf16-mixed")
    assert len(calls) == 3
    path.write_text("{}")
    obtain(large)
    assert "is measured anew: this is no profile: 'profile'" in caplog.messages[-1]
    assert len(calls) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["profile.json"]
