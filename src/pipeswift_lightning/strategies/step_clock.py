"""When the parts of a training step began and ended, beside what the executor notes."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.runtime.device_clock import Instant
from pipeswift_lightning.strategies.data_wait import DataWait
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.step_times import StepTimes

__all__ = ["StepClock"]


class StepClock:
    """Adds the waits for data, the reduction of gradients and the update to a step's events.

    Attributes:
        times: Busy times of the last steps.
        data_wait: Listens to the training loop.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self.data_wait = DataWait()
        self._computed: Instant = 0.0

    def computed(self, session: PipelineSession) -> None:
        """Note that all micro-batches of a step are done."""
        for start_s, end_s in self.data_wait.take():
            _note(session, EventKind.DATA_WAIT, start_s, end_s)
        self.times.add(session.recorder.step)
        self._computed = session.recorder.now()

    @contextmanager
    def reducing(self, session: PipelineSession) -> Iterator[None]:
        """Note the reduction of gradients that runs inside."""
        start = session.recorder.now()
        yield
        self._computed = session.recorder.now()
        _note(session, EventKind.GRADIENT_REDUCE, start, self._computed)

    def updated(self, session: PipelineSession) -> None:
        """Note that the optimizer is done; clipping, which comes before, is part of it."""
        _note(session, EventKind.OPTIMIZER, self._computed, session.recorder.now())


def _note(session: PipelineSession, kind: EventKind, start: Instant, end: Instant) -> None:
    session.recorder.add(kind, session.stage, None, start, end)
