"""A strategy whose steps can be looked at."""

from typing import Any

from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.plan.timeline import Event, Timeline
from pipeswift_lightning.strategies.sharded_strategy import ShardedStrategy
from pipeswift_lightning.strategies.step_clock import StepClock

__all__ = ["ObservedStrategy"]


class ObservedStrategy(ShardedStrategy):
    """Answers what callbacks ask about the last steps."""

    _clock: StepClock

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step; None before the first, and where steps run whole."""
        return None if self._session is None else self._session.plan

    def assembly_times(self) -> dict[str, float]:
        """Return the seconds of the parts of assembly that a callback cannot see.

        ``groups`` ends before a callback's ``setup``; ``profile``, ``plan`` and ``load`` lie within
        the first step.
        """
        return dict(self._assembly.seconds)

    def step_events(self) -> tuple[Event, ...]:
        """Return what this rank did in its last step, from the wait for its batch on."""
        return self.session.recorder.events()

    def micro_batch_tokens(self, batch: Any) -> tuple[int, ...] | None:
        """Return the tokens of each micro-batch of the last training step, which ran ``batch``.

        Without padding where the step was planned with lengths. None if they are not known.
        """
        return self.session.planner.tokens(batch)

    def measured_bubbles(self) -> list[float] | None:
        """Return each stage's idle share of the last steps, by stage; collective."""
        groups, collectives = self._groups, self._collectives
        if groups is None or collectives is None:
            return None
        return collectives.guarded(
            "gathering step times", lambda: self._clock.times.bubbles(groups)
        )

    def timeline(self) -> Timeline:
        """Return the measured timeline of the last step, a rank a stage; collective."""
        assert self._collectives is not None
        return self._collectives.guarded("gathering the timeline", self.session.timeline)
