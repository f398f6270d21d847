"""How far a job had come, in a small file, so that the next attempt knows what it does again."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Attempt", "Progress", "ProgressFile"]

_PERIOD_S = 1.0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One process's share of a job.

    Attributes:
        started: When its process started, in seconds since 1970.
        ended: When it was last heard of.
        from_step: The optimizer step it began at.
        to_step: The step it had reached.
        parts_s: Seconds of each part.
    """

    started: float
    ended: float
    from_step: int
    to_step: int
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Progress:
    """All attempts of a job, the running one last.

    Example:
        >>> first = Attempt(started=0.0, ended=9.0, from_step=0, to_step=70)
        >>> second = Attempt(started=20.0, ended=20.0, from_step=50, to_step=50)
        >>> Progress(attempts=[first, second]).lost_steps
        20
    """

    attempts: list[Attempt]

    @property
    def reached(self) -> int:
        """The furthest step of the attempts before."""
        return max((a.to_step for a in self.attempts[:-1]), default=0)

    @property
    def lost_steps(self) -> int:
        """Steps that the running attempt has to do again."""
        return max(0, self.reached - self.attempts[-1].from_step)

    @classmethod
    def read(cls, path: Path) -> "Progress | None":
        """Return what a file says; None if there is none, or none that can be read."""
        try:
            content: Mapping[str, Any] = json.loads(path.read_text())
            return cls(attempts=[Attempt(**attempt) for attempt in content["attempts"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class ProgressFile:
    """Writes a job's progress, at most once a second; a reader sees one state or the next.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written_s = float("-inf")

    def write(self, progress: Progress, *, now: bool = False) -> None:
        """Write it if a second has passed, or ``now``."""
        time_s = time.monotonic()
        if not now and time_s - self._written_s < _PERIOD_S:
            return
        self._written_s = time_s
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(progress)) + "\n")
        os.replace(draft, self.path)
