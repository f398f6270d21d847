"""One look at the step tells the order of the layers and what crosses each cut."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_map_only

from pipeswift_lightning.runtime.absent import AbsentMode, AbsentValueError, to_absent
from pipeswift_lightning.runtime.cut import Boundary, Completed, CutError, LayerCut
from pipeswift_lightning.runtime.trace import StepTrace
from tests.runtime.test_messages import VALUES

CPU = torch.device("cpu")


class Network(nn.Module):
    """Three linear layers ``a``, ``b``, ``c``, a loose scale, and a forward of choice."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(2))
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def cut_of(network: Network) -> LayerCut:
    layers = [network.a, network.b, network.c]
    cut = LayerCut(network, layers, network_name="self.net", device=CPU)
    cut.install()
    return cut


def trace_of(cut: LayerCut, step: Callable[[], Any]) -> StepTrace:
    names = {id(p): n for n, p in cut.network.named_parameters()}
    with torch.no_grad():
        return cut.discover(step, step_name="training_step", names=names)


def run(cut: LayerCut, step: Callable[[], Any], trace: StepTrace | None, **kwargs: Any) -> Any:
    options = {"step_name": "training_step", "received": (), "reseed": lambda i, layer: None}
    return cut.run(step, trace=trace, **{**options, **kwargs})


def piped(network: Network, starts: list[int], x: Tensor) -> tuple[Any, list[int]]:
    """Run the stages one after the other; also return how many values crossed each cut."""
    cut = cut_of(network)
    step = lambda: network(x)  # noqa: E731
    trace = trace_of(cut, step)
    received: tuple[Tensor, ...] = ()
    crossed = []
    for first, last in zip(starts, [*starts[1:], trace.num_layers], strict=True):
        result = run(cut, step, trace, first=first, last=last, received=received)
        if isinstance(result, Boundary):
            received = result.values
            crossed.append(len(received))
    cut.remove()
    assert isinstance(result, Completed)
    return result.output, crossed


FORWARDS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "chain": (lambda n, x: n.c(n.b(n.a(x))), [1, 1]),
    "other order": (lambda n, x: n.a(n.c(n.b(x))), [1, 1]),
    "code between": (lambda n, x: n.c(n.b(n.a(x).relu() * 2) + 1).sum(), [1, 1]),
    "the batch again": (lambda n, x: n.c(n.b(n.a(x) + x) * x), [1, 1]),
    "skip": (lambda n, x: skip(n, x), [2, 2]),
    "loose parameter": (lambda n, x: n.c(n.b(n.a(x * n.scale)) * n.scale), [1, 1]),
    "shapes read": (lambda n, x: n.c(n.b(n.a(x).reshape(len(x), -1)).view(x.shape)), [1, 1]),
    "keyword": (lambda n, x: n.c(input=n.b(input=n.a(input=x))), [1, 1]),
}


def skip(network: Network, x: Tensor) -> Tensor:
    first = network.a(x)
    second = network.b(first)
    found: Tensor = network.c(torch.cat([second[:, :1], first[:, 1:]], 1)) + first
    return found


@pytest.mark.parametrize("name", [n for n in FORWARDS if n != "skip"])
def test_stages_in_turn_compute_what_the_network_computes(name: str) -> None:
    forward, crossing = FORWARDS[name]
    network = Network(forward)
    x = torch.randn(3, 2)
    want = network(x)
    got, crossed = piped(network, [0, 1, 2], x)
    assert torch.equal(got, want)
    assert crossed == crossing
    assert torch.equal(network(x), want)  # nothing is left behind


def test_an_early_output_that_late_code_uses_crosses_each_cut_between() -> None:
    network = Network(skip)
    x = torch.randn(3, 2)
    want = network(x)
    got, crossed = piped(network, [0, 1, 2], x)
    assert torch.equal(got, want)
    assert crossed == [1, 2]


def test_the_trace_of_a_chain() -> None:
    network = Network(FORWARDS["other order"][0])
    trace = trace_of(cut_of(network), lambda: network(torch.ones(3, 2)))
    assert trace.order == (1, 2, 0)
    assert [trace.carried(i) for i in range(4)] == [(), (0,), (1,), ()]
    assert trace.operations.keys() <= {0, 1}


def test_the_trace_tells_where_loose_parameters_are_used() -> None:
    network = Network(FORWARDS["loose parameter"][0])
    trace = trace_of(cut_of(network), lambda: network(torch.ones(3, 2)))
    assert trace.parameter_gaps == {"scale": {0, 2}}


def test_values_that_no_layer_names_cross_by_the_operation_that_made_them() -> None:
    def forward(n: Network, x: Tensor) -> Tensor:
        early = (x * n.scale).tanh()  # before the first layer, used after each
        first, second = n.a(x).relu().split(1, 1)  # no layer takes these as they are
        return n.c(n.b(second.repeat(1, 2) * early)) * early + first

    network = Network(forward)
    x = torch.randn(3, 2)
    want = network(x)
    got, crossed = piped(network, [0, 1, 2], x)
    assert torch.equal(got, want)
    assert crossed == [3, 3]


def test_an_operation_that_another_batch_does_not_run_is_an_error() -> None:
    def forward(n: Network, x: Tensor) -> Tensor:
        early = n.scale * 1
        for row in x:
            early = early * row
        return n.c(n.b(n.a(x))) + early

    network = Network(forward)
    cut = cut_of(network)
    trace = trace_of(cut, lambda: network(torch.ones(3, 2)))
    with pytest.raises(CutError, match="ran other operations than in the first step"):
        run(cut, lambda: network(torch.ones(2, 2)), trace, first=0, last=1)


def test_a_layer_called_twice_becomes_code_between_the_others() -> None:
    network = Network(lambda n, x: n.c(n.a(n.b(n.a(x)))))
    x = torch.randn(3, 2)
    want = network(x)
    cut = cut_of(network)
    trace = trace_of(cut, lambda: network(x))
    assert trace.order == (1, 2)
    assert trace.parameter_gaps == {"a.weight": {0, 1}, "a.bias": {0, 1}}
    cut.remove()
    got, crossed = piped(network, [0, 1], x)
    assert torch.equal(got, want)
    assert crossed == [1]


def test_all_layers_called_twice_is_an_error() -> None:
    network = Network(lambda n, x: n.c(n.b(n.a(n.c(n.b(n.a(x)))))))
    with pytest.raises(RuntimeError, match="called twice in one step"):
        trace_of(cut_of(network), lambda: network(torch.ones(3, 2)))


def test_a_step_that_does_not_call_the_network_is_an_error() -> None:
    network = Network(FORWARDS["chain"][0])
    with pytest.raises(CutError, match=r"training_step did not call self\.net"):
        trace_of(cut_of(network), lambda: torch.ones(1))


def test_a_network_called_twice_is_an_error_where_it_is_cut() -> None:
    network = Network(FORWARDS["chain"][0])
    cut = cut_of(network)
    x = torch.ones(3, 2)
    trace = trace_of(cut, lambda: network(x))
    with pytest.raises(CutError, match=r"self\.net is called twice"):
        run(cut, lambda: network(network(x)), trace, first=0, last=3)
    assert run(cut, lambda: network(network(x)), None, first=0, last=3).output.shape == (3, 2)


def _twice(network: Network, x: Tensor) -> Tensor:
    return network(x) - network(2 * x)


def _slope(network: Network, x: Tensor) -> Tensor:
    x.requires_grad_()
    return torch.autograd.grad(network(x).sum(), x)[0]


def _reads(network: Network, x: Tensor) -> Tensor:
    return network(x) if float(network(x).sum()) > 0 else x


@pytest.mark.parametrize(
    ("step", "seen"),
    [
        (_twice, "calls the network more than once"),
        (_slope, "differentiates by itself"),
        (_reads, ""),  # nobody knows the value, so the look ends there
        (lambda network, x: network(x).sum().item() + network.missing, ""),
        (lambda network, x: network(x).sum(), ""),
    ],
)
def test_looking_on_tells_what_only_whole_steps_can_do(
    step: Callable[[Network, Tensor], Any], seen: str
) -> None:
    network = Network(FORWARDS["chain"][0])
    cut = cut_of(network)
    returned: list[int] = []
    with torch.no_grad():
        trace = cut.discover(
            lambda: step(network, torch.ones(3, 2)),
            step_name="training_step",
            names={},
            at_return=lambda: returned.append(1),
        )
    assert (trace.only_whole, trace.order, returned) == (seen, (0, 1, 2), [1])
    assert trace.returned_rows == {3}


def test_layers_in_another_order_than_the_first_time_are_an_error() -> None:
    order = [0]

    def forward(n: Network, x: Tensor) -> Tensor:
        layers = [n.a, n.b, n.c] if order[0] == 0 else [n.b, n.a, n.c]
        for layer in layers:
            x = layer(x)
        return x

    network = Network(forward)
    cut = cut_of(network)
    step = lambda: network(torch.ones(3, 2))  # noqa: E731
    trace = trace_of(cut, step)
    order[0] = 1
    with pytest.raises(CutError, match="out of order"):
        run(cut, step, trace, first=0, last=2)


def test_layers_left_out_are_an_error() -> None:
    every = [True]
    network = Network(lambda n, x: n.c(n.b(n.a(x))) if every[0] else n.a(x))
    cut = cut_of(network)
    step = lambda: network(torch.ones(3, 2))  # noqa: E731
    trace = trace_of(cut, step)
    every[0] = False
    with pytest.raises(CutError, match="called 1 of the 3 layers"):
        run(cut, step, trace, first=0, last=3)


def test_code_that_reads_an_activations_value_is_an_error() -> None:
    network = Network(lambda n, x: n.c(n.b(x) if float(n.a(x).sum()) > 0 else x))
    with pytest.raises(AbsentValueError, match="reads the value of an activation"):
        trace_of(cut_of(network), lambda: network(torch.ones(3, 2)))


def test_removal_gives_the_modules_back() -> None:
    network = Network(FORWARDS["chain"][0])
    cut = cut_of(network)
    assert "forward" in vars(network.a)
    cut.remove()
    assert "forward" not in vars(network.a)
    assert "forward" not in vars(network)


def test_random_streams_are_those_of_layers_and_gaps() -> None:
    network = Network(FORWARDS["chain"][0])
    cut = cut_of(network)
    step = lambda: network(torch.ones(3, 2))  # noqa: E731
    trace = trace_of(cut, step)
    seen: list[tuple[int, bool]] = []
    run(cut, step, trace, first=0, last=1, reseed=lambda i, layer: seen.append((i, layer)))
    assert seen == [(0, False), (0, True), (1, False)]


class TestAbsentMode:
    """Ordinary code over a mixture of absent and present tensors."""

    def test_shapes_and_devices_are_as_if_present(self) -> None:
        x = to_absent(torch.ones(2, 3))
        with AbsentMode(CPU, absent_parameters=True):
            assert x.device == CPU
            assert (x @ torch.ones(3, 4)).shape == (2, 4)
            assert torch.arange(3, device=x.device).tolist() == [0, 1, 2]
            assert torch.cat([x, torch.ones(1, 3)]).shape == (3, 3)
            assert x.to("cpu").is_meta
            assert x.to(torch.float64).dtype == torch.float64
            assert torch.zeros_like(x).shape == (2, 3)

    def test_what_does_not_touch_absent_values_is_computed(self) -> None:
        with AbsentMode(CPU, absent_parameters=True):
            assert (torch.ones(2) + 1).tolist() == [2, 2]

    def test_parameters_are_absent_on_demand(self) -> None:
        linear, x = nn.Linear(2, 2), torch.ones(1, 2)
        with AbsentMode(CPU, absent_parameters=True):
            assert linear(x).is_meta
        with AbsentMode(CPU, absent_parameters=False):
            assert torch.equal(linear(x), linear(x))

    @pytest.mark.parametrize("read", [bool, float, int, Tensor.item, Tensor.tolist, Tensor.numpy])
    def test_values_cannot_be_read(self, read: Callable[[Tensor], Any]) -> None:
        x = to_absent(torch.ones(1))
        with AbsentMode(CPU, absent_parameters=True), pytest.raises(AbsentValueError):
            read(x)

    def test_an_absent_value_is_resolved_once_it_has_arrived(self) -> None:
        absent, present = to_absent(torch.ones(2)), torch.ones(2)
        with AbsentMode(CPU, absent_parameters=True, resolve={id(absent): present}):
            assert (absent * 3).tolist() == [3, 3]


class Watching(TorchFunctionMode):
    """A user's own mode; it counts calls."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).calls += func is torch.relu
        return func(*args, **(kwargs or {}))


def test_layers_within_a_mode_of_the_users_own_run_in_that_mode_alone() -> None:
    """The innermost mode was left once, which was the user's: layers ran in ours instead."""
    stacks: list[list[Any]] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                stacks.append([type(m) for m in _get_current_function_mode_stack()])
            return super().forward(x)

    def forward(n: Network, x: Tensor) -> Tensor:
        with Watching():
            x = n.a(x)
            x = n.b(torch.relu(x))
            torch.relu(x)
        return n.c(x)

    network = Network(forward)
    network.b = Looking(2, 2)
    x = torch.randn(3, 2)
    want = network(x)
    Watching.calls = 0
    got, _ = piped(network, [0, 1, 2], x)
    assert torch.equal(got, want)
    assert stacks == [[Watching], [Watching]]  # as on one device
    assert Watching.calls == 2 + 1 + 2 + 2  # in the look at the step, and on each stage
    assert _get_current_function_mode_stack() == []


def test_repeats_that_are_known_give_absent_values_their_shape() -> None:
    x = torch.ones(3, 4, device="meta")
    with AbsentMode(CPU, absent_parameters=False):
        for repeats in (torch.tensor([2]), torch.tensor(2)):
            assert x.repeat_interleave(repeats, 1).shape == (3, 8)
            assert x.repeat_interleave(repeats=repeats, dim=-1).shape == (3, 8)
            assert torch.repeat_interleave(x, repeats).shape == (24,)
        assert x.repeat_interleave(torch.tensor([1, 0, 2]), dim=0).shape == (3, 4)


class _Widened(nn.Module):
    def forward(self, x: Tensor, times: int) -> Tensor:
        return x.repeat(1, times)


def test_a_skipped_layer_is_asked_again_for_other_numbers_and_types() -> None:
    seen: list[tuple[int, torch.dtype]] = []

    def forward(n: Network, x: Tensor, times: int) -> Any:
        y = n.a(x, times)
        seen.append((y.shape[1], y.dtype))
        return n.c(n.b(y[:, :2]))

    network = Network(forward)
    network.a = _Widened()  # type: ignore[assignment]
    cut, x = cut_of(network), torch.ones(1, 2)
    trace = trace_of(cut, lambda: network(x, 2))
    seen.clear()
    for x_given, times in ((x, 2), (x, 3), (x.double(), 3)):
        step = partial(network, x_given, times)
        run(cut, step, trace, first=1, last=3, received=(x,))
    assert seen == [(4, torch.float32), (6, torch.float32), (6, torch.float64)]


class _Carries(nn.Module):
    """Returns a value of any structure beside what it computes, its own or the one it was given."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.value = value

    def forward(self, x: Tensor, carried: Any = None) -> Any:
        value = self.value if carried is None else carried["it"][0]
        return self.linear(x), {"it": (tree_map_only(Tensor, torch.clone, value), "tag")}


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_layers_may_hand_on_any_structure(value: Any) -> None:
    network = Network(lambda n, x: n.c(*n.b(*n.a(x))))
    network.a, network.b, network.c = _Carries(value), _Carries(), _Carries()
    x = torch.randn(3, 2)
    want = network(x)
    got, _ = piped(network, [0, 1, 2], x)
    leaves, spec = tree_flatten(got)
    others, other_spec = tree_flatten(want)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        assert type(a) is type(b)
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.resolve_conj().equal(b.resolve_conj())
        else:
            assert a == b


@dataclass
class _State:
    x: Tensor
    total: Tensor
    calls: int = 0


class _Stateful(nn.Module):
    """Takes and returns a dataclass: a new one, or the one that it was given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(2, 2), kind

    def forward(self, state: _State) -> Any:
        x = self.linear(state.x)
        if self.kind == "new":
            return _State(x, state.total + x.sum(), state.calls + 1)
        state.x, state.total, state.calls = x, state.total + x.sum(), state.calls + 1
        return state if self.kind == "same" else None


def _with_state(network: Network, x: Tensor) -> Tensor:
    state = _State(x, x.new_zeros(()))
    for layer in (network.a, network.b, network.c):
        state = layer(state) or state
        state.x = state.x * 1.5
    found: Tensor = state.x + state.total * state.calls
    return found


@pytest.mark.parametrize("starts", [[0, 1, 2], [0, 2], [0, 1]])
@pytest.mark.parametrize("kind", ["new", "same", "none"])
def test_a_dataclass_is_handed_from_layer_to_layer(kind: str, starts: list[int]) -> None:
    network = Network(_with_state)
    network.a, network.b, network.c = (_Stateful(kind) for _ in range(3))  # type: ignore[assignment]
    x = torch.randn(3, 2)
    want = network(x)
    if kind == "none":
        with pytest.raises(CutError, match="layers hand on what they compute by returning it"):
            piped(network, starts, x)
        return
    got, _ = piped(network, starts, x)
    assert torch.equal(got, want)


def test_what_fails_without_data_is_named_with_a_remedy() -> None:
    def forward(n: Network, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 2)
        packed = nn.utils.rnn.pack_padded_sequence(n.a(x)[..., None], lengths, batch_first=True)
        found: Tensor = n.c(n.b(packed.data.view(-1, 2)))
        return found

    with pytest.raises(AbsentValueError, match=r"runs .*pack_padded.* Rule: .* Remedy: "):
        piped(Network(forward), [0, 2], torch.randn(3, 2))
