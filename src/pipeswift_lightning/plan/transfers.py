"""The messages between stages, read off a timeline."""

from dataclasses import dataclass

from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline

__all__ = ["Transfer", "transfers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one stage computed and its neighbour used.

    Attributes:
        made: The computation whose result was sent.
        used: The computation that needed it.
        transit_s: How long the receiver waited once the result was there to be sent, in seconds;
            None if it was not waiting by then, since then nobody knows when the message came.
    """

    made: Event
    used: Event
    transit_s: float | None

    @property
    def is_gradient(self) -> bool:
        """Whether it went back rather than forth."""
        return self.used.kind is EventKind.BACKWARD


def transfers(timeline: Timeline) -> tuple[Transfer, ...]:
    """Return the messages of one step, in the order of the events that used them.

    Example:
        >>> forward, wait = EventKind.FORWARD, EventKind.RECEIVE_WAIT
        >>> made, used = Event(0, 0, 0, forward, 0.0, 1.0), Event(1, 1, 0, forward, 1.5, 2.5)
        >>> waited = Event(1, 1, 0, wait, 0.25, 1.5)
        >>> [t.transit_s for t in transfers(Timeline((made, waited, used), 2))]
        [0.5]
    """
    computed = {(e.kind, e.stage, e.micro_batch): e for e in timeline.events if e.is_compute}
    waits = _waits(timeline)
    found = []
    for (kind, stage, micro_batch), used in computed.items():
        neighbour = stage - 1 if kind is EventKind.FORWARD else stage + 1
        made = computed.get((kind, neighbour, micro_batch))
        if made is None:
            continue
        wait = waits.get((kind, stage, micro_batch))
        there = wait is not None and wait.start_s <= made.end_s
        transit_s = max(0.0, wait.end_s - made.end_s) if wait is not None and there else None
        found.append(Transfer(made=made, used=used, transit_s=transit_s))
    return tuple(found)


def _waits(timeline: Timeline) -> dict[tuple[EventKind, int, int | None], Event]:
    """Return the wait before each computation: the last of its stage and micro-batch."""
    waits: dict[tuple[EventKind, int, int | None], Event] = {}
    pending: dict[tuple[int, int | None], Event] = {}
    for event in sorted(timeline.events, key=lambda e: (e.start_s, e.end_s)):
        key = event.stage, event.micro_batch
        if event.kind is EventKind.RECEIVE_WAIT:
            pending[key] = event
        elif event.is_compute and key in pending:
            waits[(event.kind, *key)] = pending.pop(key)
    return waits
