"""Keep each optimizer to the parameters that live on this stage, and remember them by name."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeswift_lightning.runtime.ownership import ParameterTable

__all__ = [
    "OptimizerNames",
    "StageOptimizers",
    "clip_by_global_norm",
    "load_settings",
    "unwrapped",
]


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the torch optimizer."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def load_settings(optimizer: Optimizer, recorded: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups the settings that a checkpoint has kept, such as their rates."""
    for group, settings in zip(unwrapped(optimizer).param_groups, recorded, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


class StageOptimizers(Protocol):
    """The optimizers, of which each stage keeps its part."""

    def keep_local(self) -> None:
        """Let go of parameters that are not here."""
        ...

    def made_whole(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters come back; their state comes with them."""
        ...


class OptimizerNames:
    """The names of the parameters in each group of each optimizer, on all stages together.

    ``configure_optimizers`` sees the whole module on every rank, so groups by name, by dims or by
    module are the user's own. Afterwards the parameters of other stages leave the groups (which
    may become empty); checkpoints still describe the full groups.
    """

    def __init__(self) -> None:
        self.groups: list[list[list[str]]] = []
        self._parameters: dict[str, nn.Parameter] = {}

    def remember(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Note the groups as the user made them."""
        self._parameters = dict(module.named_parameters())
        table = ParameterTable.of(module)
        self.groups = [
            [
                [self._name(table, parameter) for parameter in group["params"]]
                for group in unwrapped(optimizer).param_groups
            ]
            for optimizer in optimizers
        ]

    @staticmethod
    def _name(table: ParameterTable, parameter: Tensor) -> str:
        try:
            return table.names[id(parameter)]
        except KeyError:
            msg = (
                f"an optimizer holds a parameter of shape {list(parameter.shape)} that is no part "
                "of the LightningModule. Rule: a pipeline keeps each parameter on its stage, by "
                "name. Remedy: make it an attribute of the LightningModule"
            )
            raise ValueError(msg) from None

    def keep_local(self, optimizers: Sequence[Optimizer], module: LightningModule) -> None:
        """Take the parameters of other stages out of the groups, also of groups added since."""
        self._parameters = parameters = dict(module.named_parameters())
        table = ParameterTable.of(module)
        for optimizer, groups in zip(optimizers, self.groups, strict=True):
            inner = unwrapped(optimizer)
            for added in inner.param_groups[len(groups) :]:
                groups.append([self._name(table, parameter) for parameter in added["params"]])
            for group, names in zip(inner.param_groups, groups, strict=True):
                local = [parameters[n] for n in names if not parameters[n].is_meta]
                if len(local) < len(group["params"]):
                    kept = {id(p) for p in local}
                    for parameter in group["params"]:
                        if id(parameter) not in kept:
                            inner.state.pop(parameter, None)
                    group["params"] = local

    def belongings(
        self, optimizers: Sequence[Optimizer], name: str, parameter: nn.Parameter
    ) -> list[tuple[Any, Mapping[int, Any]]]:
        """Return the state of a parameter in each optimizer, and the options of its groups."""
        return [
            (
                inner.state.get(parameter),
                {
                    number: {k: v for k, v in group.items() if k != "params"}
                    for number, (group, names) in enumerate(
                        zip(inner.param_groups, groups, strict=True)
                    )
                    if name in names
                },
            )
            for inner, groups in zip(map(unwrapped, optimizers), self.groups, strict=True)
        ]

    def move(
        self,
        optimizers: Sequence[Optimizer],
        module: LightningModule,
        came: Mapping[str, list[tuple[Any, Mapping[int, Any]]]],
    ) -> None:
        """Keep to the parameters that are here now, and take the state of those that have come.

        A group that was empty takes its options too: an optimizer may pass over empty groups, and
        not count its steps there.

        Args:
            optimizers: The optimizers.
            module: The module, whose parameters have moved.
            came: What `belongings` returned elsewhere, by name.
        """
        self._parameters = parameters = dict(module.named_parameters())
        for index, (optimizer, groups) in enumerate(zip(optimizers, self.groups, strict=True)):
            inner = unwrapped(optimizer)
            for number, (group, names) in enumerate(zip(inner.param_groups, groups, strict=True)):
                held = group["params"]
                group["params"] = local = [
                    parameters[n] for n in names if not parameters[n].is_meta
                ]
                here = {id(parameter) for parameter in local}
                for parameter in held:
                    if id(parameter) not in here:
                        inner.state.pop(parameter, None)
                for name in [name for name in names if name in came]:
                    state, options = came[name][index]
                    if state is not None:
                        inner.state[parameters[name]] = state
                    if not held:
                        group.update(options[number])

    def restore(self, optimizers: Sequence[Optimizer], module: LightningModule) -> None:
        """Put all parameters back into the groups, and forget the optimizers' state."""
        self._parameters = parameters = dict(module.named_parameters())
        for optimizer, groups in zip(optimizers, self.groups, strict=True):
            inner = unwrapped(optimizer)
            inner.state.clear()
            for group, names in zip(inner.param_groups, groups, strict=True):
                group["params"] = [parameters[name] for name in names]

    def local_state(
        self, index: int, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the part of optimizer ``index``'s full ``state_dict`` that belongs here.

        Args:
            index: Place of the optimizer.
            optimizer: The optimizer, with its local groups.
            state: State over all stages, its parameters numbered in the order of the groups.
        """
        groups = self.groups[index]
        held = [[id(p) for p in group["params"]] for group in unwrapped(optimizer).param_groups]
        names = {id(p): n for n, p in self._parameters.items()}
        kept: dict[str, int] = {}
        for group in held:
            for key in group:
                kept[names[key]] = len(kept)
        order = [name for group in groups for name in group]
        local = {
            kept[order[int(number)]]: value
            for number, value in state["state"].items()
            if order[int(number)] in kept
        }
        param_groups = [
            {**group, "params": [kept[name] for name in mine if name in kept]}
            for group, mine in zip(state["param_groups"], groups, strict=True)
        ]
        return {"state": local, "param_groups": param_groups}


@torch.no_grad()
def clip_by_global_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, owned: set[int], reduce: Any
) -> Tensor:
    """Clip by the norm over all stages, each shared parameter counted once.

    Args:
        parameters: This stage's parameters.
        max_norm: The largest allowed norm.
        owned: ``id`` of the parameters that this stage counts.
        reduce: Sums a scalar tensor over the stages, in place.

    Returns:
        The total norm before clipping, in float64; equal on all stages.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) in owned:
            total += parameter.grad.detach().double().pow(2).sum()
    reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
