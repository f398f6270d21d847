"""Sums over some steps of one stage, and the costs that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.timeline import EventKind

__all__ = ["StepSums", "mean_costs"]


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of one stage that followed one schedule; what is gathered.

    Attributes:
        num_steps: How many steps.
        sums_s: Seconds by part of the step.
        computed_s: Seconds by kind of computation and micro-batch.
        memory_bytes: What the stage's process has held at most.
    """

    num_steps: int = 0
    sums_s: dict[str, float] = field(default_factory=dict)
    computed_s: dict[tuple[EventKind, int], float] = field(default_factory=dict)
    memory_bytes: int = 0

    def add(self, parts: StepParts) -> None:
        """Add one step."""
        self.num_steps += 1
        sums = self.sums_s
        for name, value in (
            ("step", parts.step_s),
            ("span", parts.span_s),
            ("compute", parts.compute_s),
            ("activation_wait", parts.activation_wait_s),
            ("gradient_wait", parts.gradient_wait_s),
            ("communication_wait", parts.communication_wait_s),
            ("gradient_reduce", parts.reduce_s),
            ("optimizer", parts.optimizer_s),
            ("data_wait", parts.data_wait_s),
            ("other", parts.other_s),
        ):
            sums[name] = sums.get(name, 0.0) + value
        for key, value in parts.computed_s.items():
            self.computed_s[key] = self.computed_s.get(key, 0.0) + value

    def mean_s(self, name: str) -> float:
        """Return the mean over the steps."""
        return self.sums_s.get(name, 0.0) / max(1, self.num_steps)


def mean_costs(schedule: Schedule, stages: Sequence[StepSums]) -> StepCosts:
    """Return the measured costs of each stage and micro-batch, means over the steps."""
    ids = range(schedule.num_micro_batches)

    def table(kind: EventKind) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(s.computed_s.get((kind, i), 0.0) / max(1, s.num_steps) for i in ids)
            for s in stages
        )

    return StepCosts(forward_s=table(EventKind.FORWARD), backward_s=table(EventKind.BACKWARD))
