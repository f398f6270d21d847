"""Layers of earlier stages are answered without a run for each shape, and as if there were one."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.absent import AbsentValueError
from pipeswift_lightning.runtime.cut import Boundary, Completed, CutError
from pipeswift_lightning.runtime.rng import reseeder
from tests.runtime.test_cut import CPU, FORWARDS, Network, cut_of, run, skip, trace_of

SHAPES = [(3, 2), (3, 2), (5, 2), (2, 2), (7, 2), (1, 2), (5, 2)]
Forward = Callable[..., Any]


def batches(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [torch.randn(*shape) for shape in shapes]


class Stages:
    """Stages of one network, cut for the first of some batches; their weights are always alike."""

    def __init__(self, forward: Forward, first: Tensor, layer: type[nn.Linear] = nn.Linear) -> None:
        torch.manual_seed(0)
        self.network = Network(forward)
        self.network.a = layer(2, 2)
        self.cut = cut_of(self.network)
        self.trace = trace_of(self.cut, lambda: self.network(first))

    def output(self, x: Tensor, starts: Sequence[int]) -> Any:
        """Run the stages one after the other, each with the same random streams."""
        received: tuple[Tensor, ...] = ()
        for first, last in zip(starts, [*starts[1:], self.trace.num_layers], strict=True):
            result = self.cut.run(
                lambda: self.network(x),
                step_name="training_step",
                trace=self.trace,
                first=first,
                last=last,
                received=received,
                reseed=reseeder(CPU, 5),
            )
            received = result.values if isinstance(result, Boundary) else ()
        assert isinstance(result, Completed)
        return result.output


def outputs(
    forward: Forward,
    inputs: Sequence[Tensor],
    starts: Sequence[int],
    layer: type[nn.Linear] = nn.Linear,
) -> list[Any]:
    """Run each batch over one cut."""
    stages = Stages(forward, inputs[0], layer)
    return [stages.output(x, starts) for x in inputs]


def sizes(network: Network, x: Tensor) -> Tensor:
    """Look at shapes in all ways, after each layer."""
    y = network.a(x)
    assert (len(y), y.shape, y.size(0), y.ndim, y.dim()) == (len(x), x.shape, len(x), 2, 2)
    assert (y.device, y.dtype, y.is_meta, y.numel()) == (x.device, x.dtype, y.is_meta, x.numel())
    z = network.b(y.flatten().unflatten(0, y.shape))
    mask = torch.ones(z.shape[0], 1).cumsum(0)
    first, *_ = z.unbind(0)
    found: Tensor = network.c(z * mask) + mask * (first.numel() == 2)
    return found


def in_place(network: Network, x: Tensor) -> Tensor:
    y = network.a(x)
    again = y
    y = y.mul(2)
    y += 1
    y[:, 0] = 3.0
    found: Tensor = network.c(network.b(y)) + len(again)
    return found


def nested(network: Network, x: Tensor) -> Tensor:
    parts = {"all": [network.a(x), None], "x": x}
    both = torch.stack([parts["all"][0], x])  # type: ignore[index]
    found: Tensor = network.c(network.b(both[0]) + torch.zeros(both.shape[1:]))
    return found


class Shifted(torch.autograd.Function):
    """Looks at a shape where no torch function is called with the tensor from outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0] * x.shape[1]).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def own_function(network: Network, x: Tensor) -> Tensor:
    y = Shifted.apply(network.a(x))
    found: Tensor = network.c(network.b(y) + torch.ones(y.shape))
    return found


def handed_on(network: Network, x: Tensor) -> Tensor:
    """Operations of all sorts that look at no size."""
    parts = [network.a(x)]
    parts.append(parts[0].unsqueeze(0).sum(0, keepdim=False).to(parts[0].dtype))
    y = torch.cat([torch.stack(parts).mean(0), parts[1]], -1)[:, :2].softmax(-1)
    parts.clear()
    y += 1
    y[:, 0] = 3.0
    y.mul_(2)
    found: Tensor = network.c(network.b(y) + 1)
    return found


def reshaped_in_place(network: Network, x: Tensor) -> Tensor:
    y = network.a(x)
    z = y * 2  # it waits, and y changes its shape meanwhile
    y.unsqueeze_(0)
    found: Tensor = network.c(network.b(z + torch.ones(z.shape)) + y[0] * y.ndim)
    return found


def side_reshaped(network: Network, x: Tensor) -> Tensor:
    side = x.abs()
    y = network.a(x) * side
    side.unsqueeze_(0)  # y, whose size nobody knows yet, is as it was
    found: Tensor = network.c(network.b(y + torch.ones(y.shape)))
    return found


def alike_but_for_structure(network: Network, x: Tensor) -> Tensor:
    rows = network.a(x).sum(0).double()
    single, short = rows[0] * torch.ones(2), rows[[0]] * torch.ones(1)
    sizes = torch.zeros((), dtype=single.dtype), torch.zeros((), dtype=short.dtype)
    factor = sizes[0].element_size() + 10 * sizes[1].element_size()
    found: Tensor = network.c(network.b(x + rows.float())) * factor
    return found


def taken_apart(network: Network, x: Tensor) -> Tensor:
    weight = nn.Parameter((network.a(x) * 2).detach())
    squeezed = network.a.bias.expand(1, len(x), 2).squeeze()
    found: Tensor = network.c(network.b(x)) * (weight.numel() + squeezed.ndim)
    return found


def changed_in_place(network: Network, x: Tensor) -> Tensor:
    y = network.a(x)
    z = (y * 1.0).relu_()
    found: Tensor = network.c(network.b(z.sigmoid_()) + z) + z
    return found


MORE: dict[str, Forward] = {
    "skip": skip,
    "sizes": sizes,
    "in place": in_place,
    "nested": nested,
    "own function": own_function,
    "handed on": handed_on,
    "reshaped in place": reshaped_in_place,
    "side input reshaped": side_reshaped,
    "alike but for structure": alike_but_for_structure,
    "taken apart": taken_apart,
    "changed in place": changed_in_place,
}


@pytest.mark.parametrize("name", [*FORWARDS, *MORE])
@pytest.mark.parametrize("starts", [[0, 1, 2], [0, 2], [0, 1]])
def test_batches_of_new_shapes_give_what_one_device_gives(name: str, starts: list[int]) -> None:
    forward = MORE[name] if name in MORE else FORWARDS[name][0]
    inputs = batches()
    for got, want in zip(
        outputs(forward, inputs, starts), outputs(forward, inputs, [0]), strict=True
    ):
        assert torch.equal(got, want)


class Counting(nn.Linear):
    """Counts its runs without data, and draws from all generators in each."""

    runs = 0

    def forward(self, input: Tensor) -> Tensor:
        if input.is_meta:
            type(self).runs += 1
            torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        return super().forward(input)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        *((name, 1) for name in ("chain", "code between", "handed on")),
        *((name, len(set(SHAPES))) for name in ("shapes read", "sizes")),
    ],
)
def test_a_layer_is_run_once_unless_something_looks_at_its_output(name: str, runs: int) -> None:
    inputs = batches()
    stages = Stages(MORE.get(name) or FORWARDS[name][0], inputs[0], Counting)
    Counting.runs = 0
    for x in inputs:
        stages.output(x, [0, 2])
    assert Counting.runs == runs


def noisy(network: Network, x: Tensor) -> Tensor:
    y = network.a(x)
    drawn = torch.rand(2) + random.random() + np.random.rand()  # noqa: NPY002
    rows = y.shape[0]  # here its shape is found
    drawn = drawn + torch.rand(2) + random.random() + np.random.rand()  # noqa: NPY002
    found: Tensor = network.c(network.b(y)) * rows + drawn
    return found


def test_finding_a_shape_draws_nothing() -> None:
    inputs = batches([(n, 2) for n in (2, 3, 4, 3)])
    found = [outputs(noisy, inputs, starts, Counting) for starts in ([0, 2], [0, 1, 2], [0])]
    for first, second, want in zip(*found, strict=True):
        assert torch.equal(first, want)
        assert torch.equal(second, want)


def test_an_absent_value_of_unknown_shape_is_still_absent() -> None:
    def reads(network: Network, x: Tensor) -> Tensor:
        y = network.a(x)
        if len(x) > 5:
            y.sum().item()
        found: Tensor = network.c(network.b(y))
        return found

    with pytest.raises(AbsentValueError, match="reads the value"):
        outputs(reads, batches([(3, 2), (4, 2), (6, 2)]), [0, 2])


class Growing(nn.Linear):
    """Returns more tensors the more rows there are."""

    def forward(self, input: Tensor) -> Any:
        found = super().forward(input)
        return [found] * (2 if len(input) > 4 else 1)


def test_a_layer_whose_outputs_depend_on_the_shape_is_refused_where_it_matters() -> None:
    def last(network: Network, x: Tensor) -> Tensor:
        y = network.a(x)[-1]
        found: Tensor = network.c(network.b(y + torch.zeros(y.shape)))
        return found

    inputs = batches([(3, 2), (2, 2), (5, 2)])
    stages = Stages(last, inputs[0], Growing)
    for x in inputs[:2]:
        stages.output(x, [0, 2])
    with pytest.raises(CutError, match=r"another number of tensors .* Rule: .* Remedy: "):
        stages.output(inputs[2], [0, 2])


def test_layers_that_are_alike_are_run_once_a_shape() -> None:
    def looks(network: Network, x: Tensor) -> Tensor:
        y = network.a(x)
        z = network.b(y + torch.ones(y.shape))
        found: Tensor = network.c(z + torch.ones(z.shape))
        return found

    inputs = batches()
    stages = Stages(looks, inputs[0], Counting)
    stages.network.b = Counting(2, 2)
    stages.cut = cut_of(stages.network)
    stages.trace = trace_of(stages.cut, lambda: stages.network(inputs[0]))
    Counting.runs = 0
    for x in inputs:
        stages.output(x, [0, 2])
    assert Counting.runs == len(set(SHAPES))


def test_a_mask_that_changes_later_selects_as_it_did() -> None:
    def masked(network: Network, x: Tensor) -> Tensor:
        mask = x.abs().sum(1) > 1
        y = network.a(x)[mask]
        mask.zero_()
        found: Tensor = network.c(network.b(y + torch.zeros(y.shape)))
        return found

    inputs = batches()
    for got, want in zip(
        outputs(masked, inputs, [0, 2]), outputs(masked, inputs, [0]), strict=True
    ):
        assert torch.equal(got, want)


def test_nothing_that_has_arrived_is_held_after_its_run() -> None:
    stages = Stages(FORWARDS["code between"][0], torch.ones(3, 2))
    for rows in (3, 4, 5):
        x, received = torch.ones(rows, 2), torch.randn(rows, 2, requires_grad=True)
        step = partial(stages.network, x)
        run(stages.cut, step, stages.trace, first=1, last=3, received=(received,))
        alive = weakref.ref(received)
        del received, step
        gc.collect()
        assert alive() is None
