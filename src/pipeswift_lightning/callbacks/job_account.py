"""Every second of a job's life, put down to one part of it."""

from collections.abc import Mapping
from enum import StrEnum

__all__ = ["JobAccount", "Part"]


class Part(StrEnum):
    """What a job is busy with, once it runs."""

    ASSEMBLY = "assembly"
    TRAINING = "training"
    REPEATED = "repeated"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    CLEAN_UP = "clean_up"


class JobAccount:
    """Counts time for one part at a time, so that the parts sum to the whole.

    Times are seconds of any one clock. A part may interrupt another one, as a checkpoint does an
    evaluation: the innermost counts.

    Args:
        born_s: When the job began, with assembly.

    Example:
        >>> account = JobAccount(10.0)
        >>> account.switch(Part.TRAINING, 14.0)
        >>> account.enter(Part.CHECKPOINT, 15.0)
        >>> account.leave(15.5)
        >>> account.advance(16.0)
        >>> account.seconds["assembly"], account.seconds["training"], account.seconds["checkpoint"]
        (4.0, 1.5, 0.5)
    """

    def __init__(self, born_s: float) -> None:
        self._seconds = dict.fromkeys(Part, 0.0)
        self._base = Part.ASSEMBLY
        self._inner: list[Part] = []
        self._now_s = born_s

    @property
    def seconds(self) -> Mapping[Part, float]:
        """Seconds of each part, up to the last call."""
        return self._seconds

    @property
    def elapsed_s(self) -> float:
        """Their sum."""
        return sum(self._seconds.values())

    @property
    def part(self) -> Part:
        """What the job is busy with."""
        return self._inner[-1] if self._inner else self._base

    def advance(self, now_s: float) -> None:
        """Count the time since the last call."""
        self._seconds[self.part] += now_s - self._now_s
        self._now_s = now_s

    def switch(self, part: Part, now_s: float) -> None:
        """Be busy with ``part`` from now on."""
        self.advance(now_s)
        self._base = part

    def enter(self, part: Part, now_s: float) -> None:
        """Interrupt what runs by ``part``."""
        self.advance(now_s)
        self._inner.append(part)

    def leave(self, now_s: float) -> None:
        """Go back to what was interrupted; without an interruption nothing changes."""
        self.advance(now_s)
        if self._inner:
            self._inner.pop()

    def move(self, source: Part, target: Part, seconds: float) -> None:
        """Put time down to another part, once it is known to belong there."""
        moved_s = min(seconds, self._seconds[source])
        self._seconds[source] -= moved_s
        self._seconds[target] += moved_s
