"""When Python's garbage collector ran."""

import gc
from collections.abc import Sequence
from time import perf_counter

__all__ = ["GarbageClock", "overlap_s"]

Span = tuple[float, float]


class GarbageClock:
    """Notes start and end of each collection, on whatever thread it runs."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._started_s = 0.0

    def _mark(self, phase: str, info: dict[str, int]) -> None:  # noqa: ARG002 -- Python's signature
        if phase == "start":
            self._started_s = perf_counter()
        else:
            self._spans.append((self._started_s, perf_counter()))

    def start(self) -> None:
        """Listen to the collector."""
        self.stop()
        gc.callbacks.append(self._mark)

    def stop(self) -> None:
        """Listen no more."""
        if self._mark in gc.callbacks:
            gc.callbacks.remove(self._mark)
        self._spans = []

    def take(self) -> list[Span]:
        """Return the collections since the last call, in ``perf_counter`` seconds."""
        spans, self._spans = self._spans, []
        return spans


def overlap_s(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Return how many seconds of ``spans`` lie between start and end.

    Example:
        >>> overlap_s([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.5)
        1.5
    """
    return sum(max(0.0, min(end_s, b) - max(start_s, a)) for a, b in spans)
