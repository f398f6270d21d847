"""What the stages of a pipeline tell each other around a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeswift_lightning.runtime.agreement import Comparison
from pipeswift_lightning.runtime.announcement import Expected, tell
from pipeswift_lightning.runtime.communication import communicating, in_collective
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.progress import EVERYONE, Progress
from pipeswift_lightning.runtime.stage_program import Admission
from pipeswift_lightning.runtime.structure import mapped

__all__ = ["StageTalk"]

_HOST = torch.device("cpu")
_COMPARING = "comparing batch and plan with the other stages"
_WAITING = "waiting for the last stage's loss and logs"
_TELLING = "telling the other stages the loss and logs"


class StageTalk:
    """Compares what stages are about to do, and hands round what the last one has found.

    Both go from host to host, and begin before their result is needed: ranks do not wait for each
    other at the ends of a step.

    Args:
        groups: The mesh's.
        device: Where tensors of the last stage are wanted.
        progress: Read by the watchdog.
    """

    def __init__(self, groups: MeshGroups, device: torch.device, progress: Progress) -> None:
        self._groups, self._device, self._progress = groups, device, progress
        self._last = groups.mesh.num_stages - 1
        self._source = groups.mesh.rank(stage=self._last, replica=groups.coordinate.replica)
        self._expected: Expected | None = None

    def close(self) -> None:
        """Expect nothing any more: a connection is open for as long as anything refers to it."""
        self._expected = None

    def compare(self, facts: Mapping[str, str]) -> Admission:
        """Begin to compare ``facts`` with the other stages; return what ends it.

        The function that is returned raises a ``DisagreementError`` on every stage if they differ.
        """
        if self._last == 0:
            return _nothing
        with communicating(_COMPARING):
            comparison = Comparison(facts, self._groups.control, _HOST)

        def agreed(*, patience_s: float | None = None) -> None:
            with in_collective(_COMPARING, self._progress):
                comparison.result(patience_s)

        return agreed

    def expect(self) -> None:
        """Get ready for what `from_last` will return, before the stages wait for one another."""
        if self._groups.coordinate.stage != self._last and self._expected is None:
            with communicating(_WAITING, self._last):
                self._expected = Expected(self._source, self._groups.control)

    def from_last(self, value: Any) -> Any:
        """Return the last stage's ``value`` on every stage; what others give is ignored."""
        if self._last == 0:
            return value
        before = self._progress.doing
        self.expect()
        expected, self._expected = self._expected, None
        if expected is None:
            self._progress.mark(_TELLING, waiting_for=EVERYONE)
            with communicating(_TELLING):
                tell(value, self._groups.control)
        else:
            self._progress.mark(_WAITING, waiting_for=self._source)
            with communicating(_WAITING, self._last):
                value = expected.value()
        # Only after success: a report on a failure must still find where it happened.
        self._progress.mark(before)
        return mapped(lambda x: x.to(self._device) if isinstance(x, Tensor) else x, value)


def _nothing(*, patience_s: float | None = None) -> None:
    """Agree with oneself."""
