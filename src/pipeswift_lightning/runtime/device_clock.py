"""Instants on a GPU's stream, as seconds of the host's clock."""

from collections.abc import Callable
from time import perf_counter
from typing import Protocol, cast

import torch

__all__ = ["DeviceClock", "DeviceInstant", "Instant"]


class DeviceInstant(Protocol):
    """What is used of a `torch.cuda.Event`."""

    def record(self) -> None:
        """Take the instant when the stream gets here."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has got here."""
        ...

    def elapsed_time(self, end_event: "DeviceInstant") -> float:
        """Return the milliseconds from this instant to that one; both are over."""
        ...


Instant = float | DeviceInstant


class DeviceClock:
    """Marks a stream, and says later when the marks were passed.

    Nothing waits for the device but `seconds`. CUDA gives time differences as 32-bit floats, so
    they are taken from the step's first mark, whose own time is carried from step to step; once,
    at the first step, the device is waited for, to set its clock by the host's.

    Args:
        make: Makes an instant: a CUDA event with timing.
    """

    def __init__(self, make: Callable[[], DeviceInstant] | None = None) -> None:
        self._make: Callable[[], DeviceInstant] = make or _cuda_event
        self._base: DeviceInstant | None = None
        self._base_s = 0.0
        self._next: DeviceInstant | None = None

    def now(self) -> DeviceInstant:
        """Mark the current stream."""
        instant = self._make()
        instant.record()
        return instant

    def begin(self) -> None:
        """Begin a step."""
        self._settle()
        mark = self.now()
        if self._base is None:
            mark.synchronize()
            self._base, self._base_s = mark, perf_counter()
        else:
            self._next = mark

    def seconds(self, instant: DeviceInstant) -> float:
        """Return the host's time of an instant; wait until it is over."""
        self._settle()
        if self._base is None:
            msg = "an instant before the first step has no time: call begin() first"
            raise RuntimeError(msg)
        instant.synchronize()
        return self._base_s + 1e-3 * self._base.elapsed_time(instant)

    def _settle(self) -> None:
        """Count from the last step's first mark, which is over by now or soon."""
        if self._next is not None and self._base is not None:
            self._next.synchronize()
            self._base_s += 1e-3 * self._base.elapsed_time(self._next)
            self._base, self._next = self._next, None


def _cuda_event() -> DeviceInstant:
    return cast("DeviceInstant", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
