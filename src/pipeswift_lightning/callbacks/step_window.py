"""The last steps of one stage, and what those of all stages say together."""

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeswift_lightning.callbacks.step_parts import StepParts
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.plan.rebalance import Measurement
from pipeswift_lightning.plan.timeline import EventKind

__all__ = ["StepWindow", "measurement"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: its batch's number, the kind of its plan, and its seconds."""

    batch: int
    kind: str
    step_s: float
    computed_s: dict[tuple[EventKind, int], float]


@dataclass(slots=True)
class StepWindow:
    """What one stage noted of its last steps; what is gathered.

    Args:
        length: Batches that are remembered.
        after: Batches up to this one are not noted.

    Attributes:
        steps: The steps.
        schedules: The last schedule of each kind: orders of micro-batches may differ.
    """

    length: int
    after: int = 0
    steps: deque[_Step] = field(default_factory=deque)
    schedules: dict[str, Schedule] = field(default_factory=dict)

    def add(self, batch: int, plan: Plan, parts: StepParts) -> None:
        """Note a step, if each micro-batch went forth and back; without its wait for data."""
        while self.steps and self.steps[0].batch <= batch - self.length:
            self.steps.popleft()
        number = plan.schedule.num_micro_batches
        if batch > self.after and parts.is_whole(number):
            kind = f"{plan.schedule_name} of {number}"
            self.schedules[kind] = plan.schedule
            step_s = parts.step_s - parts.data_wait_s
            self.steps.append(_Step(batch, kind, step_s, dict(parts.computed_s)))


def measurement(every: Sequence[Sequence[StepWindow]]) -> Measurement | None:
    """Return the medians of the steps that all ranks have noted; None if they are too few.

    A step is as long as on the rank where it was longest. Of several replicas, the slowest counts:
    the others wait for it. Of plans of several kinds (schedule, number of micro-batches), the one
    that most steps followed; they have to be half of the window.

    Args:
        every: Each rank's window, by replica and stage.
    """
    first = every[0][0]
    ranks = [{step.batch: step for step in window.steps} for row in every for window in row]
    kinds = Counter(step.kind for step in first.steps)
    if not kinds:
        return None
    kind = kinds.most_common(1)[0][0]
    alike = ({b for b, step in rank.items() if step.kind == kind} for rank in ranks)
    chosen = sorted(set.intersection(*alike))
    if 2 * len(chosen) < first.length:
        return None
    schedule = first.schedules[kind]

    def table(which: EventKind) -> tuple[tuple[float, ...], ...]:
        ids = range(schedule.num_micro_batches)
        medians = [
            [statistics.median(rank[b].computed_s[which, i] for b in chosen) for i in ids]
            for rank in ranks
        ]
        stages = range(len(every[0]))
        slowest = (map(max, zip(*medians[s :: len(stages)], strict=True)) for s in stages)
        return tuple(map(tuple, slowest))

    return Measurement(
        schedule=schedule,
        costs=StepCosts(
            forward_s=table(EventKind.FORWARD),
            backward_s=table(EventKind.BACKWARD),
        ),
        step_s=statistics.median(max(rank[b].step_s for rank in ranks) for b in chosen),
    )
