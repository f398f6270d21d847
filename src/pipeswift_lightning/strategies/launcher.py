"""Start one process a device on this node, and leave none of them behind."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from pipeswift_lightning.strategies.hydra_job import (
    hydra_child_command,
    in_hydra_job,
    mark_hydra_job,
)

__all__ = ["PARENT_VARIABLE", "PipelineLauncher", "launcher_pid"]

PARENT_VARIABLE = "PIPESWIFT_LAUNCHER_PID"
_POLL_S = 0.2
_GRACE_S = 20.0


def launcher_pid() -> int | None:
    """Return the process that started this one, if a `PipelineLauncher` did."""
    pid = os.environ.get(PARENT_VARIABLE)
    if pid is None or os.environ.get("LOCAL_RANK", "0") == "0":
        return None
    return int(pid) if int(pid) == os.getppid() else None


class PipelineLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher, with three differences.

    Children learn their parent's pid, so that they end when it is killed. Under Hydra a child gets
    its parent's one resolved job. And when a child fails,
    the others get time to report the cause: Lightning's own observer kills rank 0 at once, often
    before it has printed anything.
    """

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._start_children()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _start_children(self) -> None:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        try:
            if in_hydra_job():
                self._call_hydra_children()
            else:
                self._call_children_scripts()
        finally:
            del os.environ[PARENT_VARIABLE]
        threading.Thread(
            target=_observe, args=(self.procs,), name="pipeswift-children", daemon=True
        ).start()

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
            self.procs.append(subprocess.Popen(command, env=variables, cwd=cwd))


def _observe(children: list["subprocess.Popen[bytes]"]) -> None:
    """End this process if a child fails and the failure does not end it by itself."""
    while True:
        time.sleep(_POLL_S)
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return
        failed = [i for i, code in enumerate(codes) if code]
        if failed:
            break
    # A rank that joined the pipeline has told its peers why; this is for one that never joined.
    time.sleep(_GRACE_S)
    rank = failed[0] + 1
    sys.stderr.write(
        f"pipeswift: the process of local rank {rank} (pid {children[failed[0]].pid}) ended with "
        f"code {codes[failed[0]]}, and this process did not end by itself. Its own output says "
        "why. Ending all processes of this node.\n"
    )
    sys.stderr.flush()
    for child in children:
        if child.poll() is None:
            child.kill()
    os._exit(1)
