"""Known costs are found, bytes are exact, and the network does not notice."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from pipeswift_lightning.drawing.profile_bar import profile_bar
from pipeswift_lightning.plan.cost_model import Shape
from pipeswift_lightning.runtime.profiler import (
    ProfileError,
    ProfileOptions,
    Subject,
    example_micro_batches,
    optimizer_factor,
    profile_network,
)
from pipeswift_lightning.runtime.structure import leaves_of
from tests.runtime.profiler.networks import Delicate, Sleeping, delicate_batch, loss_of

CPU = torch.device("cpu")
ONCE = ProfileOptions(repeats=1)


def subject_of(network: nn.Sequential) -> Subject:
    return Subject(network, list(network), network, CPU)


def test_sleeping_layers_are_fitted_and_predict_unseen_shapes() -> None:
    slow, fast = Sleeping(2e-3, 1e-4, 2.0), Sleeping(1e-3, 4e-5, 3.0)
    network = nn.Sequential(slow, fast)
    batches = [torch.ones(n, 10) for n in (1, 2, 4, 8)]
    profile = profile_network(subject_of(network), batches, options=ProfileOptions(repeats=3))
    model = profile.model()
    assert [layer.name for layer in profile.layers] == ["0", "1"]
    unseen = Shape.padded([1] * 6)
    times = [
        seconds
        for layer in model.layers
        for seconds in (layer.forward.seconds(unseen), layer.backward.seconds(unseen))
    ]
    known = [8e-3, 16e-3, 3.4e-3, 10.2e-3]
    # A sleep is never shorter than it should be; on a busy machine it is longer.
    assert all(0.8 * k < t for k, t in zip(known, times, strict=True))
    assert times[0] / times[2] == pytest.approx(known[0] / known[2], rel=0.6)
    assert times[1] / times[0] == pytest.approx(2.0, rel=0.6)
    assert 0 <= model.relative_error < 0.6
    assert profile.held_out().shapes == ((2, 1), (4, 1))
    # Nobody wants the first layer's input gradient; the second's is nearly all of its backward.
    first, second = (layer.samples[-1] for layer in profile.layers)
    assert first.input_gradient_s < 0.5 * first.backward_s
    assert second.weight_gradient_s < 0.7 * second.backward_s


def test_the_bytes_are_exact() -> None:
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7, bias=False)).double()
    network[2].requires_grad_(requires_grad=False)
    batches = [torch.ones(n, 3, dtype=torch.float64) for n in (2, 6)]
    profile = profile_network(subject_of(network), batches, options=ONCE)
    for i, rows in enumerate((2, 6)):
        samples = [layer.samples[i] for layer in profile.layers]
        # A linear layer keeps its input, a ReLU its output; a frozen layer needs neither.
        assert [s.saved_bytes for s in samples] == [8 * rows * 3, 8 * rows * 5, 0]
        assert [s.output_bytes for s in samples] == [8 * rows * 5, 8 * rows * 5, 0]
        assert [s.input_bytes for s in samples] == [0, 8 * rows * 5, 8 * rows * 5]
    first, relu, frozen = profile.layers
    assert (first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes) == (160, 160, 320)
    assert (relu.static_bytes, frozen.parameter_bytes, frozen.static_bytes) == (0, 280, 280)
    assert profile.model().layers[1].activation_bytes_per_token == 40
    assert profile.origin.dtype == "float64"


@pytest.fixture
def delicate() -> Delicate:
    torch.manual_seed(0)
    return Delicate()


def state_of(module: nn.Module) -> list[object]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [
        [(name, id(tensor), tensor.tolist()) for name, tensor in tensors.items()],
        [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in module.parameters()],
        [(child.training, "forward" in vars(child)) for child in module.modules()],
        list(module.state_dict()),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        module.head.weight is module.embedding.weight,
    ]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "copied"])
def test_measuring_leaves_no_trace(delicate: Delicate, elsewhere: bool, monkeypatch) -> None:
    if elsewhere:  # as if the layers were on another device than theirs
        monkeypatch.setattr("pipeswift_lightning.runtime.profiler.measure._is_on", lambda *_: False)
    delicate.blocks[2].eval()
    loss_of(delicate, delicate_batch(2, 3)).backward()
    before = state_of(delicate)
    batches = [delicate_batch(*shape) for shape in ((1, 2), (2, 3), (2, 5), (3, 6))]
    subject = Subject(delicate, list(delicate.blocks), partial(loss_of, delicate), CPU)
    profile = profile_network(subject, batches, options=ONCE)
    assert state_of(delicate) == before
    assert profile.shapes == ((1, 2), (2, 3), (2, 5), (3, 6))
    table, frozen = 4 * 11 * 6, 4 * (6 * 6 + 6)
    first, recurrent, norm, last = profile.layers
    # The table is used before the first layer and, as the head, after the last one.
    assert (first.parameter_bytes, first.gradient_bytes) == (table + frozen, table)
    assert last.parameter_bytes == frozen + table + 4 * 11
    assert (recurrent.parameter_bytes, norm.parameter_bytes) == (4 * (2 * 24 * 6 + 2 * 24), 4 * 12)
    # Early values are added after the third layer, on its stage.
    size = 4 * 3 * 6 * 6
    assert [x.samples[-1].output_bytes for x in profile.layers] == [2 * size, 2 * size, size, 0]
    assert min(s.forward_s for x in profile.layers for s in x.samples) > 0
    assert min(s.backward_s for x in profile.layers[1:] for s in x.samples) > 0
    after = loss_of(delicate, delicate_batch(2, 3))
    assert torch.isfinite(after)


def test_what_cannot_be_measured() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ProfileError, match="no micro-batches"):
        profile_network(subject_of(network), [])
    with pytest.raises(ProfileError, match="repeats=0"):
        ProfileOptions(repeats=0)

    def run(x: Tensor) -> Tensor:
        return network(x) if len(x) == 1 else network[1](network[0](x) * 0)

    def backwards(x: Tensor) -> Tensor:
        return network(x) if len(x) == 1 else network[0](network[1](x))

    batches = [torch.ones(1, 2), torch.ones(3, 2)]
    profile_network(Subject(network, list(network), run, CPU), batches, options=ONCE)
    with pytest.raises(ProfileError, match="called layer 1 of the network where layer 0 was due"):
        profile_network(Subject(network, list(network), backwards, CPU), batches, options=ONCE)
    assert not any("forward" in vars(layer) for layer in network)


class Wrapped(nn.Module):
    """Takes and returns a dataclass, or nothing but a tensor where there are few rows."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.linear, self.least = nn.Linear(2, 2), least

    def forward(self, state: Any) -> Any:
        held = state if isinstance(state, State) else State(state, torch.zeros(len(state)))
        x = self.linear(held.x)
        return State(x, held.sums + x.sum(1)) if len(x) >= self.least else [x]


@dataclass
class State:
    x: Tensor
    sums: Tensor


def test_dataclasses_that_layers_hand_on_are_measured() -> None:
    network = nn.Sequential(Wrapped(), Wrapped())
    run = lambda x: network(x).sums  # noqa: E731
    subject = Subject(network, list(network), run, CPU)
    profile = profile_network(subject, [torch.ones(n, 2) for n in (1, 4)], options=ONCE)
    assert [s.output_bytes for s in profile.layers[0].samples] == [4 * 3, 4 * 12]


def test_a_layer_that_returns_less_for_other_shapes_is_refused() -> None:
    network = nn.Sequential(Wrapped(least=2), nn.Identity())
    run = lambda x: leaves_of(network(x))[0]  # noqa: E731
    batches = [torch.ones(n, 2) for n in (4, 1)]
    with pytest.raises(ProfileError, match=r"returns fewer tensors .* Rule: .* Remedy: "):
        profile_network(Subject(network, list(network), run, CPU), batches, options=ONCE)


def test_a_forward_that_changes_its_parameters_is_refused() -> None:
    class Drifting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    network = nn.Sequential(Drifting(2, 2), nn.Linear(2, 2))
    with pytest.raises(ProfileError, match=r"a forward changes parameters in place\. Rule"):
        profile_network(subject_of(network), [torch.ones(1, 2)], options=ONCE)


def test_examples_are_cut_from_one_batch() -> None:
    batch = {
        "tokens": torch.arange(60).view(5, 12),
        "visible": torch.ones(5, 12, 12, dtype=torch.bool),
        "embedded": torch.ones(5, 12, 4),
        "position": torch.arange(12),
        "label": torch.arange(5),
    }
    examples = example_micro_batches(batch, sizes=[2, 5], lengths=[3, 12])
    shapes = [{name: tuple(tensor.shape) for name, tensor in x.items()} for x in examples]
    assert shapes[0] == {
        "tokens": (2, 3),
        "visible": (2, 3, 3),
        "embedded": (2, 3, 4),
        "position": (3,),
        "label": (2,),
    }
    assert shapes[3] == {name: tuple(tensor.shape) for name, tensor in batch.items()}
    assert len(example_micro_batches(batch)) == 12
    images = torch.zeros(4, 3, 8, 8)
    assert [x.shape[0] for x in example_micro_batches(images)] == [1, 2, 4]


def test_the_optimizers_state_is_found_by_trying_one() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    kinds = torch.optim.AdamW, torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
    assert [round(optimizer_factor(kind([weight])), 1) for kind in kinds] == [2.0, 0.0, 1.0]

    class Odd(torch.optim.SGD):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, lr=1.0, momentum=0.5)

    odd = Odd([weight])
    assert optimizer_factor(odd) == 2.0  # it cannot be made from its defaults
    weight.grad = torch.ones_like(weight)
    odd.step()
    assert optimizer_factor(odd) == 1.0


def test_the_share_that_is_done_is_told_and_drawn_in_a_terminal_alone() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    told: list[float] = []
    drawn = {}
    for terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=terminal, width=80)
        with profile_bar(console) as tell:

            def both(share: float, tell: Callable[[float], None] = tell) -> None:
                told.append(share)
                tell(share)

            batches = [torch.ones(1, 2), torch.ones(2, 2)]
            profile_network(subject_of(network), batches, options=ONCE, tell=both)
        drawn[terminal] = console.file.getvalue()
    assert told == sorted(told[:7]) * 2
    assert told[-1] == 1.0
    assert "measuring" in drawn[True]
    assert "100%" in drawn[True]
    assert drawn[False] == ""
