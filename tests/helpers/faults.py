"""Ranks that are made to fail: what each one said, how it ended, and how long that took."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeswift_lightning.runtime.process import ProcessIdentity
from pipeswift_lightning.runtime.watchdog import PipelineFailure, Progress, Watchdog
from tests.helpers.distributed import fork_server

MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Scene:
    """How ranks are started; ``body`` runs in each of them and must be picklable."""

    body: Callable[["Actor"], None]
    world_size: int = 4
    store: str = "tcp"  # rank 0 hosts it; "agent": this process does, like torchrun's; "file"
    apart: bool = False  # let every rank believe that it is alone on its host
    silence_s: float = 2.0
    grace_s: float = 0.5
    limit_s: float = 20.0
    victim: int = 0
    outlasted: bool = False  # by the victim: once the others have gone, nothing else is awaited
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank's process ended."""

    code: int | None  # None: it was still there when time was up
    after_s: float  # seconds after the fault struck (or after the start, if none did)
    said: str  # its stderr


@dataclass(kw_only=True)
class Actor:
    """One rank, as ``body`` sees it."""

    rank: int
    scene: Scene
    watchdog: Watchdog
    progress: Progress
    folder: Path
    struck: Any

    def strike(self) -> None:
        """Say that the fault happens now."""
        self.struck.value = time.monotonic()

    def exchange(self, what: str, micro_batch: int, peer: int, *, send: bool) -> None:
        """Send to or receive from ``peer`` as an executor does: stamped, its errors explained."""
        self.progress.micro_batch = micro_batch
        tensor = torch.zeros(1000)
        try:
            if send:
                dist.send(tensor, peer)
                return
            self.progress.doing = f"waiting for the {what} of micro-batch {micro_batch} " + (
                f"from rank {peer}"
            )
            self.progress.waiting_for = peer
            dist.recv(tensor, peer)
        except RuntimeError as exc:
            raise self.watchdog.explain(exc, peer) from exc
        finally:
            self.progress.waiting_for = None

    def run_pipeline(self, num_steps: int, at: Callable[[int, int], None] | None = None) -> None:
        """Run forward and backward of every micro-batch; ``at(step, micro_batch)`` in between."""
        first, last = self.rank == 0, self.rank == self.scene.world_size - 1
        for step in range(num_steps):
            self.progress.step, self.progress.batch = step, f"batch {step}"
            for i in range(MICRO_BATCHES):
                if not first:
                    self.exchange("activation", i, self.rank - 1, send=False)
                self.progress.micro_batch = i
                self.progress.doing = f"Forward of micro-batch {i}"
                if at is not None:
                    at(step, i)
                if not last:
                    self.exchange("activation", i, self.rank + 1, send=True)
                    self.exchange("gradient", i, self.rank + 1, send=False)
                self.progress.doing = f"Backward of micro-batch {i}"
                if not first:
                    self.exchange("gradient", i, self.rank - 1, send=True)


def play(scene: Scene) -> list[Ending]:
    """Run ``scene``; return every rank's ending. No process is left behind."""
    context = fork_server()
    struck = context.Value("d", 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        agent = _tcp_store(0, is_host=True) if scene.store == "agent" else None
        port = agent.port if agent is not None else _free_port()
        start_server(context)
        ranks = [
            context.Process(target=_act, args=(r, scene, folder, port, struck))
            for r in range(scene.world_size)
        ]
        began = time.monotonic()
        try:
            for process in ranks:
                process.start()
            stays = scene.victim if scene.outlasted else None
            ended_s = _watch(ranks, began + scene.limit_s, stays)
        finally:
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGUSR1)  # its stack ends what it said
            if None in codes:
                time.sleep(0.2)
            for process in ranks:
                process.kill()
                process.join()
        since = struck.value or began
        return [
            Ending(
                code=codes[r],
                after_s=ended_s.get(r, float("inf")) - since,
                said=(folder / f"stderr{r}").read_text(),
            )
            for r in range(scene.world_size)
        ]


def start_server(context: ForkServerContext) -> None:
    """Import what ranks need before the time starts to run: seconds, on a loaded machine."""
    first = context.Process(target=_nothing)
    first.start()
    first.join()


def strike_in_step(actor: Actor, fault: Callable[[Actor], None]) -> Callable[[int, int], None]:
    """Return what makes the victim fail in the middle of step 2, in micro-batch 3."""

    def at(step: int, micro_batch: int) -> None:
        if actor.rank == actor.scene.victim and (step, micro_batch) == (2, 3):
            time.sleep(0.25)  # until this micro-batch is stamped
            actor.strike()
            fault(actor)

    return at


def send_self(number: signal.Signals) -> Callable[[Actor], None]:
    """Return a fault: this signal."""
    return lambda _: os.kill(os.getpid(), number)


def sleep_holding_the_lock(seconds: float) -> None:
    """Hold the interpreter lock without using the processor."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _nothing() -> None:
    """Do nothing."""


def _tcp_store(port: int, *, is_host: bool) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, is_host, wait_for_workers=False)


def _alone(rank: int, current: ProcessIdentity) -> Callable[[], ProcessIdentity]:
    return lambda: replace(current, host=f"host{rank}")


def _watch(ranks: list[Any], end: float, stays: int | None) -> dict[int, float]:
    ended_s: dict[int, float] = {}
    awaited = set(range(len(ranks))) - {stays}
    while awaited - ended_s.keys() and time.monotonic() < end:
        for r, process in enumerate(ranks):
            if r not in ended_s and not process.is_alive():
                ended_s[r] = time.monotonic()
        time.sleep(0.005)
    return ended_s


def _act(rank: int, scene: Scene, folder: Path, port: int, struck: Any) -> None:
    torch.set_num_threads(1)
    with (folder / f"stderr{rank}").open("wb") as said:
        os.dup2(said.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    store: Any = (
        dist.FileStore(str(folder / "store"), scene.world_size)
        if scene.store == "file"
        else _tcp_store(port, is_host=rank == 0 and scene.store == "tcp")
    )
    if scene.apart:
        ProcessIdentity.current = _alone(rank, ProcessIdentity.current())
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=scene.world_size,
        timeout=timedelta(seconds=scene.limit_s),
    )
    progress = Progress(stage=rank)
    watchdog = Watchdog(
        dist.PrefixStore("watchdog/0", store),
        rank,
        scene.world_size,
        progress,
        silence_s=scene.silence_s,
        grace_s=scene.grace_s,
        stage_of_rank=_same,
        **scene.options,
    )
    watchdog.start()
    dist.barrier()
    actor = Actor(
        rank=rank, scene=scene, watchdog=watchdog, progress=progress, folder=folder, struck=struck
    )
    try:
        scene.body(actor)
    except PipelineFailure:
        _leave(watchdog)
    except Exception as exc:  # noqa: BLE001 -- reported by the watchdog
        watchdog.post_failure(watchdog.describe(exc))
        _leave(watchdog)
    watchdog.stop()
    failure = watchdog.first_failure()
    print("ended cleanly" if failure is None else failure.message(), file=sys.stderr, flush=True)
    os._exit(0)


def _leave(watchdog: Watchdog) -> None:
    traceback.print_exc()
    sys.stderr.flush()
    watchdog.stop()
    os._exit(1)


def _same(rank: int) -> int:
    return rank
