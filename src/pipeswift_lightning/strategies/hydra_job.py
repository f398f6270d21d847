"""Ranks of a Hydra job: the command that starts them, and what the job before left behind."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

import __main__

__all__ = [
    "SWEEP_PID_VARIABLE",
    "SWEEP_VARIABLE",
    "application_command",
    "destroy_process_group",
    "forget_previous_job",
    "hydra_child_command",
    "in_hydra_job",
    "job_command",
    "job_facts",
    "mark_hydra_job",
    "recorded_application",
    "sweep_of_this_job",
]

SWEEP_VARIABLE = "PIPESWIFT_SWEEP"
SWEEP_PID_VARIABLE = "PIPESWIFT_SWEEP_PID"
_APPLICATION = "PIPESWIFT_APPLICATION"
_MARK = "PIPESWIFT_HYDRA_JOB"
_LEFT_BEHIND = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", _MARK)
_CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
_WORKERS = ("joblib", "loky", "submitit")  # their processes run jobs of an application
_OWN = (  # of Hydra's values a job's ranks have their own, and no sweep
    "hydra.mode",
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.output_subdir",
    "hydra.job.name",
    "hydra.job.chdir",
)


def in_hydra_job() -> bool:
    """Whether this process runs a Hydra job. One that does has loaded Hydra; others need not."""
    loaded: Any = sys.modules.get("hydra.core.hydra_config")
    return loaded is not None and bool(loaded.HydraConfig.initialized())


def mark_hydra_job() -> None:
    """Note that this process, in this job, set the variables that name a rank."""
    os.environ[_MARK] = _this_job()


def forget_previous_job() -> None:
    """In the next job of a sweep, undo what starting the ranks of the last one has set.

    Otherwise the next job believes to be one of several ranks already, and waits for the others.
    """
    mark = os.environ.get(_MARK)
    if mark is None or not in_hydra_job() or mark == _this_job():
        return
    if mark.split(":")[0] != str(os.getpid()):  # inherited: this process is such a rank
        return
    for name in _LEFT_BEHIND:
        os.environ.pop(name, None)
    destroy_process_group()


def destroy_process_group() -> None:
    """Close this process's connections to the other ranks, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _this_job() -> str:
    from hydra.core.hydra_config import HydraConfig

    return f"{os.getpid()}:{HydraConfig.get().runtime.output_dir}"


def job_facts() -> dict[str, str]:
    """Return what was overridden in this process's Hydra job, by key; nothing outside of Hydra."""
    if not in_hydra_job():
        return {}
    from hydra.core.hydra_config import HydraConfig

    pairs = (override.partition("=") for override in HydraConfig.get().overrides.task)
    return {f"override {key}": value for key, _, value in pairs}


def sweep_of_this_job() -> str | None:
    """Return the name of the sweep's folder; None outside of a sweep. Alike on all ranks."""
    if in_hydra_job():
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        job = HydraConfig.get()
        if job.mode == RunMode.MULTIRUN:
            return Path(job.sweep.dir).name
    return os.environ.get(SWEEP_VARIABLE)


@contextmanager
def recorded_application() -> Iterator[None]:
    """Note this process's command, for jobs that joblib or submitit run in processes of theirs."""
    before = os.environ.get(_APPLICATION)
    os.environ[_APPLICATION] = json.dumps(_own_command())
    try:
        yield
    finally:
        if before is None:
            del os.environ[_APPLICATION]
        else:
            os.environ[_APPLICATION] = before


def _own_command() -> list[str]:
    """Return the arguments after the interpreter that run this application."""
    spec = __main__.__spec__
    script = ["-m", spec.name] if spec is not None else [str(Path(_cwd(), sys.argv[0]).resolve())]
    return [*script, *_config_flags(sys.argv[1:])]


def _cwd() -> str:
    from hydra.utils import get_original_cwd

    return get_original_cwd() if in_hydra_job() else os.getcwd()


def application_command() -> list[str]:
    """Return the command that runs this Hydra application, without overrides.

    Raises:
        MisconfigurationException: This process is a launcher's worker, and nobody has recorded
            which application it works for.
    """
    worker = _worker()
    if worker is None:
        return [sys.executable, *_own_command()]
    recorded = os.environ.get(_APPLICATION)
    if recorded is None:
        msg = (
            f"the ranks of this job cannot be started from a process of {worker}'s, which does not "
            "tell the script it works for. Remedy: hydra/launcher=isolated (or basic), or call "
            "main() within `with pipeswift_lightning.jobs.application.application():`"
        )
        raise MisconfigurationException(msg)
    return [sys.executable, *json.loads(recorded)]


def _worker() -> str | None:
    """Return whose worker this process is, by its command: joblib's take the script's name."""
    started = iter(sys.orig_argv[1:5])
    module = next((next(started, "") for argument in started if argument == "-m"), "")
    package = module.split(".")[0]
    return package if package in _WORKERS else None


def job_command(folder: Path, more: Sequence[str]) -> tuple[list[str], str]:
    """Return the command and working directory that run this *one resolved job* in a new process.

    Args:
        folder: Where it writes.
        more: Overrides of its own.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    command = [
        *application_command(),
        *job.overrides.task,
        *(text for text in job.overrides.hydra if not text.lstrip("+~").startswith(_OWN)),
        "hydra.mode=RUN",
        f"hydra.run.dir='{folder}'",
        *more,
    ]
    return command, _cwd()


def hydra_child_command(local_rank: int) -> tuple[list[str], str]:
    """Return the command and working directory of local rank ``local_rank``.

    The child gets the parent's one resolved job: its overrides and its output directory. To run
    the parent's own command line again, as Lightning does, is wrong under ``--multirun``: each
    rank would start a sweep of its own and train other configurations than rank 0.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    more = [
        "hydra.output_subdir=null",
        f"hydra.job.name={job.job.name}_rank{local_rank}",
        f"hydra.job.chdir={str(bool(job.job.chdir)).lower()}",
    ]
    return job_command(Path(job.runtime.output_dir), more)


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """Keep the flags that say where the configuration is; the rest is in the overrides."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _CONFIG_FLAGS:
            kept += [argument, next(rest)]
        elif argument.startswith(tuple(f"{flag}=" for flag in _CONFIG_FLAGS)):
            kept.append(argument)
    return kept
