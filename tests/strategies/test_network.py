"""Module styles that users write: each finds its layers, or gives a one-line reason."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from pipeswift_lightning.strategies.network import NetworkError, find_network


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def module(**children: Any) -> LightningModule:
    result = LightningModule()
    for name, child in children.items():
        setattr(result, name, child)
    return result


def parent(**children: nn.Module) -> nn.Module:
    result = nn.Module()
    for name, child in children.items():
        result.add_module(name, child)
    return result


def hooked(layers: Callable[[nn.Module], Any], **children: nn.Module) -> nn.Module:
    result = parent(**children)
    result.configure_pipeline = lambda: layers(result)  # type: ignore[assignment]
    return result


def blocks(num: int = 3) -> nn.ModuleList:
    return nn.ModuleList(linear() for _ in range(num))


# style -> (module, network argument, name found, number of layers, whether it is run as a chain)
STYLES: dict[str, tuple[Callable[[], LightningModule], str | None, str, int, bool]] = {
    "a sequence": (
        lambda: module(net=nn.Sequential(linear(), nn.ReLU(), linear())),
        None,
        "self.net",
        3,
        False,
    ),
    "a nested sequence": (
        lambda: module(net=nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear())),
        None,
        "self.net",
        3,
        False,
    ),
    "blocks in a model": (
        lambda: module(anything=parent(embed=linear(), blocks=blocks(), head=linear())),
        None,
        "self.anything",
        3,
        False,
    ),
    "deeper blocks": (
        lambda: module(model=parent(inner=parent(embed=linear(), h=blocks(4)), head=linear())),
        None,
        "self.model",
        4,
        False,
    ),
    "encoder and decoder": (
        lambda: module(model=parent(encoder=blocks(2), decoder=blocks(3))),
        None,
        "self.model",
        5,
        False,
    ),
    "named children": (
        lambda: module(model=parent(a=linear(), b=linear(), act=nn.ReLU())),
        None,
        "self.model",
        2,
        False,
    ),
    "a loss with weights beside": (
        lambda: module(model=nn.Sequential(linear(), linear()), loss=linear()),
        None,
        "self.model",
        2,
        False,
    ),
    "a loss without weights": (
        lambda: module(backbone=nn.Sequential(linear(), linear()), loss=nn.MSELoss()),
        None,
        "self.backbone",
        2,
        False,
    ),
    "named by the user": (
        lambda: module(a=linear(), b=parent(c=nn.Sequential(linear(), linear()))),
        "b.c",
        "self.b.c",
        2,
        False,
    ),
    "the module itself": (lambda: module(a=linear(), b=linear()), "self", "self", 2, False),
    "a hook without a forward": (
        lambda: module(net=hooked(lambda n: [n.a, n.b], a=linear(), b=linear())),
        None,
        "self.net",
        2,
        True,
    ),
    "a hook with functions": (
        lambda: module(net=hooked(lambda n: [n.a, lambda x: x + 1, n.b], a=linear(), b=linear())),
        None,
        "self.net",
        3,
        True,
    ),
}

REASONS: dict[str, tuple[Callable[[], LightningModule], str | None, str]] = {
    "two candidates": (lambda: module(a=linear(), b=linear()), None, r"a \(Linear\), b \(Linear\)"),
    "no parameters": (lambda: module(act=nn.ReLU()), None, "none with parameters"),
    "a typo": (lambda: module(model=linear()), "modle", "Did you mean 'model'"),
    "a hook that returns nothing": (
        lambda: module(net=hooked(lambda n: None, a=linear())),
        None,
        r"configure_pipeline\(\) returned None",
    ),
    "a hook that returns a layer twice": (
        lambda: module(net=hooked(lambda n: [n.a, n.a], a=linear())),
        None,
        "one layer twice",
    ),
}


@pytest.mark.parametrize("style", list(STYLES))
def test_layers_are_found(style: str) -> None:
    make, argument, name, num_layers, chain = STYLES[style]
    found = find_network(make(), argument)
    assert (found.name, len(found.layers), found.chain) == (name, num_layers, chain)


@pytest.mark.parametrize("style", list(REASONS))
def test_or_the_reason_is_given(style: str) -> None:
    make, argument, text = REASONS[style]
    with pytest.raises(NetworkError, match=text) as raised:
        find_network(make(), argument)
    assert "\n" not in str(raised.value)


def test_a_hook_on_the_lightning_module_that_calls_its_own_layers() -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x))

        def configure_pipeline(self) -> list[nn.Module]:
            return [self.a, self.b]

    found = find_network(Own(), None)
    assert (found.name, len(found.layers), found.chain) == ("self", 2, False)
