"""Whatever structure goes in comes out: dtypes, shapes, gradients' flags, and what is no tensor."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.runtime.messages import Channel, Layout, MessageError
from pipeswift_lightning.runtime.transport import C10dTransport, LoopbackHub, LoopbackTransport

DTYPES = [
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@st.composite
def tensors(draw: Any) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.rand(shape) * 100).to(dtype)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point or dtype.is_complex:
        tensor.requires_grad_(draw(st.booleans()))
    return tensor


LEAVES = st.one_of(
    tensors(), st.none(), st.floats(allow_nan=False), st.integers(), st.booleans(), st.text("ab")
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3),
    ),
    max_leaves=6,
)


def channels(**kwargs: Any) -> tuple[Channel, Channel]:
    hub = LoopbackHub()
    first, second = (Channel(LoopbackTransport(hub, p), **kwargs) for p in (0, 1))
    return first, second


def assert_same(got: Any, want: Any) -> None:
    leaves, spec = tree_flatten(got)
    others, other_spec = tree_flatten(want)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            assert a.resolve_conj().equal(b.detach().resolve_conj())
        else:
            assert a == b
            assert type(a) is type(b)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_structure_arrives_as_it_was(value: Any) -> None:
    sender, receiver = channels()
    for _ in range(2):  # with the layout, and bare
        sender.begin()
        receiver.begin()
        flight = sender.send_activation(1, "key", value)
        got = receiver.wait(receiver.post(0, "key", is_gradient=False))
        flight.wait()
        assert_same(got, value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_gradients_have_the_shapes_of_what_was_sent(value: Any) -> None:
    first, second = channels()
    first.send_activation(1, "key", value).wait()
    received = second.wait(second.post(0, "key", is_gradient=False))
    wanting = [x for x in tree_flatten(received)[0] if isinstance(x, Tensor) and x.requires_grad]
    sent = [torch.rand(x.shape).to(x.dtype) for x in wanting]
    second.send_gradient(0, list(sent)).wait()
    got = first.wait(first.post(1, "key", is_gradient=True))
    assert len(got) == len(sent)
    for a, b in zip(got, sent, strict=True):
        assert torch.equal(a, b)


def test_another_layout_under_a_known_key_is_an_error() -> None:
    sender, _ = channels()
    sender.send_activation(1, "key", (torch.zeros(2, 3), None))
    match = r"float32\[2, 4\], None.*float32\[2, 3\], None.*dynamic_shapes=True"
    with pytest.raises(MessageError, match=match):
        sender.send_activation(1, "key", (torch.zeros(2, 4), None))


def test_dynamic_shapes_send_the_layout_in_each_step() -> None:
    sender, receiver = channels(dynamic_shapes=True)
    for shape in ((2, 3), (2, 5)):
        sender.begin()
        receiver.begin()
        sender.send_activation(1, "key", torch.ones(shape))
        assert receiver.wait(receiver.post(0, "key", is_gradient=False)).shape == shape


def test_a_layout_crosses_without_a_warning_from_pytrees() -> None:
    sender, receiver = channels()
    sender.send_activation(1, "key", {"x": torch.zeros(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receiver.wait(receiver.post(0, "key", is_gradient=False))


def test_receives_posted_ahead_keep_their_order() -> None:
    sender, receiver = channels()
    pending = [receiver.post(0, key, is_gradient=False) for key in "abab"]
    values = [torch.full((n,), float(i)) for i, n in enumerate((1, 2, 1, 2))]
    for key, value in zip("abab", values, strict=True):
        sender.send_activation(1, key, value)
    for i in (0, 1, 2, 3):
        assert torch.equal(receiver.wait(pending[i]), values[i])


def test_a_received_buffer_is_never_reused() -> None:
    sender, receiver = channels()
    kept = []
    for i in range(3):
        sender.send_activation(1, "key", torch.full((4,), float(i)))
        kept.append(receiver.wait(receiver.post(0, "key", is_gradient=False)))
    assert [x[0].item() for x in kept] == [0, 1, 2]


def test_a_gradient_before_its_activation_is_an_error() -> None:
    _, receiver = channels()
    with pytest.raises(MessageError, match="before its activation"):
        receiver.wait(receiver.post(0, "key", is_gradient=True))


def test_a_layout_in_words() -> None:
    layout, tensors_ = Layout.of({"x": torch.zeros(2, requires_grad=True), "n": 3})
    assert layout.describe() == "(float32[2]*, 3)"
    assert len(tensors_) == len(layout.gradients) == 1


@pytest.mark.world_size(2)
def test_gloo_moves_every_dtype_as_it_lies() -> None:
    groups = MeshGroups.create(Mesh.of(world_size=2, num_stages=2), dist.get_rank())
    device = torch.device("cpu")
    groups.warm(device)
    channel = Channel(C10dTransport(groups, device))
    more = [torch.int8, torch.int16, torch.uint16, torch.complex128, torch.float8_e4m3fn]
    raw = (torch.arange(64) % 2).to(torch.uint8)  # a valid pattern in every dtype, bool too
    # Odd shapes: a scalar, nothing at all, a transposed matrix.
    value = (
        *(raw.view(dtype) for dtype in [*DTYPES, *more]),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.arange(6.0).view(2, 3).T.requires_grad_(),
    )
    for _ in range(2):  # with the layout, and bare
        channel.begin()
        if dist.get_rank() == 0:
            channel.send_activation(1, "key", value).wait()
            continue
        got = channel.wait(channel.post(0, "key", is_gradient=False))
        assert len(got) == len(value)
        for a, b in zip(got, value, strict=True):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            a, b = a.detach().contiguous(), b.detach().contiguous()
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
