"""Rows of instructions over threads give the gradients of the unpiped network."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule, forward_only
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.runtime.agreement import DisagreementError
from pipeswift_lightning.runtime.communication import CommunicationError
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.gradients import differentiate
from pipeswift_lightning.runtime.messages import Channel
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.transport import LoopbackHub, LoopbackTransport


class Program:
    """One stage: a linear layer; a count travels beside the activation, without a gradient."""

    def __init__(self, layer: nn.Module, is_last: bool, batches: list[Tensor]) -> None:
        self.layer, self.is_last, self.batches = layer, is_last, batches
        self.losses: dict[int, float] = {}

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        x, count = (self.batches[micro_batch], torch.tensor(0)) if received is None else received
        if received is not None and torch.is_grad_enabled():
            assert x.requires_grad
            assert not count.requires_grad
        x, count = self.layer(x).tanh(), count + 1
        if not self.is_last:
            return x, count
        loss = x.pow(2).sum() / count
        self.losses[micro_batch] = loss.item()
        return loss

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        loss.backward()

    def signature(self, micro_batch: int) -> Any:
        return self.batches[micro_batch].shape


def run_threads(work: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 -- raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def pipe(
    layers: list[nn.Linear], batches: list[Tensor], schedule: Schedule, training: bool = True
) -> tuple[list[Program], list[Recorder]]:
    hub = LoopbackHub()
    last = len(layers) - 1
    programs = [Program(layer, i == last, batches) for i, layer in enumerate(layers)]
    recorders = [Recorder(i) for i in range(len(layers))]

    def stage(position: int) -> None:
        channel = Channel(LoopbackTransport(hub, position))
        executor = Executor(channel, range(len(layers)), recorder=recorders[position])
        for _ in range(2):  # known layouts the second time
            recorders[position].begin()
            executor.run(schedule.rows[position], programs[position], training=training)

    run_threads([lambda p=p: stage(p) for p in range(len(layers))])  # type: ignore[misc]
    return programs, recorders


def network(num_stages: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3, dtype=torch.float64) for _ in range(num_stages)]


def micro_batches(num: int) -> list[Tensor]:
    return [torch.randn(1 + i % 3, 3, dtype=torch.float64) for i in range(num)]


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"), [(p, m) for p in (1, 2, 4) for m in range(1, 2 * p + 1)]
)
@pytest.mark.parametrize(
    ("name", "warm_up"), [("gpipe", None), ("1f1b", None), ("1f1b", 1.5), ("1f1b", 2.0)]
)
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_are_those_of_the_unpiped_network(
    name: str, warm_up: float | None, num_stages: int, num_micro_batches: int, window: int
) -> None:
    layers, batches = network(num_stages), micro_batches(num_micro_batches)
    order = list(range(num_micro_batches))[::-1]
    built = build_schedule(name, num_stages, num_micro_batches, warm_up=warm_up, order=order)
    programs, recorders = pipe(layers, batches, lower(built, receive_window=window))
    got = [p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None]
    wanted = {}
    for layer in layers:
        layer.zero_grad()
    for i, batch in enumerate(batches):
        x = batch
        for layer in layers:
            x = layer(x).tanh()
        loss = x.pow(2).sum() / num_stages
        wanted[i] = loss.item()
        (2 * loss).backward()  # the pipeline has run twice
    want = [p.grad for layer in layers for p in layer.parameters()]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert programs[-1].losses == pytest.approx(wanted, abs=1e-12)
    kinds = [event.kind for event in recorders[0].events()]
    assert kinds.count(EventKind.FORWARD) == kinds.count(EventKind.BACKWARD) == num_micro_batches


def test_evaluation_keeps_no_graph() -> None:
    layers, batches = network(3), micro_batches(4)
    programs, _ = pipe(layers, batches, lower(forward_only(3, 4)), training=False)
    assert sorted(programs[-1].losses) == [0, 1, 2, 3]
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_errors_say_where_they_happened() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        pipe([Broken(3, 3)], micro_batches(2), lower(build_schedule("gpipe", 1, 2)))
    assert raised.value.__notes__ == ["pipeswift: in Forward of micro-batch 0 on stage 0"]


def test_with_dynamic_shapes_equal_micro_batches_may_differ_inside() -> None:
    class Cropping(Program):
        def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
            output = super().forward(stage, micro_batch, received)
            return output if self.is_last else (output[0][: 1 + micro_batch], output[1])

    layers, batches = network(2), [torch.randn(3, 3, dtype=torch.float64) for _ in range(3)]
    hub, schedule = LoopbackHub(), lower(build_schedule("1f1b", 2, 3))
    programs = [Cropping(layer, i == 1, batches) for i, layer in enumerate(layers)]

    def stage(position: int) -> None:
        channel = Channel(LoopbackTransport(hub, position), dynamic_shapes=True)
        Executor(channel, range(2)).run(schedule.rows[position], programs[position], training=True)

    run_threads([lambda p=p: stage(p) for p in range(2)])  # type: ignore[misc]
    got = [p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None]
    for layer in layers:
        layer.zero_grad()
    for i, batch in enumerate(batches):
        hidden = layers[0](batch).tanh()[: 1 + i]
        (layers[1](hidden).tanh().pow(2).sum() / 2).backward()
    want = [p.grad for layer in layers for p in layer.parameters()]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


class _Noted(Program):
    """Notes when it runs, and may fail."""

    def __init__(self, *args: Any, notes: list[str], fails: bool = False) -> None:
        super().__init__(*args)
        self.notes, self.fails = notes, fails

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        self.notes.append(f"F{micro_batch}")
        if self.fails:
            msg = "a wrong batch"
            raise ValueError(msg)
        return super().forward(stage, micro_batch, received)


class _Listening(LoopbackTransport):
    """Notes what is sent and awaited."""

    def __init__(self, *args: Any, notes: list[str]) -> None:
        super().__init__(*args)
        self.notes = notes

    def send(self, tensor: Tensor, destination: int) -> Any:
        self.notes.append("send")
        return super().send(tensor, destination)

    def receive(self, tensor: Tensor, source: int) -> Any:
        self.notes.append("receive")
        return super().receive(tensor, source)


def test_only_the_first_stage_computes_before_it_is_admitted() -> None:
    hub, notes = LoopbackHub(), [[], []]  # type: ignore[var-annotated]
    schedule = lower(build_schedule("1f1b", 2, 3))
    batches = [torch.randn(2, 4) for _ in range(3)]

    def stage(position: int) -> None:
        mine = notes[position]
        channel = Channel(_Listening(hub, position, notes=mine))
        program = _Noted(nn.Linear(4, 4), position == 1, batches, notes=mine)
        Executor(channel, range(2)).run(
            schedule.rows[position],
            program,
            training=True,
            admit=lambda **_: mine.append("admitted"),
        )

    run_threads([lambda p=p: stage(p) for p in range(2)])  # type: ignore[misc]
    assert notes[0][:2] == ["F0", "admitted"]
    assert notes[1][0] == "admitted"
    assert all(mine.count("admitted") == 1 for mine in notes)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_what_can_wait_is_done_once_before_a_rank_waits_for_a_peer(
    stages: int, training: bool
) -> None:
    hub, notes = LoopbackHub(), [[] for _ in range(stages)]  # type: ignore[var-annotated]
    kind = build_schedule("1f1b", stages, 3) if training else forward_only(stages, 3)
    schedule, batches = lower(kind), [torch.randn(2, 4) for _ in range(3)]

    def stage(position: int) -> None:
        mine = notes[position]
        program = _Noted(nn.Linear(4, 4), position == stages - 1, batches, notes=mine)
        executor = Executor(Channel(LoopbackTransport(hub, position)), range(stages))
        for _ in range(2):  # the second time nothing is left for it
            later = (lambda: mine.append("later")) if not mine else None
            executor.run(schedule.rows[position], program, training=training, meanwhile=later)

    run_threads([lambda p=p: stage(p) for p in range(stages)])  # type: ignore[misc]
    assert all(mine.count("later") == 1 for mine in notes)
    warm_up = ["F0", "F1"] if training else ["F0", "F1", "F2"]
    assert notes[0][: len(warm_up) + 1] == [*warm_up, "later"] or stages == 1
    assert stages == 1 or notes[1][0] == "later"


@pytest.mark.parametrize("disagree", [False, True])
def test_a_disagreement_explains_more_than_what_fails_on_a_wrong_batch(disagree: bool) -> None:
    notes: list[str] = []

    def admit(*, patience_s: float | None = None) -> None:
        notes.append("asked")
        if disagree:
            msg = "the ranks disagree"
            raise DisagreementError(msg)

    channel = Channel(_Listening(LoopbackHub(), 0, notes=notes))
    program = _Noted(nn.Linear(4, 4), False, [torch.randn(2, 4)] * 2, notes=notes, fails=True)
    schedule = lower(build_schedule("1f1b", 2, 2))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        Executor(channel, range(2)).run(schedule.rows[0], program, training=True, admit=admit)
    assert str(raised.value) == ("the ranks disagree" if disagree else "a wrong batch")
    assert notes == ["F0", "asked"], "nothing is sent"


def test_a_failure_before_the_admission_is_told_with_its_micro_batch() -> None:
    progress = Progress()
    program = _Noted(nn.Linear(4, 4), False, [torch.randn(2, 4)] * 2, notes=[], fails=True)
    schedule = lower(build_schedule("1f1b", 2, 2))

    def admit(*, patience_s: float | None = None) -> None:
        progress.mark("comparing")
        assert patience_s is not None, "nobody waits for long to explain a failure"
        msg = "a peer has gone"
        raise CommunicationError(msg, 1)

    executor = Executor(Channel(LoopbackTransport(LoopbackHub(), 0)), range(2), progress=progress)
    with pytest.raises(ValueError, match="a wrong batch"):
        executor.run(schedule.rows[0], program, training=True, admit=admit)
    assert (progress.stage, progress.micro_batch, progress.doing) == (0, 0, "Forward")


class _Switching(Program):
    """Leaves gradients on, as code that freezes a part for a while may."""

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        assert not torch.is_grad_enabled()
        output = super().forward(stage, micro_batch, received)
        torch.set_grad_enabled(True)
        return output


def test_each_forward_begins_with_gradients_as_the_run_wants_them() -> None:
    hub, batches = LoopbackHub(), [torch.randn(2, 4) for _ in range(3)]
    schedule = lower(forward_only(2, 3))

    def stage(position: int) -> None:
        with torch.no_grad():
            executor = Executor(Channel(LoopbackTransport(hub, position)), range(2))
            program = _Switching(nn.Linear(4, 4), position == 1, batches)
            executor.run(schedule.rows[position], program, training=False)
            assert not torch.is_grad_enabled(), "the caller's mode is back"

    run_threads([lambda p=p: stage(p) for p in range(2)])  # type: ignore[misc]


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_gradients_enter_the_graph_as_by_torchs_own_backward(kind: torch.dtype) -> None:
    weight = torch.randn(3, 4, dtype=kind, requires_grad=True)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    x = torch.randn(5, 3, dtype=kind)
    outputs = [x @ weight, (x @ weight).t().sin()]
    gradients = [torch.randn(4, 5, dtype=kind).t(), torch.randn(4, 5, dtype=kind)]
    edges = [get_gradient_edge(output) for output in outputs]
    torch.autograd.backward(edges, gradients, retain_graph=True)
    expected, weight.grad = weight.grad, None
    differentiate(edges, gradients, retain=True)
    assert torch.equal(weight.grad, expected)
    differentiate(edges, gradients)
    assert torch.equal(weight.grad, 2 * expected)
    assert [torch.equal(gradient, expected) for gradient in seen] == [True] * 3
    with pytest.raises(RuntimeError, match="second time"):
        differentiate(edges, gradients)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        differentiate([get_gradient_edge(x @ weight)], [torch.randn(2, 2, dtype=kind)])
