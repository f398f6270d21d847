"""How long the training loop waits for its next batch."""

from time import perf_counter
from typing import Any

__all__ = ["DataWait"]

_FETCH = "train_dataloader_next"


class DataWait:
    """Notes when Lightning fetches a training batch, from the marks it makes for its profiler.

    No hook of a callback or a strategy encloses the fetch: between two batches there are also
    validation, checkpoints and other callbacks.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._started_s = 0.0
        self._waits: list[tuple[float, float]] = []

    def install(self, profiler: Any) -> None:
        """Listen to a Trainer's profiler, whichever it is."""
        self.remove()
        self._profiler = profiler
        start, stop = profiler.start, profiler.stop

        def noting_start(action_name: str) -> None:
            start(action_name)
            if action_name.endswith(_FETCH):
                self._started_s = perf_counter()

        def noting_stop(action_name: str) -> None:
            if action_name.endswith(_FETCH):
                self._waits.append((self._started_s, perf_counter()))
            stop(action_name)

        profiler.start, profiler.stop = noting_start, noting_stop

    def take(self) -> list[tuple[float, float]]:
        """Return start and end of the waits since the last call, in ``perf_counter`` seconds."""
        waits, self._waits = self._waits, []
        return waits

    def remove(self) -> None:
        """Leave the profiler as it was."""
        if self._profiler is not None:
            for name in ("start", "stop"):
                self._profiler.__dict__.pop(name, None)
        self._profiler = None
        self._waits = []
