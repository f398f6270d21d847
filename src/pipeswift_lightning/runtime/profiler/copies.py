"""Stand-ins for parameters and buffers, so that measuring changes neither them nor gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["StandIns"]

_STD = 0.02  # Of parameters that exist by shape only: their values decide nothing.


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in a module that holds a parameter or a buffer."""

    owner: nn.Module
    name: str
    original: Tensor

    def put(self, tensor: Tensor) -> None:
        # Not into the module's dict: recurrent layers keep their parameters in a list as well.
        setattr(self.owner, self.name, tensor)


@dataclass(slots=True)
class StandIns:
    """Puts stand-ins in the place of the parameters and buffers of some modules, for a while.

    A parameter that is on the device already lends its data; one that is elsewhere is copied, and
    one on the meta device is drawn at random. Buffers are always copied, since forwards change
    them. Gradients go to the stand-ins, where zeros wait for them: but for the first micro-batch
    of a step, gradients are added to others.

    Args:
        modules: Whose own parameters and buffers are meant, not those of their children.
        device: Where the stand-ins are.
        absent: ``id`` of the parameters that are to be on the meta device.
        keep: Whether stand-ins stay in memory for the next time.
    """

    modules: Sequence[nn.Module]
    device: torch.device
    absent: frozenset[int] = frozenset()
    keep: bool = True
    _kept: dict[int, Tensor] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the stand-ins take the places; afterwards all is as it was."""
        slots = list(_slots(self.modules))
        try:
            for slot in slots:
                slot.put(self._stand_in(slot.original))
            yield
        finally:
            for slot in slots:
                slot.put(slot.original)
            if not self.keep:
                self._kept.clear()
                self._storages.clear()

    def hold(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a stand-in."""
        return tensor.untyped_storage()._cdata in self._storages

    def _stand_in(self, original: Tensor) -> Tensor:
        found = self._kept.get(id(original))
        if found is None:
            found = self._kept[id(original)] = self._make(original)
            self._storages.add(found.untyped_storage()._cdata)
        return found

    def _make(self, original: Tensor) -> Tensor:
        if not isinstance(original, nn.Parameter):
            return _present(original, self.device, copy=True)
        if id(original) in self.absent:
            data = torch.empty_like(original, device="meta")
            return nn.Parameter(data, requires_grad=original.requires_grad)
        data = _present(original, self.device, copy=False)
        parameter = nn.Parameter(data, requires_grad=original.requires_grad)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
        return parameter


def _slots(modules: Iterable[nn.Module]) -> Iterator[_Slot]:
    for module in modules:
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    yield _Slot(module, name, tensor)


def _present(tensor: Tensor, device: torch.device, *, copy: bool) -> Tensor:
    tensor = tensor.detach()
    if not tensor.is_meta or device.type == "meta":
        return tensor.to(device, copy=copy)
    made = torch.empty_like(tensor, device=device)
    return made.normal_(std=_STD) if made.is_floating_point() else made.zero_()
