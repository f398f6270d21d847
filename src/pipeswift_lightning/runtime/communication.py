"""Tell errors of communication from errors of computation."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from pipeswift_lightning.runtime.agreement import DisagreementError
from pipeswift_lightning.runtime.messages import MessageError
from pipeswift_lightning.runtime.progress import EVERYONE, Progress

__all__ = ["CommunicationError", "communicating", "in_collective", "is_communication_error"]

# Gloo raises a bare RuntimeError: only its text tells.
_BACKENDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL")


class CommunicationError(RuntimeError):
    """A transfer failed, most often since the peer has gone.

    Attributes:
        peer: The pipeline position at the other end; ``None`` for a collective.
    """

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


def is_communication_error(error: BaseException) -> bool:
    """Whether ``error`` says that a peer could not be reached, most often since it has gone."""
    if isinstance(error, CommunicationError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)


class communicating:  # noqa: N801 -- reads as a context; a generator would cost twice as much
    """Turn a backend's ``RuntimeError`` into a `CommunicationError` that says what was done."""

    __slots__ = ("_peer", "_what")

    def __init__(self, what: str, peer: int | None = None) -> None:
        self._what = what
        self._peer = peer

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DisagreementError | MessageError | CommunicationError):
            return
        if isinstance(error, RuntimeError | TimeoutError):
            msg = f"{self._what} failed: {error}"
            raise CommunicationError(msg, self._peer) from error


@contextmanager
def in_collective(what: str, progress: Progress) -> Iterator[None]:
    """Say that a collective is under way: to the watchdog, and in its error if it fails."""
    before = progress.doing
    progress.mark(what, waiting_for=EVERYONE)
    with communicating(what):
        yield
    # Only after success: a report on a failure must still find where it happened.
    progress.mark(before)
