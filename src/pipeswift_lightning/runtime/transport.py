"""How bytes move between the stages of one pipeline."""

import threading
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeswift_lightning.runtime.mesh import MeshGroups

__all__ = ["C10dTransport", "LoopbackHub", "LoopbackTransport", "Transport", "Work"]


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return once the tensor may be used (received) or reused (sent)."""
        ...


class Transport(Protocol):
    """Ordered, reliable channels, one a directed edge between pipeline positions.

    Messages match by their order on the edge: there are no tags (NCCL has none). ``send`` does not
    block; the tensor must not change before its work is waited for.
    """

    position: int
    device: torch.device

    def send(self, tensor: Tensor, destination: int) -> Work:
        """Start sending a contiguous tensor of any dtype to the rank at ``destination``."""
        ...

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Start receiving into a contiguous tensor of exactly the bytes that are sent."""
        ...

    def close(self) -> None:
        """Let go of the connections."""
        ...


class C10dTransport:
    """`torch.distributed` point-to-point, gloo or NCCL, one process group a directed edge.

    On NCCL ``wait`` orders streams rather than stopping the host, so the executor never
    synchronises in the steady state; buffers are allocated on the consuming stream.
    """

    def __init__(self, groups: MeshGroups, device: torch.device) -> None:
        self.position = groups.coordinate.stage
        self.device = device
        # The backend itself: a group's send goes through torch's dispatcher, which takes as long
        # as the send. A pair's group holds two ranks in rank order, which is that of positions.
        self._to: dict[int, tuple[Any, int]] = {}
        self._from: dict[int, tuple[Any, int]] = {}
        for (source, destination), group in groups.edges.items():
            backend = group._get_backend(device)  # torch's stubs do not know its send and recv
            if source == self.position:
                self._to[destination] = backend, int(destination > source)
            else:
                self._from[source] = backend, int(source > destination)
        # gloo moves whatever lies in memory; NCCL knows a list of dtypes, bytes among them.
        self._as_is = device.type == "cpu"

    def send(self, tensor: Tensor, destination: int) -> Work:
        """Start sending ``tensor``."""
        backend, peer = self._to[destination]
        work: Work = backend.send([tensor if self._as_is else _as_bytes(tensor)], peer, 0)
        return work

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Start receiving into ``tensor``."""
        backend, peer = self._from[source]
        work: Work = backend.recv([tensor if self._as_is else _as_bytes(tensor)], peer, 0)
        return work

    def close(self) -> None:
        """Let go of the connections."""
        self._to.clear()
        self._from.clear()


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


class LoopbackHub:
    """Connects `LoopbackTransport` instances in one process (one thread a rank)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: defaultdict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def put(self, edge: tuple[int, int], tensor: Tensor) -> None:
        """Add a message to ``edge``."""
        with self._changed:
            self._sent[edge].append(_as_bytes(tensor).clone())
            self._changed.notify_all()

    def take(self, edge: tuple[int, int], index: int, timeout_s: float) -> Tensor:
        """Return message ``index`` of ``edge``, waiting until it is there.

        Raises:
            TimeoutError: It did not come within ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._sent[edge]) > index, timeout_s):
                msg = f"message {index} from position {edge[0]} to {edge[1]} did not arrive"
                raise TimeoutError(msg)
            return self._sent[edge][index]


class _Done:
    def wait(self) -> bool:
        return True


class _LoopbackReceive:
    def __init__(self, hub: LoopbackHub, edge: tuple[int, int], index: int, into: Tensor) -> None:
        self._hub, self._edge, self._index, self._into = hub, edge, index, into

    def wait(self) -> bool:
        message = self._hub.take(self._edge, self._index, timeout_s=20.0)
        into = _as_bytes(self._into)
        if message.numel() != into.numel():
            msg = f"{message.numel()} bytes were sent, {into.numel()} are expected"
            raise RuntimeError(msg)
        into.copy_(message)
        return True


class LoopbackTransport:
    """A transport within one process, for tests: ranks are threads.

    Stages that draw random numbers need real processes, since torch's generator is the process's.
    """

    def __init__(self, hub: LoopbackHub, position: int) -> None:
        self.position = position
        self.device = torch.device("cpu")
        self._hub = hub
        self._received: defaultdict[int, int] = defaultdict(int)

    def send(self, tensor: Tensor, destination: int) -> Work:
        """Deliver a copy of ``tensor`` at once."""
        self._hub.put((self.position, destination), tensor)
        return _Done()

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Reserve the next message from ``source``."""
        index = self._received[source]
        self._received[source] += 1
        return _LoopbackReceive(self._hub, (source, self.position), index, tensor)

    def close(self) -> None:
        """There are none."""
