"""What a strategy does before its first step can run, and how long each part takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from time import perf_counter

__all__ = ["AssemblyPart", "AssemblyTimes"]


class AssemblyPart(StrEnum):
    """The parts that only the strategy sees."""

    GROUPS = "groups"
    PROFILE = "profile"
    PLAN = "plan"
    LOAD = "load"


class AssemblyTimes:
    """Adds the parts up; within a part another one may run, and time counts for the inner one.

    Example:
        >>> times = AssemblyTimes()
        >>> with times.timing(AssemblyPart.PLAN), times.timing(AssemblyPart.LOAD):
        ...     pass
        >>> list(times.seconds)
        ['plan', 'load']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[AssemblyPart] = []
        self._since_s = 0.0

    @contextmanager
    def timing(self, part: AssemblyPart) -> Iterator[None]:
        """Count a block as ``part``."""
        self._switch()
        self._open.append(part)
        self.seconds.setdefault(part.value, 0.0)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        now_s = perf_counter()
        if self._open:
            self.seconds[self._open[-1].value] += now_s - self._since_s
        self._since_s = now_s
