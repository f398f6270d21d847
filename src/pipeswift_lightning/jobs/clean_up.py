"""The end of a job within a process that goes on, as the jobs of a sweep follow one another."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from pipeswift_lightning.strategies.hydra_job import destroy_process_group
from pipeswift_lightning.strategies.launcher import reap

__all__ = ["RunningJob", "leaving_nothing_behind"]


@dataclass(slots=True)
class RunningJob:
    """What a job has made that outlives its objects.

    Args:
        trainer: Set once there is one.
    """

    trainer: Trainer | None = None


@contextmanager
def leaving_nothing_behind() -> Iterator[RunningJob]:
    """Run a job; then end what would leak into the next one, whether it failed or not.

    These are: the processes of its ranks, its process group, the environment's variables that say
    which rank this is, and the loggers' runs (W&B has one a process, which the next job would
    write into).
    """
    job = RunningJob()
    variables = dict(os.environ)
    failed = True
    try:
        yield job
        failed = False
    finally:
        _close_loggers(failed=failed)
        if job.trainer is not None:
            reap(getattr(job.trainer.strategy.launcher, "procs", []))
        destroy_process_group()
        os.environ.clear()
        os.environ.update(variables)


def _close_loggers(*, failed: bool) -> None:
    wandb: Any = sys.modules.get("wandb")  # never imported for this
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish(exit_code=int(failed))
