"""How long the training loop waits for its next batch."""

from time import perf_counter
from typing import Any

from pipeswift_lightning.strategies.action_listener import ActionListener

__all__ = ["DataWait"]

_FETCH = "train_dataloader_next"


class DataWait:
    """Notes when Lightning fetches a training batch.

    No hook of a callback or a strategy encloses the fetch: between two batches there are also
    validation, checkpoints and other callbacks.
    """

    def __init__(self) -> None:
        self._listener = ActionListener(self._start, self._stop)
        self._started_s = 0.0
        self._waits: list[tuple[float, float]] = []

    def install(self, profiler: Any) -> None:
        """Listen to a Trainer's profiler, whichever it is."""
        self._waits = []
        self._listener.install(profiler)

    def _start(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._started_s = perf_counter()

    def _stop(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._waits.append((self._started_s, perf_counter()))

    def take(self) -> list[tuple[float, float]]:
        """Return start and end of the waits since the last call, in ``perf_counter`` seconds."""
        waits, self._waits = self._waits, []
        return waits

    def remove(self) -> None:
        """Leave the profiler as it was."""
        self._listener.remove()
        self._waits = []
