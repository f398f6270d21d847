"""Stand-ins for values of unknown shapes, and what is found once something looks."""

import sys

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.absent import AbsentMode
from pipeswift_lightning.runtime.alike import form_of
from pipeswift_lightning.runtime.deferred import Deferrals

CPU, SEEN = torch.device("cpu"), torch.empty(2, 3, device="meta")


def test_a_chain_may_be_longer_than_the_stack() -> None:
    mode = AbsentMode(CPU, absent_parameters=True, seen={})
    (x,) = mode.deferred.defer(lambda: [torch.empty(7, 3, device="meta")], [], [SEEN])
    with mode:
        SEEN + 1.0  # so that its like is known
        for _ in range(2 * sys.getrecursionlimit()):
            x = x + 1.0
        assert x in mode.deferred
        assert x.shape == (7, 3)


def test_a_call_is_made_once_and_only_if_it_is_needed() -> None:
    deferrals, made = Deferrals(), []

    def make(name: str, *needs: Tensor) -> list[Tensor]:
        made.append(name)
        assert all(deferrals.known(need).shape == (5, 3) for need in needs)
        return [torch.empty(5, 3, device="meta")] * 2

    a, b = deferrals.defer(lambda: make("a"), [], [SEEN, SEEN])
    (c,) = deferrals.defer(lambda: make("c", a, b), [a, b], [SEEN])
    (d,) = deferrals.defer(lambda: make("d", a, c), [a, c], [SEEN])
    deferrals.defer(lambda: make("e", d), [d], [SEEN])
    assert made == []
    for _ in range(2):
        assert deferrals.known(d).shape == (5, 3)
        assert made == ["a", "c", "d"]
    deferrals.clear()
    assert not deferrals


class Block(nn.Module):
    def __init__(self, width: int = 4, rate: float = 0.5, sizes: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, width), nn.Dropout(rate))
        self.sizes = {"all": list(sizes)}
        self.register_buffer("seen", torch.zeros(3))


def form(layer: nn.Module) -> object:
    return form_of(layer, layer.forward)


def test_layers_are_alike_if_they_differ_in_values_of_tensors_alone() -> None:
    block = form(Block())
    assert form(Block()) == block
    assert form(Block(5)) != block
    assert form(Block(rate=0.1)) != block
    assert form(Block(sizes=(1, 3))) != block
    assert form(Block().eval()) == block, "its mode, which changes, is looked at by itself"
    wider = Block()
    wider.seen = torch.zeros(4)
    hooked, patched, other = Block(), Block(), Block()
    hooked.inner.register_forward_hook(lambda module, args, output: output[:1])
    patched.inner.forward = lambda x: x[:1]  # type: ignore[method-assign]
    other.callback = lambda x: x  # type: ignore[assignment]
    for layer in (wider, hooked, patched, other):
        assert form(layer) != block
        assert form(layer) == form(layer)
    assert hash(block) == hash(form(Block()))
