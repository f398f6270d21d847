"""Run one test body in ``n`` gloo ranks, with a deadline and every rank's stack on a hang."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
_SKIPPED = 77  # the exit code of a rank whose test body skips itself
AFTER_FAILURE_S = 2.0  # time for the other ranks to fail as well, or to be caught hanging


def fork_server() -> ForkServerContext:
    """Return a start method whose children have the slow imports behind them: 15 ms each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "torch.distributed",
            "lightning.pytorch",
            "pipeswift_lightning.strategies.pipeswift",
        ]
    )
    return context


def run_ranks(
    body: Callable[..., None],
    world_size: int,
    kwargs: dict[str, Any],
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Call ``body(**kwargs)`` in every rank, in a process group; both must be picklable.

    Raises:
        AssertionError: A rank failed or hung. It shows each one's traceback or stack, the root
            cause first.
        pytest.skip.Exception: All ranks have skipped the test.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        what = (body.__module__, body.__qualname__, kwargs, world_size, folder, deadline_s)
        # Not daemons: those may not have children, and data loaders start workers.
        ranks = [context.Process(target=_rank_main, args=(r, *what)) for r in range(world_size)]
        try:
            for process in ranks:
                process.start()
            _join(ranks, deadline_s)
            hung = [r for r, process in enumerate(ranks) if process.is_alive()]
            for r in hung:
                os.kill(ranks[r].pid or 0, signal.SIGUSR1)  # faulthandler writes the stack
            if hung:
                time.sleep(0.3)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        failures = _failures(ranks, hung, Path(folder))
        if not hung and all(process.exitcode == _SKIPPED for process in ranks):
            pytest.skip((Path(folder) / "rank0.txt").read_text())
    if failures:
        message = f"{len(failures)} of {world_size} ranks failed\n" + "\n".join(failures)
        raise AssertionError(message)


def _join(ranks: list[Any], deadline_s: float) -> None:
    """Wait for all ranks, but not long after the first failure."""
    end = time.monotonic() + deadline_s
    failed = False
    while time.monotonic() < end and any(p.is_alive() for p in ranks):
        if not failed and any(p.exitcode for p in ranks):
            failed = True
            end = min(end, time.monotonic() + AFTER_FAILURE_S)
        time.sleep(0.005)


def _failures(ranks: list[Any], hung: list[int], folder: Path) -> list[str]:
    found: list[tuple[int, str]] = []
    for r, process in enumerate(ranks):
        if r not in hung and process.exitcode == 0:
            continue
        file = folder / f"rank{r}.txt"
        text = file.read_text() if file.exists() else "it did not reach the test body"
        state = "hung" if r in hung else "failed"
        code = "" if r in hung or process.exitcode == 1 else f", exit code {process.exitcode}"
        when = file.stat().st_mtime_ns if file.exists() else 0
        found.append((when, f"--- rank {r} ({state}{code})\n{text}"))
    return [text for _, text in sorted(found)]  # the root cause wrote first


def _rank_main(
    rank: int,
    module: str,
    name: str,
    kwargs: dict[str, Any],
    world_size: int,
    folder: str,
    deadline_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with (Path(folder) / f"rank{rank}.txt").open("w") as report:
        faulthandler.register(signal.SIGUSR1, file=report, all_threads=True)
        # Should the test run be killed, no rank outlives it by long.
        faulthandler.dump_traceback_later(deadline_s + 10, exit=True, file=report)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            # A file has no port that could be in use.
            store = dist.FileStore(f"{folder}/store", world_size)
            limit = timedelta(seconds=deadline_s)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
            )
            function: Any = import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            function(**kwargs)
            if dist.is_initialized():
                dist.destroy_process_group()
        except pytest.skip.Exception as skipped:
            report.write(str(skipped))
            report.flush()
            os._exit(_SKIPPED)
        except BaseException:  # noqa: BLE001 -- reported by the parent
            traceback.print_exc(file=report)
            report.flush()
            sys.stdout.flush()
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)


__all__ = ["DEADLINE_S", "fork_server", "run_ranks"]
