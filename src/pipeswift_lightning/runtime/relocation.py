"""Move parameters and buffers from stage to stage, with all that belongs to them.

Only what changes its owner travels, from an old owner to each new one, point to point; so no rank
ever holds more than its old and its new share. All ranks go through the same list of parcels in one
order, so that none waits for another that waits for it.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from pipeswift_lightning.runtime.communication import communicating
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.ownership import LocalShare, Owners
from pipeswift_lightning.runtime.progress import Progress

__all__ = ["Belongings", "Parcel", "Relocation", "parcels"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one stage gives to another.

    Attributes:
        source: The stage that has it.
        destination: The stage that gets it.
        parameters: Names of parameters.
        buffers: Names of buffers.
    """

    source: int
    destination: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def parcels(old: Owners, new: Owners) -> tuple[Parcel, ...]:
    """Return what has to travel, in the order in which every rank sends and receives it.

    A parameter comes from the nearest of its old owners.

    Example:
        >>> old = Owners({"a": (0,), "tied": (0, 2)}, {"mask": 0})
        >>> new = Owners({"a": (1,), "tied": (1, 2)}, {"mask": 0})
        >>> parcels(old, new)
        (Parcel(source=0, destination=1, parameters=('a', 'tied'), buffers=()),)
    """
    found: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for name, stages in new.parameters.items():
        had = old.parameters[name]
        for stage in sorted(set(stages) - set(had)):
            source = min((abs(s - stage), s) for s in had)[1]
            found.setdefault((source, stage), ([], []))[0].append(name)
    for name, source in old.buffers.items():
        stage = new.buffers.get(name, source)
        if source != stage:
            found.setdefault((source, stage), ([], []))[1].append(name)
    return tuple(
        Parcel(*pair, tuple(parameters), tuple(buffers))
        for pair, (parameters, buffers) in sorted(found.items())
    )


@dataclass(frozen=True, slots=True)
class Belongings:
    """What travels with a parameter.

    Attributes:
        data: Its values.
        gradient: Its gradient, if it has one that is dense.
        requires_grad: Whether it is trained now.
        more: Whatever else is known of it by name: its optimizers' state.
    """

    data: Tensor
    gradient: Tensor | None
    requires_grad: bool
    more: Any

    @classmethod
    def of(cls, parameter: nn.Parameter, more: Any) -> "Belongings":
        """Collect what a parameter has."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = None  # between steps nothing but the next zero_grad() looks at it
        return cls(parameter.detach(), gradient, parameter.requires_grad, more)


_Contents: TypeAlias = tuple[dict[str, Belongings], dict[str, Tensor | None]]


@dataclass(slots=True)
class Relocation:
    """Carries parcels out.

    Args:
        share: What this rank holds.
        groups: The mesh's groups.
        device: This stage's device.
        progress: Read by the watchdog.

    Attributes:
        sent_bytes: What this rank has sent.
    """

    share: LocalShare
    groups: MeshGroups
    device: torch.device
    progress: Progress
    sent_bytes: int = 0

    def run(self, new: Owners, pack: Callable[[str, nn.Parameter], Any]) -> Mapping[str, Any]:
        """Give the parameters and buffers to their new owners, and free them where they were.

        Collective over the pipeline.

        Args:
            new: The new owners.
            pack: Returns what else travels with a parameter: a structure of tensors and values.

        Returns:
            What came along with each parameter that has come.

        Raises:
            CommunicationError: A peer has gone.
        """
        share, stage = self.share, self.share.stage
        came: dict[str, Any] = {}
        for parcel in parcels(share.owners, new):
            if stage == parcel.source:
                self._send(parcel.destination, self._packed(parcel, pack))
            elif stage == parcel.destination:
                parameters, buffers = self._receive(parcel.source)
                for name, held in parameters.items():
                    parameter = share.take_over(name, held.data, requires_grad=held.requires_grad)
                    parameter.grad = held.gradient
                    came[name] = held.more
                for name, buffer in buffers.items():
                    share.set_buffer(name, buffer)
        share.owners = new
        share.give_up_foreign()
        return came

    def _packed(self, parcel: Parcel, pack: Callable[[str, nn.Parameter], Any]) -> _Contents:
        parameters = dict(self.share.module.named_parameters())
        buffers = dict(self.share.named_buffers())
        return (
            {n: Belongings.of(parameters[n], pack(n, parameters[n])) for n in parcel.parameters},
            {name: buffers[name] for name in parcel.buffers},
        )

    # -- over the wire ------------------------------------------------------------------------

    def _send(self, stage: int, contents: _Contents) -> None:
        raw, tensors = _written(contents)
        size = torch.tensor([len(raw)], dtype=torch.int64)
        with self._talking("sending layers to", stage):
            for tensor in (size, torch.frombuffer(raw, dtype=torch.uint8), *tensors):
                self._put(tensor, stage)

    def _put(self, tensor: Tensor, stage: int) -> None:
        if tensor.numel():
            flat = _in_memory(tensor).to(self.device)
            self.sent_bytes += flat.numel()
            dist.send(flat, group=self.groups.pipeline, group_dst=stage)

    def _receive(self, stage: int) -> _Contents:
        with self._talking("waiting for layers of", stage):
            size = self._get(torch.empty(1, dtype=torch.int64), stage)
            raw = self._get(torch.empty(int(size), dtype=torch.uint8), stage)
            contents, tensors = _read(raw.numpy().tobytes(), self.device)
            for tensor in tensors:
                self._get(tensor, stage)
        return contents

    def _get(self, tensor: Tensor, stage: int) -> Tensor:
        """Receive into ``tensor``; by way of the device if it is on the host."""
        if tensor.numel():
            flat = _in_memory(tensor)
            buffer = (
                flat if flat.device == self.device else torch.empty_like(flat, device=self.device)
            )
            dist.recv(buffer, group=self.groups.pipeline, group_src=stage)
            if buffer is not flat:
                flat.copy_(buffer)
        return tensor

    def _talking(self, what: str, stage: int) -> communicating:
        replica = self.groups.coordinate.replica
        peer = self.groups.mesh.rank(stage=stage, replica=replica)
        doing = f"{what} stage {stage}"
        self.progress.mark(doing, waiting_for=peer)
        return communicating(doing, stage)


class _Writer(pickle.Pickler):
    """Writes a structure with a description in the place of each tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        host = obj.device.type == "cpu"
        return place, tuple(obj.shape), _order(obj), obj.dtype, host


class _Reader(pickle.Unpickler):
    """Reads it, with an empty tensor in each place."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._device = device

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        place, shape, order, dtype, host = pid
        if place == len(self.tensors):
            sizes = [shape[d] for d in order]
            inverse = sorted(range(len(sizes)), key=order.__getitem__)
            where = torch.device("cpu") if host else self._device
            self.tensors.append(torch.empty(sizes, dtype=dtype, device=where).permute(inverse))
        found: Tensor = self.tensors[place]
        return found


def _written(contents: _Contents) -> tuple[bytearray, list[Tensor]]:
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(contents)
    return bytearray(file.getvalue()), writer.tensors


def _read(raw: bytes, device: torch.device) -> tuple[_Contents, list[Tensor]]:
    reader = _Reader(io.BytesIO(raw), device)
    contents: _Contents = reader.load()  # from our own peer
    return contents, reader.tensors


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims as they lie in memory, the outermost first; in order if there are gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    dense = tensor.permute(order).is_contiguous()
    return tuple(order) if dense else tuple(range(tensor.dim()))


def _in_memory(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in the order in which they lie in memory."""
    ordered: Tensor = tensor.detach().permute(_order(tensor)).resolve_conj().resolve_neg()
    return ordered.contiguous().reshape(-1).view(torch.uint8)
