"""Ranks of a Hydra job: the command that starts them, and what the job before left behind."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import __main__

__all__ = ["forget_previous_job", "hydra_child_command", "in_hydra_job", "mark_hydra_job"]

_MARK = "PIPESWIFT_HYDRA_JOB"
_LEFT_BEHIND = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", _MARK)
_CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")


def in_hydra_job() -> bool:
    """Whether this process runs a Hydra job."""
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.initialized()


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
    if dist.is_initialized():
        dist.destroy_process_group()


def _this_job() -> str:
    from hydra.core.hydra_config import HydraConfig

    return f"{os.getpid()}:{HydraConfig.get().runtime.output_dir}"


def hydra_child_command(local_rank: int) -> tuple[list[str], str]:
    """Return the command and working directory of local rank ``local_rank``.

    The child gets the parent's *one resolved job*: its overrides and its output directory. To run
    the parent's own command line again, as Lightning does, is wrong under ``--multirun``: each
    rank would start a sweep of its own and train other configurations than rank 0.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    job = HydraConfig.get()
    cwd = get_original_cwd()
    spec = __main__.__spec__
    script = ["-m", spec.name] if spec is not None else [str(Path(cwd, sys.argv[0]).resolve())]
    command = [
        sys.executable,
        *script,
        *_config_flags(sys.argv[1:]),
        *job.overrides.task,
        "hydra.mode=RUN",
        f"hydra.run.dir='{job.runtime.output_dir}'",
        "hydra.output_subdir=null",
        f"hydra.job.name={job.job.name}_rank{local_rank}",
        f"hydra.job.chdir={str(bool(job.job.chdir)).lower()}",
    ]
    return command, cwd


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
