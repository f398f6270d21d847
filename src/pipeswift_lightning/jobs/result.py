"""A job's outcome as a file: how it ended, and the value that its sweep compares."""

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

__all__ = ["JobResult", "JobState", "ResultFile"]


class JobState(StrEnum):
    """How a job has ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    PRUNED = "pruned"  # predicted to be slow, and never started
    REPEATED = "repeated"  # the same configuration has run before


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A job's outcome.

    Args:
        state: How it ended.
        value: What it returned, if that is a number.
        error: The exception's type and first line.
    """

    state: JobState
    value: float | None = None
    error: str | None = None

    def write(self, folder: Path) -> None:
        """Write ``job_result.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job_result.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "JobResult | None":
        """Return what `write` wrote; None if there is no such file."""
        try:
            found = json.loads((folder / "job_result.json").read_text())
        except FileNotFoundError:
            return None
        return cls(state=JobState(found["state"]), value=found["value"], error=found["error"])

    @classmethod
    def of(cls, job_return: JobReturn) -> "JobResult":
        """Return the outcome of a job that Hydra has run."""
        value = job_return._return_value
        if job_return.status is JobStatus.COMPLETED:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return cls(state=JobState.COMPLETED, value=float(value) if number else None)
        return cls(state=JobState.FAILED, error=_first_line(value))


def _first_line(error: object) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ResultFile(Callback):
    """A callback of Hydra's: write ``job_result.json`` into each job's folder, on rank 0."""

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            JobResult.of(job_return).write(Path(config.hydra.runtime.output_dir))
