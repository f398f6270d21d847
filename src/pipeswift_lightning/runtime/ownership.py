"""Which stages own which parameters and buffers; give up the rest, and bring it back at the end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.runtime.gradients import broadcast_tensors
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["LocalShare", "Owners", "ParameterTable", "find_owners"]


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """The parameters of a module by object, so that tied weights are one entry.

    Attributes:
        names: Canonical name (the first) of each parameter, by ``id``.
        aliases: Every name of each parameter, by canonical name.
    """

    names: Mapping[int, str]
    aliases: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, module: nn.Module) -> "ParameterTable":
        """List the parameters of ``module``."""
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        return cls(
            names={key: names[0] for key, names in by_id.items()},
            aliases={names[0]: tuple(names) for names in by_id.values()},
        )


@dataclass(frozen=True, slots=True)
class Owners:
    """The stages that own each parameter and buffer, by canonical name.

    Attributes:
        parameters: Stages of each parameter.
        buffers: Stage of each buffer.
        replicated: Parameters whose every owner computes the whole gradient by itself.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]
    replicated: frozenset[str] = frozenset()

    @classmethod
    def everywhere(cls, table: ParameterTable, num_stages: int) -> "Owners":
        """Return owners by which every stage has all, and computes with all of it."""
        stages = tuple(range(num_stages))
        return cls(dict.fromkeys(table.aliases, stages), {}, frozenset(table.aliases))

    def shared(self) -> dict[tuple[int, ...], list[str]]:
        """Parameters whose gradients are summed over several owners, by owners."""
        result: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.parameters.items():
            if len(stages) > 1 and name not in self.replicated:
                result.setdefault(stages, []).append(name)
        return result

    def of_stage(self, stage: int) -> list[str]:
        """Names of the parameters that ``stage`` owns."""
        return [name for name, stages in self.parameters.items() if stage in stages]


def find_owners(
    module: nn.Module,
    network: nn.Module,
    layers: Sequence[nn.Module],
    trace: StepTrace,
    partition: Partition,
) -> Owners:
    """Return the owners: a layer's stage, and the stages whose code uses a loose parameter.

    The code in gap ``g`` belongs to the stage of layer ``g - 1``, and the code before the first
    layer to stage 0. What no code was seen to use (the parameters of a loss) belongs to the last
    stage, where the user's loss runs; so does what is no part of the network, since the loss, which
    is not looked at, may use it again.
    """
    table = ParameterTable.of(module)
    stages: dict[str, set[int]] = {name: set() for name in table.aliases}
    for position, index in enumerate(trace.order):
        for parameter in layers[index].parameters():
            stages[table.names[id(parameter)]].add(partition.stage_of(position))
    for name, gaps in trace.parameter_gaps.items():
        if name in stages:
            stages[name] |= {partition.stage_of(max(gap - 1, 0)) for gap in gaps}
    last = len(partition.ranges) - 1
    inside = {id(parameter) for parameter in network.parameters()}
    for key, name in table.names.items():
        if key not in inside and stages[name]:
            stages[name].add(last)
    owners = {name: tuple(sorted(found)) or (last,) for name, found in stages.items()}
    return Owners(owners, _buffer_owners(module, layers, trace, partition, owners))


def _buffer_owners(
    module: nn.Module,
    layers: Sequence[nn.Module],
    trace: StepTrace,
    partition: Partition,
    parameters: Mapping[str, tuple[int, ...]],
) -> dict[str, int]:
    of_module: dict[int, int] = {}
    for position, index in enumerate(trace.order):
        for child in layers[index].modules():
            of_module[id(child)] = partition.stage_of(position)
    last = len(partition.ranges) - 1
    result: dict[str, int] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        siblings = [f"{dot}{n}" for n, _ in child.named_parameters(recurse=False)]
        sibling = next((parameters[n][0] for n in siblings if n in parameters), last)
        stage = of_module.get(id(child), sibling)
        for name in child._buffers:
            result[f"{dot}{name}"] = stage
    return result


@dataclass(slots=True)
class LocalShare:
    """What one rank holds of a module whose other parts live on other stages.

    The module tree stays whole: the names, ``configure_optimizers`` and the user's code see every
    parameter; those of other stages are stand-ins on the meta device.

    Attributes:
        divided: Names of parameters that were built on the meta device: not brought back.
    """

    module: nn.Module
    owners: Owners
    table: ParameterTable
    stage: int
    divided: frozenset[str] = frozenset()
    _given_up: dict[str, nn.Parameter] = field(default_factory=dict)

    def give_up_foreign(self) -> None:
        """Free the parameters that other stages own."""
        parameters = dict(self.module.named_parameters())
        for name, stages in self.owners.parameters.items():
            if self.stage in stages or parameters[name].is_meta:
                continue
            parameter = parameters[name]
            stand_in = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            self._place(name, stand_in)
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            parameter.grad = None
            self._given_up[name] = parameter

    def take_over(self, name: str, data: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Put a parameter with ``data`` in the place of its stand-in.

        The object that the user's code, hooks and optimizers know is there again.
        """
        original = self._given_up.pop(name, None)
        if original is None:  # built on the meta device, and never here before
            parameter = dict(self.module.named_parameters())[name]
            real = nn.Parameter(data, requires_grad=requires_grad)
            real.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
            return parameter
        original.data = data
        original.requires_grad_(requires_grad)
        self._place(name, original)
        return original

    def set_buffer(self, name: str, value: torch.Tensor | None) -> None:
        """Give a buffer the value that its owner had."""
        path, _, leaf = name.rpartition(".")
        buffers = self.module.get_submodule(path)._buffers
        held = buffers.get(leaf)
        if held is None or value is None or held.is_meta or _kind(held) != _kind(value):
            buffers[leaf] = value
        else:
            held.copy_(value)  # other modules may share it

    def bring_back(self, groups: MeshGroups, device: torch.device) -> None:
        """Fetch every parameter and buffer from its owner; collective over the pipeline.

        Afterwards the module is whole on every rank, and the same parameter objects are in place.
        """
        replica = groups.coordinate.replica
        parameters = dict(self.module.named_parameters())
        returned: dict[str, nn.Parameter] = {}
        for name, stages in self.owners.parameters.items():
            if name in self.divided:
                continue
            source = groups.mesh.rank(stage=stages[0], replica=replica)
            parameter = parameters[name]
            if name in self._given_up:
                original = self._given_up.pop(name)
                # On the host: the whole module need not fit the device.
                original.data = torch.empty_like(parameter, device="cpu")
                self._place(name, original)
                parameter = returned[name] = original
            broadcast_tensors([parameter.data], source, groups.pipeline, device)
        self._bring_back_flags(groups, parameters, returned)
        self._bring_back_buffers(groups)

    def _bring_back_flags(
        self,
        groups: MeshGroups,
        parameters: Mapping[str, nn.Parameter],
        returned: Mapping[str, nn.Parameter],
    ) -> None:
        """Ask the owners which parameters need a gradient: optimizers are toggled there only."""
        own = {n: p.requires_grad for n, p in parameters.items() if n not in returned}
        every: list[dict[str, bool]] = [{} for _ in range(groups.mesh.num_stages)]
        dist.all_gather_object(every, own, group=groups.pipeline)
        flags = {name: flag for part in every for name, flag in part.items()}
        for name, parameter in returned.items():
            parameter.requires_grad_(flags[name])

    def _bring_back_buffers(self, groups: MeshGroups) -> None:
        """Fetch buffers as objects: a step may have made them, or changed their shapes."""
        own = {
            name: None if buffer is None else buffer.detach().cpu()
            for name, buffer in self.named_buffers()
            if self.owners.buffers.get(name, self.stage) == self.stage
        }
        every: list[dict[str, torch.Tensor | None]] = [{} for _ in range(groups.mesh.num_stages)]
        dist.all_gather_object(every, own, group=groups.pipeline)
        for name, stage in self.owners.buffers.items():
            if stage == self.stage or name not in every[stage]:
                continue
            path, _, leaf = name.rpartition(".")
            self.module.get_submodule(path)._buffers[leaf] = every[stage][name]

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """List all buffers, under each of their names; ``None`` where one is registered as such."""
        for prefix, child in self.module.named_modules(remove_duplicate=False):
            for name, buffer in child._buffers.items():
                yield f"{prefix}.{name}" if prefix else name, buffer

    def move_to(self, device: torch.device) -> None:
        """Move what this stage owns to its device."""
        for parameter in self.module.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)

    def local(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage owns, by canonical name."""
        mine = set(self.owners.of_stage(self.stage))
        return {n: p for n, p in self.module.named_parameters() if n in mine}

    def counted(self) -> set[int]:
        """``id`` of the parameters of which this stage is the first owner."""
        owners = self.owners.parameters
        return {id(p) for name, p in self.local().items() if owners[name][0] == self.stage}

    def shared_groups(self, groups: MeshGroups) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        """The parameters that this stage shares with others, by the owners' group."""
        shared = self.owners.shared()
        mine = {stages: names for stages, names in shared.items() if self.stage in stages}
        parameters = dict(self.module.named_parameters()) if mine else {}
        return {
            groups.shared[stages]: [parameters[name] for name in names]
            for stages, names in mine.items()
        }

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Put ``parameter`` in every place of the module tree that shares ``name``."""
        for alias in self.table.aliases[name]:
            path, _, leaf = alias.rpartition(".")
            self.module.get_submodule(path)._parameters[leaf] = parameter


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
