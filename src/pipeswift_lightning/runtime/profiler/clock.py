"""Clocks for work that may still be under way on a device when the next line runs."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "clock_for"]


class Clock(Protocol):
    """Takes marks between pieces of work; the seconds between them are read afterwards."""

    def mark(self) -> Any:
        """Return a mark after the work given so far."""
        ...

    def finish(self) -> None:
        """Return once all work given so far is done."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks; only after `finish`."""
        ...


class _HostClock:
    """For work that is done when its call returns."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def mark(self) -> float:
        return self._read()

    def finish(self) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    """Events in the stream: the device is never waited for between two layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


class _WaitingClock:
    """For any other accelerator: each mark waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> float:
        self.finish()
        return time.perf_counter()

    def finish(self) -> None:
        torch.accelerator.synchronize(self._device)

    def seconds(self, start: float, end: float) -> float:
        return end - start


def clock_for(device: torch.device, *, processor_time: bool = False) -> Clock:
    """Return the clock of a device.

    Args:
        device: Where the work is done.
        processor_time: On a CPU, whether to count this process's processor time instead of what
            passes on the wall.

    Example:
        >>> clock = clock_for(torch.device("cpu"))
        >>> start, end = clock.mark(), clock.mark()
        >>> clock.seconds(start, end) >= 0
        True
    """
    if device.type in ("cpu", "meta"):
        return _HostClock(time.process_time if processor_time else time.perf_counter)
    return _CudaClock(device) if device.type == "cuda" else _WaitingClock(device)
