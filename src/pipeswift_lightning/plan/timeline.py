"""Where the time of a step went. Simulator and executor both emit this type.

So the predicted and the measured bubble come from one function.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Event", "EventKind", "Timeline", "TimelineError"]


class TimelineError(ValueError):
    """Events that make no timeline."""


class EventKind(StrEnum):
    """What a rank did, or waited for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECEIVE_WAIT = "receive_wait"
    SEND_WAIT = "send_wait"
    GRADIENT_REDUCE = "gradient_reduce"
    OPTIMIZER = "optimizer"
    DATA_WAIT = "data_wait"

    @property
    def is_compute(self) -> bool:
        """Whether the rank computes forward or backward, rather than waits or updates."""
        return self is EventKind.FORWARD or self is EventKind.BACKWARD


_SYMBOLS = {
    EventKind.FORWARD: "=",
    EventKind.BACKWARD: "#",
    EventKind.RECEIVE_WAIT: ".",
    EventKind.SEND_WAIT: ">",
    EventKind.GRADIENT_REDUCE: "+",
    EventKind.OPTIMIZER: "o",
    EventKind.DATA_WAIT: "~",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One span of time on one rank.

    Args:
        rank: The rank.
        stage: The stage it worked or waited for.
        micro_batch: The micro-batch, or None where there is none, e.g. the optimizer.
        kind: What it was.
        start_s: Start in seconds, on a clock shared by all ranks.
        end_s: End in seconds, not before the start.

    Raises:
        TimelineError: The event ends before it starts.
    """

    rank: int
    stage: int
    micro_batch: int | None
    kind: EventKind
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            message = (
                f"{self.kind} on rank {self.rank} ends at {self.end_s} s before its start at "
                f"{self.start_s} s: use one monotonic clock for both"
            )
            raise TimelineError(message)

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s

    @property
    def is_compute(self) -> bool:
        """Whether the rank computed forward or backward, rather than waited or updated."""
        return self.kind.is_compute


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of all ranks.

    Busy means Forward and Backward; everything else between the first start and the last end of
    these is idle, be it a wait or nothing at all.

    Args:
        events: In any order. The simulator emits each rank's in order of time.
        num_ranks: Number of ranks, also those without an event.

    Raises:
        TimelineError: An event's rank is not in ``[0, num_ranks)``.

    Example:
        >>> first = Event(0, 0, 0, EventKind.FORWARD, 0.0, 1.0)
        >>> second = Event(1, 1, 0, EventKind.FORWARD, 1.0, 4.0)
        >>> timeline = Timeline((first, second), num_ranks=2)
        >>> timeline.makespan_s, timeline.bubble(0), timeline.bubble_ratio
        (4.0, 0.75, 0.5)
        >>> print(timeline.draw(width=16))
        rank 0 |F0==            | bubble  75.0 %
        rank 1 |    F0==========| bubble  25.0 %
    """

    events: tuple[Event, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        for event in self.events:
            if not 0 <= event.rank < self.num_ranks:
                message = (
                    f"event on rank {event.rank}, but num_ranks={self.num_ranks} allows "
                    f"0..{self.num_ranks - 1}: count the ranks of one pipeline from 0"
                )
                raise TimelineError(message)

    @property
    def start_s(self) -> float:
        """Start of the first computation, in seconds; 0 if there is none."""
        return min((e.start_s for e in self.events if e.is_compute), default=0.0)

    @property
    def end_s(self) -> float:
        """End of the last computation, in seconds; 0 if there is none."""
        return max((e.end_s for e in self.events if e.is_compute), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end of computation."""
        return self.end_s - self.start_s

    def busy_s(self, rank: int) -> float:
        """Return the seconds that ``rank`` computed."""
        return sum(e.duration_s for e in self.events if e.rank == rank and e.is_compute)

    def idle_s(self, rank: int) -> float:
        """Return the seconds of the makespan that ``rank`` did not compute."""
        return self.makespan_s - self.busy_s(rank)

    def bubble(self, rank: int) -> float:
        """Return the share of the makespan that ``rank`` did not compute; 0 without computation."""
        makespan_s = self.makespan_s
        return self.idle_s(rank) / makespan_s if makespan_s > 0 else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Mean bubble of the ranks."""
        return sum(map(self.bubble, range(self.num_ranks))) / max(1, self.num_ranks)

    @property
    def stage_busy_s(self) -> tuple[float, ...]:
        """Seconds each stage computed. Shape ``[num_stages]``."""
        busy = [0.0] * (1 + max((e.stage for e in self.events), default=-1))
        for event in self.events:
            if event.is_compute:
                busy[event.stage] += event.duration_s
        return tuple(busy)

    def critical_path(self) -> tuple[Event, ...]:
        """Return the chain of computations that set the makespan, in order of time.

        Walks back from the last to end: to the previous computation of the rank or to the one
        that produced the input, whichever ended last.
        """
        compute = sorted(
            (e for e in self.events if e.is_compute), key=lambda e: (e.start_s, e.end_s)
        )
        path: list[Event] = []
        candidates = compute
        while candidates:
            event = max(candidates, key=lambda e: e.end_s)
            path.append(event)
            # Only what comes before in the sorted list: so the walk ends, also on skewed clocks.
            compute = compute[: compute.index(event)]
            needed = self._needs(event)
            candidates = [
                e
                for e in compute
                if e.rank == event.rank or (e.kind, e.stage, e.micro_batch) == needed
            ]
        return tuple(reversed(path))

    def _needs(self, event: Event) -> tuple[EventKind, int, int | None]:
        if event.kind is EventKind.FORWARD:
            return EventKind.FORWARD, event.stage - 1, event.micro_batch
        if event.stage == max(e.stage for e in self.events):
            return EventKind.FORWARD, event.stage, event.micro_batch
        return EventKind.BACKWARD, event.stage + 1, event.micro_batch

    def shifted(self, offset_s: float) -> "Timeline":
        """Return the timeline moved by ``offset_s`` seconds, e.g. onto a shared clock."""
        return Timeline(
            tuple(
                replace(e, start_s=e.start_s + offset_s, end_s=e.end_s + offset_s)
                for e in self.events
            ),
            self.num_ranks,
        )

    @staticmethod
    def merge(timelines: Iterable["Timeline"]) -> "Timeline":
        """Return one timeline with the events of all, e.g. of those each rank recorded."""
        parts = tuple(timelines)
        events = tuple(event for part in parts for event in part.events)
        return Timeline(events, max((part.num_ranks for part in parts), default=0))

    def draw(self, *, width: int = 80) -> str:
        """Return a picture, one line a rank, ``width`` characters for the makespan.

        ``F0==`` is a Forward, ``B0##`` a Backward, ``.`` a wait for a message, ``>`` for a send,
        ``~`` for data; ``+`` reduces gradients, ``o`` is the optimizer, blank is nothing.
        """
        start_s, makespan_s = self.start_s, self.makespan_s

        def column(time_s: float) -> int:
            share = (time_s - start_s) / makespan_s if makespan_s > 0 else 0.0
            return round(min(max(share, 0.0), 1.0) * width)

        lines = []
        for rank in range(self.num_ranks):
            line = [" "] * width
            # Computation last, so that no wait hides it.
            for event in sorted(self.events, key=lambda e: e.is_compute):
                if event.rank == rank:
                    first, last = column(event.start_s), column(event.end_s)
                    line[first:last] = _cells(event, last - first)
            share = 100 * self.bubble(rank)
            lines.append(f"rank {rank} |{''.join(line)}| bubble {share:5.1f} %")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the timeline as JSON."""
        rows = [[e.rank, e.stage, e.micro_batch, e.kind, e.start_s, e.end_s] for e in self.events]
        return json.dumps({"num_ranks": self.num_ranks, "events": rows})

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Return the timeline that ``to_json`` wrote, equal to the last bit."""
        content = json.loads(text)
        events = tuple(
            Event(rank, stage, micro_batch, EventKind(kind), start_s, end_s)
            for rank, stage, micro_batch, kind, start_s, end_s in content["events"]
        )
        return cls(events, content["num_ranks"])


def _cells(event: Event, width: int) -> str:
    """Return the event in ``width`` characters: as much label as fits, then its symbol."""
    label = f"{event.kind.name[0]}{event.micro_batch}" if event.is_compute else ""
    fitting = label if len(label) <= width else label[: min(width, 1)]
    return fitting.ljust(width, _SYMBOLS[event.kind])
