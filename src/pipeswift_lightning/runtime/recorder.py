"""Record what this rank does, as the same `Timeline` that the simulator predicts."""

from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline

__all__ = ["Recorder"]


class Recorder:
    """Collects events of one step; times are ``time.perf_counter`` seconds.

    On a GPU, kernels run after the host has moved on, so host times understate compute; the
    monitors that need device times record CUDA events instead.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._added: list[tuple[EventKind, int, int | None, float, float]] = []
        self._events: list[Event] = []

    def begin(self) -> None:
        """Start a step: forget the events of the one before."""
        self._added = []
        self._events = []

    def add(
        self, kind: EventKind, stage: int, micro_batch: int | None, start_s: float, end_s: float
    ) -> None:
        """Add one event; cheap, since it runs for every instruction."""
        self._added.append((kind, stage, micro_batch, start_s, end_s))

    def events(self) -> tuple[Event, ...]:
        """The events so far."""
        # Several ask for them in a step, and to make an Event takes longer than to note it.
        self._events += [
            Event(self.rank, stage, micro_batch, kind, start_s, end_s)
            for kind, stage, micro_batch, start_s, end_s in self._added[len(self._events) :]
        ]
        return tuple(self._events)

    def timeline(self, num_ranks: int) -> Timeline:
        """This rank's events as a timeline of ``num_ranks`` ranks."""
        return Timeline(events=self.events(), num_ranks=num_ranks)
