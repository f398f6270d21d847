"""A rank's operating-system process: is it alive, stopped, busy; and ending it."""

import contextlib
import json
import os
import signal
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ProcessIdentity"]

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Which process a rank is, unmistakably: a pid alone may be another container's, or reused.

    Attributes:
        host: Names the machine, its boot and the pid namespace; equal only where pids may be
            compared.
        node: The host's name, for people.
        pid: The process id.
        started: Start time in clock ticks after boot; 0 where the system does not tell.
        progress_fd: Descriptor, in that process, of its shared `Progress`; ``None`` without one.
    """

    host: str
    node: str
    pid: int
    started: int
    progress_fd: int | None = None

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """Return the identity of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Return the identity of a running process on this host."""
        fields = _stat(pid)
        node = socket.gethostname()
        started = int(fields[19]) if fields else 0
        return cls(host=f"{node}/{_pid_space()}", node=node, pid=pid, started=started)

    def to_json(self) -> str:
        """Return the identity as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ProcessIdentity":
        """Return the identity that :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def is_alive(self) -> bool:
        """Whether the process still runs (a zombie does not); about 10 us. Same host only."""
        if not self.started:  # no /proc: ask the kernel whether a signal could be sent
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
            return True
        fields = self._fields()
        return fields is not None and fields[0] not in ("Z", "X", "x")

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds the process."""
        fields = self._fields()
        return fields is not None and fields[0] in ("T", "t")

    def cpu_s(self) -> float:
        """Return the processor time used so far, in seconds; 0 where it is not known."""
        fields = self._fields()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS if fields else 0.0

    def kill(self) -> None:
        """End the process at once, if it is still the one meant; it may be gone already."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def _fields(self) -> list[str] | None:
        fields = _stat(self.pid)
        return fields if fields and int(fields[19]) == self.started else None


def _stat(pid: int) -> list[str] | None:
    """Return ``/proc/<pid>/stat`` from the third field (the state) on, or ``None``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the second field may hold spaces and brackets


def _pid_space() -> str:
    """Return a name that is equal only for processes which see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{uuid.getnode():x}"
