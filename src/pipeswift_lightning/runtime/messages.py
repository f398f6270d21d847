"""Messages: nested structures of tensors over a `Transport`, described once, then sent bare."""

import pickle
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeswift_lightning.runtime.transport import Transport, Work

__all__ = ["Channel", "InFlight", "Layout", "MessageError", "Pending", "TensorSpec"]

_MAX_LAYOUTS = 1 << 16


class MessageError(RuntimeError):
    """A message does not look as its receiver was told it would."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Allocate it. Always fresh: autograd may still hold the buffer received before."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a message: a pytree whose tensor leaves are `TensorSpec`.

    Leaves that are not tensors (``None``, numbers, strings) travel in the layout, so they must be
    the same each time.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> tuple["Layout", list[Tensor]]:
        """Return the layout of ``value`` and its tensors."""
        leaves, spec = tree_flatten(value)
        described = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(spec, described), [x for x in leaves if isinstance(x, Tensor)]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors, in order."""
        return tuple(x for x in self.leaves if isinstance(x, TensorSpec))

    @property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """The tensors whose gradient travels back."""
        return tuple(x for x in self.tensors if x.requires_grad)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Put ``tensors`` in the places of the specs."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, TensorSpec) else x for x in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def describe(self) -> str:
        """Say it in words, for errors."""
        parts = [
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" + ("*" * x.requires_grad)
            if isinstance(x, TensorSpec)
            else repr(x)
            for x in self.leaves
        ]
        return "(" + ", ".join(parts) + ")"


class InFlight:
    """A message being sent; it keeps the tensors alive until they have left."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, works: list[Work], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        """Return once the tensors may be changed or freed."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._tensors.clear()


class Pending:
    """A message that is awaited from ``source``."""

    __slots__ = ("is_gradient", "key", "layout", "source", "tensors", "works")

    def __init__(self, source: int, key: Hashable, *, is_gradient: bool) -> None:
        self.source = source
        self.key = key
        self.is_gradient = is_gradient
        self.layout: Layout | None = None
        self.tensors: list[Tensor] = []
        self.works: list[Work] | None = None


class Channel:
    """Sends and receives activations and gradients over a transport.

    The layout of an activation is sent the first time its key is seen on an edge. A key names what
    determines the layout (the kind of step and the micro-batch's shapes), so a known key needs no
    header, and the gradient of an activation never does.

    Args:
        transport: Moves the bytes.
        dynamic_shapes: Send the layout every time, for networks whose activation shapes depend on
            the data itself.
    """

    def __init__(self, transport: Transport, *, dynamic_shapes: bool = False) -> None:
        self.transport = transport
        self.dynamic_shapes = dynamic_shapes
        self._sent: dict[tuple[int, Hashable], Layout] = {}
        self._received: dict[tuple[int, Hashable], Layout] = {}
        self._unposted: defaultdict[int, deque[Pending]] = defaultdict(deque)

    def begin(self) -> None:
        """Start a step: forget what may change from step to step."""
        if self.dynamic_shapes or len(self._sent) > _MAX_LAYOUTS:
            self._sent.clear()
        if self.dynamic_shapes or len(self._received) > _MAX_LAYOUTS:
            self._received.clear()

    def send_activation(self, destination: int, key: Hashable, value: Any) -> InFlight:
        """Start sending ``value``, with its layout if ``key`` is new.

        Raises:
            MessageError: ``key`` is known, and ``value`` has another layout than then.
        """
        layout, tensors = Layout.of(value)
        known = self._sent.get((destination, key))
        works: list[Work] = []
        held: list[Tensor] = []
        if known is None:
            self._sent[destination, key] = layout
            self._send_header(destination, layout, works, held)
        elif known != layout:
            msg = (
                f"the activation for position {destination} is {layout.describe()}, but the "
                f"first micro-batch of the same shapes gave {known.describe()}. Rule: equal "
                "micro-batch shapes give equal activation shapes. Remedy: "
                "PipeSwiftStrategy(dynamic_shapes=True)"
            )
            raise MessageError(msg)
        self._send_tensors(destination, tensors, works, held)
        self._advance(destination)
        return InFlight(works, held)

    def send_gradient(self, destination: int, gradients: list[Tensor]) -> InFlight:
        """Start sending the gradients of an activation, in the order of its tensors."""
        works: list[Work] = []
        held: list[Tensor] = []
        self._send_tensors(destination, gradients, works, held)
        return InFlight(works, held)

    def post(self, source: int, key: Hashable, *, is_gradient: bool) -> Pending:
        """Announce the next message from ``source``; its receive starts as soon as it can."""
        pending = Pending(source, key, is_gradient=is_gradient)
        self._unposted[source].append(pending)
        self._advance(source)
        return pending

    def wait(self, pending: Pending) -> Any:
        """Return the message: a structure of tensors, or the list of gradients."""
        queue = self._unposted[pending.source]
        while pending.works is None:
            head = queue.popleft()
            layout = self._layout(head)
            if layout is None:
                layout = self._receive_header(head)
            self._start(head, layout)
        for work in pending.works:
            work.wait()
        assert pending.layout is not None
        tensors, pending.tensors = pending.tensors, []
        if not pending.is_gradient:
            for tensor, spec in zip(tensors, pending.layout.tensors, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        self._advance(pending.source)
        return tensors if pending.is_gradient else pending.layout.fill(tensors)

    def _layout(self, pending: Pending) -> Layout | None:
        table = self._sent if pending.is_gradient else self._received
        return table.get((pending.source, pending.key))

    def _advance(self, source: int) -> None:
        """Post the receives whose layout is known, in order and no further."""
        queue = self._unposted[source]
        while queue:
            layout = self._layout(queue[0])
            if layout is None:
                return
            self._start(queue.popleft(), layout)

    def _start(self, pending: Pending, layout: Layout) -> None:
        pending.layout = layout
        pending.works = []
        for spec in layout.gradients if pending.is_gradient else layout.tensors:
            tensor = spec.empty(self.transport.device)
            pending.tensors.append(tensor)
            if tensor.numel():
                pending.works.append(self.transport.receive(_bytes(tensor), pending.source))

    def _send_tensors(
        self, destination: int, tensors: list[Tensor], works: list[Work], held: list[Tensor]
    ) -> None:
        for tensor in tensors:
            if tensor.numel():
                data = _bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
                held.append(data)
                works.append(self.transport.send(data, destination))

    def _send_header(
        self, destination: int, layout: Layout, works: list[Work], held: list[Tensor]
    ) -> None:
        raw = pickle.dumps(layout)
        device = self.transport.device
        body = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
        size = _bytes(torch.tensor([len(raw)], dtype=torch.int64, device=device))
        for part in (size, body):
            held.append(part)
            works.append(self.transport.send(part, destination))

    def _receive_header(self, pending: Pending) -> Layout:
        if pending.is_gradient:
            msg = f"the gradient {pending.key} is awaited before its activation was sent"
            raise MessageError(msg)
        device = self.transport.device
        size = torch.empty(1, dtype=torch.int64, device=device)
        self.transport.receive(_bytes(size), pending.source).wait()
        body = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        self.transport.receive(body, pending.source).wait()
        layout = pickle.loads(body.cpu().numpy().tobytes())  # from our own peer
        if not isinstance(layout, Layout):
            msg = f"position {pending.source} sent {type(layout).__name__} where a layout is due"
            raise MessageError(msg)
        self._received[pending.source, pending.key] = layout
        return layout


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as bytes: every backend can move those."""
    return tensor.reshape(-1).view(torch.uint8)
