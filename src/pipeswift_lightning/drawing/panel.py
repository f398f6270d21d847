"""What all pictures have in common: named timelines, colours, labels."""

from dataclasses import dataclass

from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline

__all__ = ["COLORS", "COMPUTE", "NAMES", "Panel", "label"]

# Okabe and Ito's colours, which most colour-blind people tell apart; waits are grey.
COLORS = {
    EventKind.FORWARD: "#56b4e9",
    EventKind.BACKWARD: "#e69f00",
    EventKind.RECEIVE_WAIT: "#e4e4e4",
    EventKind.SEND_WAIT: "#a6a6a6",
    EventKind.GRADIENT_REDUCE: "#cc79a7",
    EventKind.OPTIMIZER: "#009e73",
    EventKind.DATA_WAIT: "#f0e442",
}
COMPUTE = (EventKind.FORWARD, EventKind.BACKWARD)
NAMES = {kind: kind.value.replace("_", " ") for kind in EventKind}


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a picture.

    Args:
        name: Stands above it: "measured", "predicted".
        timeline: One rank a row.
        samples: Of each micro-batch, where that is known.
        tokens: Of each micro-batch, where that is known.
    """

    name: str
    timeline: Timeline
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def events(self) -> tuple[Event, ...]:
        """Return the events with time 0 at the first computation, waits below computation."""
        moved = self.timeline.shifted(-self.timeline.start_s)
        return tuple(sorted(moved.events, key=lambda e: (e.is_compute, e.start_s)))

    def contents(self, event: Event) -> dict[str, int]:
        """Return what an event's micro-batch holds, as far as that is known.

        Example:
            >>> panel = Panel("measured", Timeline((), 1), samples=(2, 1), tokens=(9, 5))
            >>> panel.contents(Event(0, 0, 1, EventKind.FORWARD, 0.0, 1.0))
            {'samples': 1, 'tokens': 5}
        """
        number = event.micro_batch
        if number is None:
            return {}
        known = {"samples": self.samples, "tokens": self.tokens}
        return {name: values[number] for name, values in known.items() if values}

    @property
    def title(self) -> str:
        """Name, makespan and bubble."""
        makespan_ms = 1e3 * self.timeline.makespan_s
        return f"{self.name}: {makespan_ms:.1f} ms, bubble {self.timeline.bubble_ratio:.1%}"


def label(event: Event) -> str:
    """Return ``F3`` or ``B3``; nothing for what is no computation."""
    return f"{event.kind.name[0]}{event.micro_batch}" if event.is_compute else ""
