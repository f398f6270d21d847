"""An optimizer's part on each stage, when parameters go from one to another."""

from typing import Any

import torch
from torch import nn

from pipeswift_lightning.strategies.optimizers import OptimizerNames


class Rank:
    """A module of two layers, each in a group of its own, of which this rank has some."""

    def __init__(self, *here: str) -> None:
        self.net: Any = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
        self.optimizer = torch.optim.Adam(
            [{"params": list(self.net[name].parameters()), "count": 0} for name in "ab"]
        )
        self.names = OptimizerNames()
        self.names.remember(self.net, [self.optimizer])
        self.place(*here)
        self.names.keep_local([self.optimizer], self.net)

    def place(self, *here: str) -> None:
        for name, layer in self.net.items():
            for leaf, parameter in list(layer.named_parameters()):
                if (name in here) == parameter.is_meta:
                    device = "cpu" if name in here else "meta"
                    setattr(layer, leaf, nn.Parameter(torch.zeros(parameter.shape, device=device)))

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
            group["count"] += len(group["params"]) > 0  # as some optimizers count
        self.optimizer.step()

    def move(self, came: Any) -> None:
        self.names.move([self.optimizer], self.net, came)


def test_state_and_the_options_of_a_group_that_was_empty_go_along() -> None:
    first, second = Rank("a"), Rank("b")
    for rank in (first, second, first):
        rank.step()
    layer = first.net["a"]
    came = {
        f"a.{leaf}": first.names.belongings([first.optimizer], f"a.{leaf}", parameter)
        for leaf, parameter in layer.named_parameters()
    }
    first.place()
    second.place("a", "b")
    first.move({})
    second.move(came)

    assert [group["params"] for group in first.optimizer.param_groups] == [[], []]
    assert not first.optimizer.state
    every = [p for group in second.optimizer.param_groups for p in group["params"]]
    assert list(map(id, every)) == list(map(id, second.net.parameters()))
    assert [group["count"] for group in second.optimizer.param_groups] == [2, 1]
    steps = [int(second.optimizer.state[p]["step"]) for p in every]
    assert steps == [2, 2, 1, 1]
    second.step()
    assert second.optimizer.param_groups[0]["count"] == 3
