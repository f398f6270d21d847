"""Run each job of a sweep in a process of its own, one after the other."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write
from typing_extensions import override

__all__ = ["IsolatedLauncher", "JobFailedError"]

log = logging.getLogger(__name__)
_TERMINATE_S = 30.0


class JobFailedError(CompactHydraException):
    """A job of a sweep has failed; its own output says how.

    Attributes:
        exit_code: Of the sweep. Hydra loads plugins anew, so their classes cannot be told apart.
    """

    exit_code = 1


class IsolatedLauncher(Launcher):
    """``hydra/launcher=isolated``: a job cannot leave anything to the next one, nor end the sweep.

    The job gets the overrides of its member, ``hydra.mode=RUN`` and its folder of the sweep. What
    it returned is read from ``job_result.json``. A job that fails, is killed or exits is reported
    and the next one starts; the sweeper makes the whole sweep's exit code non-zero at the end.
    """

    def __init__(self) -> None:
        self._config: DictConfig | None = None
        self._context: HydraContext | None = None

    @override
    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context = hydra_context
        self._config = config

    @override
    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        assert self._config is not None
        setup_globals()
        HydraConfig.instance().set_config(self._config)
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        # The sweep's own: a member that has another task name would make a second tree.
        folder = Path(self._config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with _terminable():
            return [
                self._run(initial_job_idx + i, list(overrides), folder)
                for i, overrides in enumerate(job_overrides)
            ]

    def _run(self, number: int, overrides: list[str], sweep: Path) -> JobReturn:
        from pipeswift_lightning.jobs.result import JobResult, JobState
        from pipeswift_lightning.strategies.hydra_job import (
            SWEEP_PID_VARIABLE,
            SWEEP_VARIABLE,
            job_command,
        )

        assert self._config is not None
        assert self._context is not None
        shown = " ".join(filter_overrides(overrides))
        log.info(f"#{number} : {shown}")
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        folder = sweep / str(config.hydra.sweep.subdir)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(folder)
        command, cwd = job_command(
            folder,
            [
                f"hydra.job.num={number}",
                f"hydra.job.id={number}",
                "++hydra.callbacks.job_result._target_=pipeswift_lightning.jobs.result.ResultFile",
            ],
        )
        folder.mkdir(parents=True, exist_ok=True)
        sweep_variables = {SWEEP_VARIABLE: sweep.name, SWEEP_PID_VARIABLE: str(os.getpid())}
        code = _completed(command, cwd, {**os.environ, **sweep_variables})
        result = JobResult.read(folder)
        if code != 0 and (result is None or result.state is not JobState.FAILED):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            result = JobResult(state=JobState.FAILED, error=f"its process {how}")
            result.write(folder)
        answer = JobReturn(
            overrides=overrides, working_dir=cwd, status=JobStatus.FAILED, hydra_cfg=config
        )
        if result is not None and result.state is JobState.COMPLETED:
            answer.status, answer._return_value = JobStatus.COMPLETED, result.value
        else:
            why = "it left no job_result.json" if result is None else result.error
            answer._return_value = JobFailedError(f"job #{number} ({shown}) failed: {why}")
            log.error(f"#{number} failed: {why}. Its files are in {folder}")
        return answer


def _completed(command: Sequence[str], cwd: str, variables: dict[str, str]) -> int:
    """Run a process to its end, or end it if this one has to stop; return its exit code."""
    with subprocess.Popen(command, cwd=cwd, env=variables) as process:
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_TERMINATE_S)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does, so that the running job is ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
