"""Listens to the marks that Lightning makes for its profiler, whichever profiler that is."""

from collections.abc import Callable
from typing import Any

__all__ = ["ActionListener"]

Listen = Callable[[str], None]


class ActionListener:
    """Is told when an action of the Trainer starts and stops.

    No hook of a callback or a strategy encloses the fetch of a batch or another callback's hooks;
    these marks do.

    Args:
        started: Called with the action's name just after it has started.
        stopped: Called with the action's name just before it has stopped.
    """

    def __init__(self, started: Listen, stopped: Listen) -> None:
        self._started, self._stopped = started, stopped
        self._profiler: Any = None
        self._before: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def install(self, profiler: Any) -> None:
        """Listen to a Trainer's profiler."""
        self.remove()
        self._profiler = profiler
        self._before = {n: profiler.__dict__[n] for n in ("start", "stop") if n in vars(profiler)}
        start, stop = profiler.start, profiler.stop

        def noting_start(action_name: str) -> None:
            start(action_name)
            if self._profiler is profiler:
                self._started(action_name)

        def noting_stop(action_name: str) -> None:
            if self._profiler is profiler:
                self._stopped(action_name)
            stop(action_name)

        self._ours = {"start": noting_start, "stop": noting_stop}
        profiler.__dict__.update(self._ours)

    def remove(self) -> None:
        """Listen no more, and leave the profiler as it was, unless others listen through this."""
        profiler, self._profiler = self._profiler, None
        for name, ours in self._ours.items():
            if profiler is not None and vars(profiler).get(name) is ours:
                del profiler.__dict__[name]
                if name in self._before:
                    profiler.__dict__[name] = self._before[name]
