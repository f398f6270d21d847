"""Record what this rank does, as the same `Timeline` that the simulator predicts."""

from time import perf_counter

import torch

from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline
from pipeswift_lightning.runtime.device_clock import DeviceClock, Instant

__all__ = ["Recorder", "StepRecord"]


class StepRecord:
    """What was noted of one step; it stays as it is when the next one begins.

    Args:
        rank: The rank.
        clock: Turns instants into seconds; ``None`` where they are seconds already.
    """

    def __init__(self, rank: int, clock: DeviceClock | None) -> None:
        self._rank = rank
        self._clock = clock
        self._added: list[tuple[EventKind, int, int | None, Instant, Instant]] = []
        self._events: list[Event] = []

    def add(
        self, kind: EventKind, stage: int, micro_batch: int | None, start: Instant, end: Instant
    ) -> None:
        """Add one event; cheap, since it runs for every instruction."""
        self._added.append((kind, stage, micro_batch, start, end))

    def events(self) -> tuple[Event, ...]:
        """The events so far; on a GPU, this waits until the last of them is over."""
        # Several ask for them in a step, and to make an Event takes longer than to note it.
        self._events += [
            Event(self._rank, stage, micro_batch, kind, self._seconds(start), self._seconds(end))
            for kind, stage, micro_batch, start, end in self._added[len(self._events) :]
        ]
        return tuple(self._events)

    def computed(self) -> tuple[float, float, float] | None:
        """When computation began and ended, and its sum, in seconds; None if there was none.

        On a GPU, this waits until its last part is over.
        """
        spans = [(start, end) for kind, _, _, start, end in self._added if kind.is_compute]
        if not spans:
            return None
        last_s = self._seconds(spans[-1][1])
        return self._seconds(spans[0][0]), last_s, sum(_between_s(*span) for span in spans)

    def _seconds(self, instant: Instant) -> float:
        if isinstance(instant, float):
            return instant
        assert self._clock is not None
        return self._clock.seconds(instant)


def _between_s(start: Instant, end: Instant) -> float:
    """Return the seconds from one instant to another; both are over."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return 1e-3 * start.elapsed_time(end)  # exact, however long ago it was


class Recorder:
    """Collects events of one step; times are ``time.perf_counter`` seconds.

    On a GPU, kernels run after the host has moved on. There instants are CUDA events on the current
    stream, and become seconds of the host's clock when the events are asked for.

    Args:
        rank: The rank.
        device: Where it computes; ``None`` means the host.
        clock: Instead of the device's own, for tests.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device | None = None,
        *,
        clock: DeviceClock | None = None,
    ) -> None:
        self.rank = rank
        if clock is None and device is not None and device.type == "cuda":
            clock = DeviceClock()
        self._clock = clock
        self.step = StepRecord(rank, clock)

    def begin(self) -> None:
        """Start a step: forget the events of the one before."""
        if self._clock is not None:
            self._clock.begin()
        self.step = StepRecord(self.rank, self._clock)

    def now(self) -> Instant:
        """Return this instant, on the clock that the rank's computation is on."""
        return perf_counter() if self._clock is None else self._clock.now()

    def add(
        self, kind: EventKind, stage: int, micro_batch: int | None, start: Instant, end: Instant
    ) -> None:
        """Add one event, from and to what `now` returned, or seconds of the host's clock."""
        self.step.add(kind, stage, micro_batch, start, end)

    def events(self) -> tuple[Event, ...]:
        """The events so far."""
        return self.step.events()

    def timeline(self, num_ranks: int) -> Timeline:
        """This rank's events as a timeline of ``num_ranks`` ranks."""
        return Timeline(events=self.events(), num_ranks=num_ranks)
