"""Start one process a device on this node, and leave none of them behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from pipeswift_lightning.runtime.failure import PipelineFailure
from pipeswift_lightning.runtime.process import ProcessIdentity
from pipeswift_lightning.strategies.environment import forget_failures
from pipeswift_lightning.strategies.hydra_job import (
    SWEEP_VARIABLE,
    hydra_child_command,
    in_hydra_job,
    mark_hydra_job,
    sweep_of_this_job,
)

__all__ = ["PARENT_VARIABLE", "PipelineLauncher", "launcher_pid", "reap"]

PARENT_VARIABLE = "PIPESWIFT_LAUNCHER_PID"
_POLL_S = 0.2
_SHORT_POLL_S = 0.02
_UNWIND_S = 20.0  # for ranks that watch each other: they end by themselves, this is a last resort
_LAST_WORDS_S = 1.0  # for a child's output to arrive


def launcher_pid() -> int | None:
    """Return the process that started this one, if a `PipelineLauncher` did."""
    pid = _inherited_pid()
    return pid if pid == os.getppid() else None


def _inherited_pid() -> int | None:
    pid = os.environ.get(PARENT_VARIABLE)
    return int(pid) if pid is not None and os.environ.get("LOCAL_RANK", "0") != "0" else None


class PipelineLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher, with four differences.

    Under Hydra a child gets its parent's one resolved job. No process outlives the others: children
    learn their parent's pid, and end when it is gone, even before they have joined the pipeline.
    When a child fails, the others get time to report the cause, whereas Lightning's own observer
    kills rank 0 at once, often before it has printed anything. And an exception is told to the
    other ranks before Lightning calls any hook on it: such hooks may wait for the other ranks.

    Args:
        cluster_environment: As for Lightning's.
        num_processes: Processes on this node.
        num_nodes: Nodes.
        on_failure: Told each exception that ends a Trainer call; returns what to raise.
        has_begun: Whether all ranks have met, and watch each other.
        check: Given the Trainer, refuses what is wrong already, before any process is started.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        on_failure: Callable[[BaseException], BaseException],
        has_begun: Callable[[], bool],
        check: Callable[[Any], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._on_failure = on_failure
        self._has_begun = has_begun
        self._check = check
        self._is_over = threading.Event()

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self._check(trainer)
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._start_children()
        elif (parent := _inherited_pid()) is not None:
            _in_thread(_leave_with, parent, self._has_begun)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:  # Lightning's way to end a tuner, on all ranks alike
            raise
        except BaseException as error:
            cause = self._on_failure(error)
            if self.procs and not self._has_begun():
                _in_thread(_end, self.procs, _LAST_WORDS_S)  # they wait for this rank
            if isinstance(cause, PipelineFailure):
                # This rank only stops: where it stood meanwhile is a screenful that helps nobody.
                raise cause.with_traceback(None) from None
            raise
        finally:
            if sweep_of_this_job() is not None:  # this process has other jobs to run
                self._is_over.set()

    @override
    def kill(self, signum: Any) -> None:
        """Send a signal to the children; those that are to be killed may first say why."""
        if signum == signal.SIGKILL:
            end = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < end and any(child.poll() is None for child in self.procs):
                time.sleep(_SHORT_POLL_S)
        super().kill(signum)

    def _start_children(self) -> None:
        forget_failures()  # of ranks that are gone
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        try:
            if in_hydra_job():
                self._call_hydra_children()
            else:
                self._call_children_scripts()
        finally:
            del os.environ[PARENT_VARIABLE]
        _in_thread(_observe, self.procs, self._has_begun, self._is_over)

    def _call_hydra_children(self) -> None:
        self._check_can_spawn_children()
        mark_hydra_job()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, cwd = hydra_child_command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            if (sweep := sweep_of_this_job()) is not None:
                variables[SWEEP_VARIABLE] = sweep
            self.procs.append(subprocess.Popen(command, env=variables, cwd=cwd))


def _in_thread(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="pipeswift-launcher", daemon=True).start()


def _leave_with(parent: int, has_begun: Callable[[], bool]) -> None:
    """End this process when its parent is gone; once the ranks have met, they see to it."""
    while not has_begun():
        if not _is_alive(parent):
            _say(
                f"the process that started this one (pid {parent}, rank 0) is gone. Its own output "
                "says why. Ending this process as well."
            )
            os._exit(1)
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    return pid == os.getppid() or ProcessIdentity.of(pid).is_alive()


def _observe(
    children: list["subprocess.Popen[bytes]"],
    has_begun: Callable[[], bool],
    is_over: threading.Event,
) -> None:
    """End this process if a child ends early and that does not end it by itself."""
    while True:
        if is_over.wait(_POLL_S):
            return
        codes = [child.poll() for child in children]
        if has_begun() and all(code == 0 for code in codes):
            return
        ended = [i for i, code in enumerate(codes) if code is not None]
        # A rank that ends well is early only if the others still wait for it to join.
        early = [i for i in ended if codes[i] != 0 or not has_begun()]
        if early:
            break
    # A rank that has met the others has told them why, and they end by themselves.
    if is_over.wait(_UNWIND_S if has_begun() else _LAST_WORDS_S):
        return
    code = codes[early[0]] or 0
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    when = "" if has_begun() else " before it had joined the other ranks"
    remedy = (
        "Look for the out-of-memory killer (dmesg), or a kill -9."
        if code == -signal.SIGKILL
        else "Its own output says why."
    )
    _say(
        f"the process of local rank {early[0] + 1} (pid {children[early[0]].pid}) {how}{when}. "
        f"{remedy} Ending all processes of this node."
    )
    _end(children, 0.0)
    os._exit(1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(text: str) -> None:
    sys.stderr.write(f"pipeswift: {text}\n")
    sys.stderr.flush()


def reap(children: Sequence["subprocess.Popen[bytes]"], limit_s: float = 120.0) -> None:
    """Wait until the processes of the other ranks have ended; after ``limit_s``, end them."""
    end = time.monotonic() + limit_s
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"pid {child.pid} has not ended {limit_s:g} s after its job; it is killed.")
            child.kill()
            child.wait()


def _end(children: list["subprocess.Popen[bytes]"], after_s: float) -> None:
    time.sleep(after_s)
    for child in children:
        if child.poll() is None:
            child.kill()
