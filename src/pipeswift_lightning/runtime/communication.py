"""Tell errors of communication from errors of computation."""

from types import TracebackType

from pipeswift_lightning.runtime.agreement import DisagreementError
from pipeswift_lightning.runtime.messages import MessageError

__all__ = ["CommunicationError", "communicating"]


class CommunicationError(RuntimeError):
    """A transfer failed, most often since the peer has gone.

    Attributes:
        peer: The pipeline position at the other end; ``None`` for a collective.
    """

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


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
