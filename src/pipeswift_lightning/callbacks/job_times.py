"""What a process can learn of the time before its first line ran: its own start, and the queue."""

import os
import re
import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path

__all__ = ["job_age_s", "note_job_end", "process_age_s", "slurm_queue_s"]

IMPORTED_S = time.monotonic()
SCONTROL_TIMEOUT_S = 5.0


def process_age_s() -> float:
    """Return the seconds since this process started, from Linux's ``/proc``.

    Where there is no ``/proc``, or its clock is not ours (some containers), count from the import
    of this module: a lower bound.
    """
    since_import_s = time.monotonic() - IMPORTED_S
    try:
        stat = Path("/proc/self/stat").read_text()
        started_ticks = int(stat.rpartition(")")[2].split()[19])  # field 22: ticks since boot
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import_s
    return max(age_s, since_import_s) if started_ticks else since_import_s


_ended_s: list[
    float
] = []  # when jobs of this process have ended: a fact of the process, like its age


def note_job_end() -> None:
    """Note that a job of this process has ended; another one may follow, as in a sweep."""
    _ended_s[:] = [time.monotonic()]


def job_age_s() -> float:
    """Return the seconds since this process started, or since its last job ended."""
    age_s = process_age_s()
    return min([age_s, *(time.monotonic() - ended_s for ended_s in _ended_s)])


def slurm_queue_s() -> float | None:
    """Return the seconds this SLURM job waited to start; None outside SLURM or without an answer.

    ``scontrol`` is asked once, for at most five seconds. A job that was put back in the queue
    counts from its last submission, as ``scontrol`` does.
    """
    job, scontrol = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if job is None or scontrol is None:
        return None
    try:
        answer = subprocess.run(
            [scontrol, "show", "job", "--oneliner", job],
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    times = [re.search(rf"\b{name}=(\S+)", answer.stdout) for name in ("SubmitTime", "StartTime")]
    try:
        submitted, started = (datetime.fromisoformat(t[1]) if t else None for t in times)
    except ValueError:
        return None  # "Unknown"
    return None if submitted is None or started is None else (started - submitted).total_seconds()
