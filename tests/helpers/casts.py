"""Run a `Scenario` on real ranks: forked (fast), or started by a launcher as a user would."""

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeswift_lightning.runtime.process import ProcessIdentity
from tests.helpers.distributed import fork_server
from tests.helpers.faults import Ending, start_server
from tests.helpers.scenario import Scenario, run
from tests.helpers.scripts import started

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("scripted.py"))
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def perform(scenario: Scenario, *, limit_s: float = 25.0) -> list[Ending]:
    """Run in forked ranks that Lightning takes for children of its own launcher: a second or two.

    Rank 0 is no parent of the others here; :func:`launch` is for what depends on that.
    """
    context = fork_server()
    start_server(context)
    with tempfile.TemporaryDirectory() as name:
        scenario = replace(scenario, folder=name)
        port = free_port()
        ranks = [
            context.Process(target=_become, args=(r, port, scenario.to_json()))
            for r in range(scenario.devices)
        ]
        began = time.monotonic()
        try:
            for process in ranks:
                process.start()
            ended_s = _until_gone([p.is_alive for p in ranks], began + limit_s)
        finally:
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGUSR1)  # its stack ends what it said
            if None in codes:
                time.sleep(0.3)
            for process in ranks:
                process.kill()
                process.join()
        return _endings(scenario, codes, ended_s, began)


def launch(
    scenario: Scenario, *, launcher: Sequence[str] = (), limit_s: float = 90.0
) -> tuple[int | None, list[Ending]]:
    """Start the script once, by ``launcher``; whatever starts the other ranks is under test.

    Without a launcher the first process has the slow imports behind it; those that it starts
    never have.

    Returns:
        The exit code of the first process (``None``: it was still there when time was up), and
        each rank's ending. Of the others only rank 0's code is known, and only if it was the first.
    """
    with tempfile.TemporaryDirectory() as name:
        scenario = replace(scenario, folder=name)
        said = Path(name) / "launcher"
        command, variables = (SCRIPT, scenario.to_json()), {"PYTHONPATH": PYTHON_PATH, **ONE_THREAD}
        first: Any
        if launcher:
            began = time.monotonic()
            with said.open("wb") as file:
                first = subprocess.Popen(
                    [*launcher, *command], env={**os.environ, **variables}, stderr=file, stdout=file
                )
        else:
            start_server(fork_server())
            began = time.monotonic()
            first = started(*command, said=said, environment=variables)
        is_there = [_presence(Path(name) / f"pid{r}", first) for r in range(scenario.devices)]
        try:
            ended_s = _until_gone([*is_there, lambda: _code(first) is None], began + limit_s)
        finally:
            for file in Path(name).glob("pid*"):
                ProcessIdentity.of(int(file.read_text())).kill()
            code = _code(first)
            first.kill()
            _ = first.wait() if isinstance(first, subprocess.Popen) else first.join()
        codes = [None if r not in ended_s else code for r in range(scenario.devices)]
        return code, _endings(scenario, codes, ended_s, began)


def _code(first: Any) -> int | None:
    code: int | None = first.poll() if isinstance(first, subprocess.Popen) else first.exitcode
    return code


def _presence(file: Path, first: Any) -> Callable[[], bool]:
    """Return whether a rank is there: it writes its pid, and may never come to that."""

    def is_there() -> bool:
        if not file.exists() or not file.read_text():
            return _code(first) is None
        return ProcessIdentity.of(int(file.read_text())).is_alive()

    return is_there


def _until_gone(is_there: Sequence[Callable[[], bool]], end: float) -> dict[int, float]:
    gone_s: dict[int, float] = {}
    while len(gone_s) < len(is_there) and time.monotonic() < end:
        for r, check in enumerate(is_there):
            if r not in gone_s and not check():
                gone_s[r] = time.monotonic()
        time.sleep(0.005)
    return gone_s


def _endings(
    scenario: Scenario, codes: Sequence[int | None], ended_s: dict[int, float], began: float
) -> list[Ending]:
    folder = Path(scenario.folder)
    struck = folder / "struck"
    assert struck.exists() or not scenario.fault, f"the fault never struck: {scenario}"
    since = float(struck.read_text()) if struck.exists() else began
    files = [folder / f"stderr{r}" for r in range(scenario.devices)]
    return [
        Ending(
            code=codes[r],
            after_s=ended_s.get(r, float("inf")) - since,
            said=files[r].read_text(errors="replace") if files[r].exists() else "",
        )
        for r in range(scenario.devices)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_launched(rank: int, port: int, devices: int) -> None:
    """Let this process be one rank: the variables are those that Lightning's launcher sets."""
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _become(rank: int, port: int, text: str) -> None:
    scenario = Scenario.from_json(text)
    become_launched(rank, port, scenario.devices)
    said = (Path(scenario.folder) / f"stderr{rank}").open("wb", buffering=0)
    os.dup2(said.fileno(), 2)
    os.dup2(said.fileno(), 1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    try:
        run(scenario)
    except BaseException:  # noqa: BLE001 -- shown as the interpreter would
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def leave_when_gone(parent: Any) -> None:
    """Wait for a parent that never was, as a rank that has not joined yet."""
    from pipeswift_lightning.strategies.launcher import _leave_with

    _leave_with(parent, lambda: False)
