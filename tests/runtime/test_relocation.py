"""What travels with a parameter arrives as it was, from the nearest owner, in one order."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.runtime.ownership import LocalShare, Owners, ParameterTable
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.relocation import (
    Belongings,
    Parcel,
    Relocation,
    _in_memory,
    _read,
    _written,
    parcels,
)

CPU = torch.device("cpu")


def arrived(value: object) -> object:
    """Send a structure from here to here."""
    raw, sent = _written(value)  # type: ignore[arg-type]
    contents, received = _read(bytes(raw), CPU)
    assert len(sent) == len(received)
    for source, target in zip(sent, received, strict=True):
        _in_memory(target).copy_(_in_memory(source))
    return contents


TENSORS: dict[str, Tensor] = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "half": torch.randn(3, 4).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.randn(2, 3, dtype=torch.complex128),
    "conjugate": torch.randn(2, 3, dtype=torch.complex64).conj(),
    "transposed": torch.randn(3, 5).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(4, 6)[:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_values_and_its_order_in_memory(name: str) -> None:
    tensor = TENSORS[name]
    found = arrived({"x": tensor})["x"]  # type: ignore[index]
    assert torch.equal(found, tensor)
    assert found.dtype is tensor.dtype
    if name in ("transposed", "channels last"):
        assert found.stride() == tensor.stride()


def test_any_state_arrives() -> None:
    """Lists, plain values and nesting; a tensor that occurs twice is one tensor again."""
    moment = torch.randn(3)
    state = {"step": 7, "moments": [moment, (torch.tensor(1.0), None)], "again": moment}
    found = arrived({"w": Belongings.of(nn.Parameter(torch.ones(2)), [state, {0: {"lr": 0.1}}])})
    held = found["w"]  # type: ignore[index]
    assert (held.gradient, held.requires_grad) == (None, True)
    received, options = held.more
    assert options == {0: {"lr": 0.1}}
    assert received["step"] == 7
    assert torch.equal(received["moments"][0], moment)
    assert received["again"] is received["moments"][0]


def test_parcels_come_from_the_nearest_owner_and_the_lower_of_two() -> None:
    old = Owners({"a": (0,), "b": (1,), "tied": (0, 2), "kept": (1,)}, {"x": 0, "y": 2})
    new = Owners({"a": (2,), "b": (0, 1), "tied": (1, 3), "kept": (1,)}, {"x": 2, "y": 2})
    assert parcels(old, new) == (
        Parcel(0, 1, ("tied",), ()),
        Parcel(0, 2, ("a",), ("x",)),
        Parcel(1, 0, ("b",), ()),
        Parcel(2, 3, ("tied",), ()),
    )
    assert parcels(old, old) == ()


@pytest.mark.world_size(3)
def test_parameters_and_buffers_go_round() -> None:
    """Each stage gives its layer to the next, the last to the first, and frees it."""
    stage = dist.get_rank()
    groups = MeshGroups.create(Mesh(num_stages=3, num_replicas=1), stage)
    # Twice: a stage that is no member must remember too, or groups would be counted differently.
    groups.create_shared([(0, 2)])
    groups.create_shared([(0, 1), (0, 2)])
    assert set(groups.shared) == {0: {(0, 1), (0, 2)}, 1: {(0, 1)}, 2: {(0, 2)}}[stage]

    net = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    names = [f"{i}.{leaf}" for i in range(3) for leaf in ("weight", "bias")]
    buffers = [name for name, _ in net.named_buffers()]
    old = Owners({n: (int(n[0]),) for n in names}, {n: int(n[0]) for n in buffers})
    new = Owners(
        {n: ((int(n[0]) + 1) % 3,) for n in names}, {n: (int(n[0]) + 1) % 3 for n in buffers}
    )
    share = LocalShare(net, old, ParameterTable.of(net), stage)
    original = net[(stage - 1) % 3].weight
    share.give_up_foreign()
    with torch.no_grad():
        net[stage].weight.fill_(10.0 + stage)
        net[stage].running_mean.fill_(20.0 + stage)
    net[stage].weight.grad = torch.full((4,), 30.0 + stage)
    net[stage].bias.requires_grad_(stage > 0)

    relocation = Relocation(share, groups, CPU, Progress())
    came = relocation.run(new, lambda name, parameter: [name, parameter.detach() + 1])
    source = (stage - 1) % 3
    layer = net[source]
    assert layer.weight is original
    assert layer.weight.tolist() == [10.0 + source] * 4
    assert layer.running_mean.tolist() == [20.0 + source] * 4
    assert layer.weight.grad.tolist() == [30.0 + source] * 4
    assert layer.bias.requires_grad is (source > 0)
    assert came.keys() == {f"{source}.weight", f"{source}.bias"}
    assert came[f"{source}.weight"][0] == f"{source}.weight"
    assert came[f"{source}.weight"][1].tolist() == [11.0 + source] * 4
    assert {n for n, p in net.named_parameters() if not p.is_meta} == set(came)
    assert relocation.sent_bytes > 4 * 4 * 4
