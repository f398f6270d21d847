"""The processes of one life."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeswift_lightning.runtime.process import ProcessIdentity
from tests.helpers.casts import PYTHON_PATH, become_launched, free_port
from tests.helpers.distributed import fork_server
from tests.helpers.killed.life import Life, leave_with_the_witness, live

_SCRIPT = Path(__file__).with_name("life.py")


class Ranks:
    """The processes of one life."""

    def __init__(self, life: Life, *, script: bool) -> None:
        """Start them.

        Args:
            life: What they do.
            script: Whether rank 0 is a script that starts the others, as for a user; else all are
                forked, which takes a second instead of ten.
        """
        self._life = life
        self._files = [Path(life.folder) / f"pid{r}" for r in range(life.devices)]
        for file in self._files:
            file.unlink(missing_ok=True)
        self._said = (Path(life.folder) / "said").open("ab", buffering=0)
        self._script: subprocess.Popen[bytes] | None = None
        self._forked: list[Any] = []
        if script:
            environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(_SCRIPT), json.dumps(asdict(life))]
            self._script = subprocess.Popen(
                command, env=environment, stdout=self._said, stderr=self._said
            )
        else:
            port = free_port()
            for rank in range(life.devices):
                args = (rank, port, life, self._said.name)
                self._forked.append(fork_server().Process(target=_become, args=args))
                self._forked[-1].start()

    def identity(self, rank: int) -> ProcessIdentity | None:
        """The process of a rank, once it has said who it is."""
        file = self._files[rank]
        text = file.read_text() if file.exists() else ""
        return ProcessIdentity.from_json(text) if text.endswith("}") else None

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            identity = self.identity(rank)
            if identity is not None:
                identity.kill()
        if self._script is not None and 0 in ranks:
            self._script.kill()

    def are_there(self) -> bool:
        if self._script is not None and self._script.poll() is None:
            return True
        if any(process.is_alive() for process in self._forked):
            return True
        known = [self.identity(rank) for rank in range(self._life.devices)]
        return any(identity is not None and identity.is_alive() for identity in known)

    def _show_stacks(self) -> None:
        for rank in range(self._life.devices):
            identity = self.identity(rank)
            if identity is not None and identity.is_alive():
                os.kill(identity.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def leave(self, limit_s: float) -> bool:
        """Wait until none is there; whoever stays is killed. Return whether all went."""
        end = time.monotonic() + limit_s
        while self.are_there() and time.monotonic() < end:
            time.sleep(0.01)
        went = not self.are_there()
        if not went:
            self._show_stacks()
        self.kill(range(self._life.devices))
        for process in self._forked:
            process.kill()
            process.join()
        if self._script is not None:
            self._script.kill()
            self._script.wait()
        self._said.close()
        return went


def _become(rank: int, port: int, life: Life, said: str) -> None:
    leave_with_the_witness()
    become_launched(rank, port, life.devices)
    with Path(said).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        live(life)
    except BaseException:  # noqa: BLE001 -- shown as the interpreter would
        sys.excepthook(*sys.exc_info())
        os._exit(1)
