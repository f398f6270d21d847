"""Messages: nested structures of tensors over a `Transport`, described once, then sent bare."""

import pickle
import warnings
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeswift_lightning.runtime.arrival import Arrival
from pipeswift_lightning.runtime.transport import Transport, Work

__all__ = ["Channel", "InFlight", "Layout", "MessageError", "Pending", "TensorSpec", "tensors_of"]

_MAX_LAYOUTS = 1 << 16


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a structure, in order.

    Nearly every message is a tuple of tensors. It is told apart here and in `Layout`, since a pass
    of pytrees takes longer (8 us) than the rest of a message's way.
    """
    if _is_plain(value):
        return list(value)
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def _is_plain(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(x, Tensor) for x in value)


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

    def fits(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is as described."""
        return (
            isinstance(tensor, Tensor)
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
        )

    def empty(self, device: torch.device) -> Tensor:
        """Allocate it. Always fresh: autograd may still hold the buffer received before."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a message: a pytree whose tensor leaves are `TensorSpec`.

    Leaves that are not tensors (``None``, numbers, strings) travel in the layout, so they must be
    the same each time.

    Attributes:
        spec: The structure; ``None`` for a tuple of tensors.
        leaves: Its leaves, in order.
        tensors: The tensors among them.
        gradients: The tensors whose gradient travels back.
    """

    spec: TreeSpec | None
    leaves: tuple[Any, ...]
    tensors: tuple[TensorSpec, ...] = field(init=False, compare=False)
    gradients: tuple[TensorSpec, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tensors = tuple(x for x in self.leaves if isinstance(x, TensorSpec))
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "gradients", tuple(x for x in tensors if x.requires_grad))

    @classmethod
    def of(cls, value: Any) -> tuple["Layout", list[Tensor]]:
        """Return the layout of ``value`` and its tensors."""
        if _is_plain(value):
            return cls(None, tuple(TensorSpec.of(x) for x in value)), list(value)
        leaves, spec = tree_flatten(value)
        described = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(spec, described), [x for x in leaves if isinstance(x, Tensor)]

    def match(self, value: Any) -> list[Tensor] | None:
        """Return the tensors of ``value``; ``None`` if its layout is another."""
        if self.spec is not None:
            layout, tensors = Layout.of(value)
            return tensors if layout == self else None
        if type(value) is not tuple or len(value) != len(self.tensors):
            return None
        for tensor, spec in zip(value, self.tensors, strict=True):
            if not spec.fits(tensor):
                return None
        return list(value)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Put ``tensors`` in the places of the specs."""
        if self.spec is None:
            return tuple(tensors)
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

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._tensors: list[Tensor] = []

    def add(self, work: Work, tensor: Tensor) -> None:
        """Hold ``tensor`` until ``work`` is done."""
        self._works.append(work)
        self._tensors.append(tensor)

    def wait(self) -> None:
        """Return once the tensors may be changed or freed."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._tensors.clear()


class Pending:
    """A message that is awaited from ``source``.

    Attributes:
        arrivals: Once it is there, the tensors whose gradient goes back.
    """

    __slots__ = ("arrivals", "is_gradient", "key", "layout", "source", "tensors", "works")

    def __init__(self, source: int, key: Hashable, *, is_gradient: bool) -> None:
        self.source = source
        self.key = key
        self.is_gradient = is_gradient
        self.layout: Layout | None = None
        self.tensors: list[Tensor] = []
        self.works: list[Work] | None = None
        self.arrivals: list[Arrival] = []


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

    def forget(self) -> None:
        """Forget how messages look: from now on other layers send them."""
        self._sent.clear()
        self._received.clear()

    def close(self) -> None:
        """Let go of the connections: each is open for as long as anything refers to it."""
        self._unposted.clear()
        self.transport.close()

    def send_activation(self, destination: int, key: Hashable, value: Any) -> InFlight:
        """Start sending ``value``, with its layout if ``key`` is new.

        Raises:
            MessageError: ``key`` is known, and ``value`` has another layout than then.
        """
        flight = InFlight()
        known = self._sent.get((destination, key))
        tensors: list[Tensor] | None
        if known is None:
            layout, tensors = Layout.of(value)
            self._sent[destination, key] = layout
            self._send_header(destination, layout, flight)
        else:
            tensors = known.match(value)
            if tensors is None:
                msg = (
                    f"the activation for position {destination} is "
                    f"{Layout.of(value)[0].describe()}, but the first micro-batch of the same "
                    f"shapes gave {known.describe()}. Rule: equal micro-batch shapes give equal "
                    "activation shapes. Remedy: PipeSwiftStrategy(dynamic_shapes=True)"
                )
                raise MessageError(msg)
        self._send_tensors(destination, tensors, flight)
        self._advance(destination)
        return flight

    def send_gradient(self, destination: int, gradients: list[Tensor]) -> InFlight:
        """Start sending the gradients of an activation, in the order of its tensors."""
        flight = InFlight()
        self._send_tensors(destination, gradients, flight)
        return flight

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
        pending.works = []  # they hold the connection
        if queue:
            self._advance(pending.source)
        assert pending.layout is not None
        tensors, pending.tensors = pending.tensors, []
        if pending.is_gradient:
            return tensors
        for i, spec in enumerate(pending.layout.tensors):
            if spec.requires_grad:
                arrival = Arrival(tensors[i])
                pending.arrivals.append(arrival)
                tensors[i] = arrival.tensor
        return pending.layout.fill(tensors)

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
        works = pending.works = []
        transport, source = self.transport, pending.source
        for spec in layout.gradients if pending.is_gradient else layout.tensors:
            tensor = spec.empty(transport.device)
            pending.tensors.append(tensor)
            if tensor.numel():
                works.append(transport.receive(tensor, source))

    def _send_tensors(self, destination: int, tensors: Sequence[Tensor], flight: InFlight) -> None:
        for tensor in tensors:
            if tensor.numel():
                data = _as_sent(tensor)
                flight.add(self.transport.send(data, destination), data)

    def _send_header(self, destination: int, layout: Layout, flight: InFlight) -> None:
        raw = pickle.dumps(layout)
        device = self.transport.device
        body = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
        size = torch.tensor([len(raw)], dtype=torch.int64, device=device)
        for part in (size, body):
            flight.add(self.transport.send(part, destination), part)

    def _receive_header(self, pending: Pending) -> Layout:
        if pending.is_gradient:
            msg = f"the gradient {pending.key} is awaited before its activation was sent"
            raise MessageError(msg)
        device = self.transport.device
        size = torch.empty(1, dtype=torch.int64, device=device)
        self.transport.receive(size, pending.source).wait()
        body = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        self.transport.receive(body, pending.source).wait()
        with warnings.catch_warnings():  # torch warns when it meets its own LeafSpec
            warnings.simplefilter("ignore", FutureWarning)
            layout = pickle.loads(body.cpu().numpy().tobytes())  # from our own peer
        if not isinstance(layout, Layout):
            msg = f"position {pending.source} sent {type(layout).__name__} where a layout is due"
            raise MessageError(msg)
        self._received[pending.source, pending.key] = layout
        return layout


def _as_sent(tensor: Tensor) -> Tensor:
    """Return the values alone, without their graph, laid out in memory as they read."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()
