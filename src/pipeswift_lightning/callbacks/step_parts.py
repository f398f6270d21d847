"""One step of one stage, part by part."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeswift_lightning.plan.timeline import Event, EventKind

__all__ = ["StepParts"]


@dataclass(slots=True)
class StepParts:
    """Seconds of one step on one stage. Sums of the stage's own: nothing is gathered.

    Attributes:
        step_s: From the wait for the batch to the end of the step.
        span_s: From the start of the first computation to the end of the last.
        computed_s: ``(kind, micro-batch)`` to the seconds of that Forward or Backward.
        compute_s: Their sum.
        activation_wait_s: Waits for activations, that is for the stage before.
        gradient_wait_s: Waits for gradients, that is for the stage after.
        send_wait_s: Waits for messages to leave.
        reduce_s: Reduction of gradients over replicas and owners of tied weights.
        optimizer_s: From the end of backward to the end of the update.
        data_wait_s: Wait for the batch.
        end_s: When the step ended, on the clock of its events.
    """

    step_s: float = 0.0
    span_s: float = 0.0
    computed_s: dict[tuple[EventKind, int], float] = field(default_factory=dict)
    compute_s: float = 0.0
    activation_wait_s: float = 0.0
    gradient_wait_s: float = 0.0
    send_wait_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 0.0
    data_wait_s: float = 0.0
    end_s: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Event], start_s: float, end_s: float) -> "StepParts":
        """Add the events of one step up; they come in order of their end.

        Args:
            events: Of one stage.
            start_s: When the step began, if there was no wait for a batch before.
            end_s: When the step ended.

        Example:
            >>> forward = Event(0, 0, 0, EventKind.FORWARD, 1.0, 3.0)
            >>> parts = StepParts.of([Event(0, 0, None, EventKind.DATA_WAIT, 0, 1), forward], 1, 4)
            >>> parts.step_s, parts.data_wait_s, parts.compute_s, parts.other_s
            (4.0, 1.0, 2.0, 1.0)
        """
        parts = cls(end_s=end_s)
        first_s: float | None = None
        last_s = awaited_s = 0.0
        for event in events:
            length_s = event.end_s - event.start_s
            match event.kind:
                case EventKind.FORWARD | EventKind.BACKWARD:
                    first_s = event.start_s if first_s is None else first_s
                    last_s = event.end_s
                    key = event.kind, event.micro_batch or 0
                    parts.computed_s[key] = parts.computed_s.get(key, 0.0) + length_s
                    parts.compute_s += length_s
                    # A wait is for what is computed next: it does not say of which kind.
                    if event.kind is EventKind.FORWARD:
                        parts.activation_wait_s += awaited_s
                    else:
                        parts.gradient_wait_s += awaited_s
                    awaited_s = 0.0
                case EventKind.RECEIVE_WAIT:
                    awaited_s += length_s
                case EventKind.SEND_WAIT:
                    parts.send_wait_s += length_s
                case EventKind.GRADIENT_REDUCE:
                    parts.reduce_s += length_s
                case EventKind.OPTIMIZER:
                    parts.optimizer_s += length_s
                case EventKind.DATA_WAIT:
                    parts.data_wait_s += length_s
        parts.span_s = 0.0 if first_s is None else last_s - first_s
        parts.step_s = end_s - start_s + parts.data_wait_s
        return parts

    def is_whole(self, num_micro_batches: int) -> bool:
        """Whether each micro-batch went forth and back: not so where a loss was only looked at."""
        return len(self.computed_s) == 2 * num_micro_batches

    @property
    def communication_wait_s(self) -> float:
        """All waits for messages; to wait for a neighbour that computes is one of them."""
        return self.activation_wait_s + self.gradient_wait_s + self.send_wait_s

    @property
    def other_s(self) -> float:
        """What is left: agreement on the batch, the other callbacks, hooks, Python."""
        known_s = self.compute_s + self.communication_wait_s + self.reduce_s
        return max(0.0, self.step_s - known_s - self.optimizer_s - self.data_wait_s)
