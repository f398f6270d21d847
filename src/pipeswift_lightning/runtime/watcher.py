"""The thread that tells the other ranks how this one fares, and looks after them.

It does all the store's work and may therefore block for ever: an operation on a stopped store
host has no time limit (measured: ``check`` ignores the store's timeout). Nothing that ends the
process may depend on it; that is the guard's, in :mod:`pipeswift_lightning.runtime.watchdog`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeswift_lightning.runtime.blocked import distributed_call
from pipeswift_lightning.runtime.deadlock import find_deadlock, find_parting
from pipeswift_lightning.runtime.failure import FailureKind, FailureReport, describe_exception
from pipeswift_lightning.runtime.failure_board import FailureBoard
from pipeswift_lightning.runtime.process import ProcessIdentity
from pipeswift_lightning.runtime.progress import EVERYONE, NeighbourProgress, Progress, Stamp

__all__ = ["AwakeClock", "Outcome", "Watcher"]

HOST_RANK = 0  # hosts the TCPStore, unless a launcher's agent does
LINGER_S = 2.0  # how long the store's host waits for the others to have read the report
_STORE_LOSS_S = 0.3  # a killed process closes its sockets a moment before it is seen as dead
_LINGER_POLL_S = 0.01
_FEW_RANKS = 64
_BUSY_S = 0.02  # two ticks of the kernel's clock: a hung process does not use that much


class AwakeClock:
    """Seconds that this thread has lived through.

    A thread that was itself stopped, or starved by a main thread that held the interpreter
    lock, must not count that time as the silence of others.

    Args:
        longest_gap_s: What a gap between two looks counts at most.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self.now_s = 0.0
        self._longest_gap_s = longest_gap_s
        self._last = time.monotonic()

    def advance(self) -> float:
        """Return the time after adding what passed since the last call."""
        now = time.monotonic()
        self.now_s += min(now - self._last, self._longest_gap_s)
        self._last = now
        return self.now_s


class Outcome:
    """The first failure, as all threads of this rank see it: settled once, never changed."""

    def __init__(self) -> None:
        self.report: FailureReport | None = None
        self.failed = threading.Event()
        self.read_by_all = threading.Event()  # the store's host may go
        self._lock = threading.Lock()

    def settle(self, report: FailureReport) -> None:
        """Take ``report`` as the failure unless there is one."""
        with self._lock:
            if self.report is None:
                self.report = report
                self.failed.set()


@dataclass(slots=True)
class _Heard:
    """The last sign of life of the rank that this one watches."""

    beat: int = -1
    at_s: float = 0.0  # by this rank's clock
    cpu_s: float | None = None  # its processor time half-way through this rank's patience


class Watcher:
    """One tick: stamp, look for a posted failure, look after the neighbours.

    The number of store operations in a tick does not depend on the number of ranks: one stamp
    written, one key checked, two stamps read (the next rank's and the store host's).

    Args:
        board: This thread's own.
        outcome: Shared with the guard and the main thread.
        rank: This rank.
        world_size: Number of ranks.
        progress: Written by the main thread.
        silence_s: A rank without a heartbeat for so long is taken for lost.
        tick_s: Seconds from tick to tick.
        stage_of_rank: Names the stage of a rank that is outside its pipeline.
        parent_pid: End when this process is no longer the parent; ``None`` to not look.
    """

    def __init__(  # noqa: PLR0913 -- built in one place, from the watchdog's own arguments
        self,
        board: FailureBoard,
        outcome: Outcome,
        *,
        rank: int,
        world_size: int,
        progress: Progress,
        silence_s: float,
        tick_s: float,
        stage_of_rank: Callable[[int], int] | None,
        parent_pid: int | None,
    ) -> None:
        self.beats = 0
        self.met = threading.Event()  # all ranks have joined, and the neighbours are known
        self.neighbours: dict[int, ProcessIdentity] = {}  # ranks on this host
        self.host_stamp: Stamp | None = None  # the store host's last: readable when it is gone
        self._board = board
        self._outcome = outcome
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._silence_s = silence_s
        self._tick_s = tick_s
        self._stage_of_rank = stage_of_rank
        self._parent_pid = parent_pid
        self._identity = replace(ProcessIdentity.current(), progress_fd=progress.share())
        self._cells: dict[int, NeighbourProgress] = {}  # by rank, on this host
        self._clock = AwakeClock(silence_s / 4)
        self._successor = (rank + 1) % world_size
        self._heard = _Heard()
        self._ticked_s = time.monotonic()
        self._place: tuple[object, ...] = ()
        self._moved_s = 0.0  # when this rank last made progress
        self._main_thread = threading.get_ident()
        self._waiting_for: int | None = None
        self._next_walk_s = silence_s
        # A walk reads many stamps, and thousands of ranks may wait.
        self._walk_s = silence_s / 4 if world_size <= _FEW_RANKS else silence_s
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeswift-watcher", daemon=True)

    def start(self) -> None:
        """Join the board, then watch."""
        self._board.join(self._identity, self._stamp())
        self._thread.start()

    def look_now(self) -> None:
        """Do not wait for the next tick."""
        self._wake.set()

    def stop(self, limit_s: float) -> None:
        """End the thread: cleanly if nothing failed."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(limit_s)

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def report_on(
        self, rank: int, stamp: Stamp | None, kind: FailureKind, cause: str, detail: str = ""
    ) -> FailureReport:
        """Return this rank's report that ``rank`` failed, last seen as ``stamp`` says."""
        seen = stamp or Stamp(beat=0, doing="unknown: it could not be asked")
        if kind in ("killed", "silent", "store") and rank in self._cells:
            seen = self._cells[rank].stamp(seen.beat)  # the stamp may be a tick old
        stage = seen.stage
        if stage is None and self._stage_of_rank is not None:
            stage = self._stage_of_rank(rank)
        mine = Stamp.of(self._progress, beat=0, still_s=0.0)
        return FailureReport(
            rank=rank,
            stage=stage,
            # A rank that could not be asked, or stood between two: say what is missed from it.
            micro_batch=mine.micro_batch
            if seen.micro_batch is None and mine.waiting_for == rank
            else seen.micro_batch,
            doing=seen.doing,
            cause=cause,
            detail=detail,
            reporter=self._rank,
            batch=seen.batch,
            seen_while="" if rank == self._rank else mine.doing,
            kind=kind,
        )

    def killed(self, rank: int, identity: ProcessIdentity, stamp: Stamp | None) -> FailureReport:
        """Return the report that the process of ``rank`` is gone."""
        cause = f"killed: process {identity.pid} on {identity.node} is gone and left no report"
        return self.report_on(rank, stamp, "killed", cause)

    def dead_store_host(self) -> FailureReport | None:
        """Return the report that rank 0 is gone, if it is, without asking the store.

        The store may have died with it, or may block, because a forked child of rank 0 (a data
        worker) still holds its sockets.
        """
        process = self.neighbours.get(HOST_RANK)
        is_done = self.host_stamp is not None and self.host_stamp.is_done
        if process is None or is_done or process.is_alive():
            return None
        stuck_s = time.monotonic() - self._ticked_s
        if stuck_s > self._silence_s / 2:  # it hung first: a neighbour was quicker and ended it
            cause = f"silent for {stuck_s:.1f} s: the rendezvous store did not answer"
            return self.report_on(HOST_RANK, self.host_stamp, "silent", cause)
        return self.killed(HOST_RANK, process, self.host_stamp)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._outcome.failed.is_set():
                self._tick()
                self._ticked_s = time.monotonic()
                self._wake.wait(self._tick_s)
                self._wake.clear()
            if not self._outcome.failed.is_set():
                self._board.finish(self._stamp(is_done=True))
            elif self._rank != HOST_RANK:
                self._board.acknowledge()
            if self._rank == HOST_RANK:
                self._linger()
        except RuntimeError as exc:  # torch raises it, and its DistError, for a store that is gone
            self._store_lost(exc)
        except Exception as exc:  # noqa: BLE001 -- a dead watcher would look like a dead rank
            cause, detail = describe_exception(exc)
            cause = f"in the watcher: {cause}"
            self._post(self.report_on(self._rank, None, "exception", cause, detail))

    def _tick(self) -> None:
        self.beats += 1
        self._clock.advance()
        # Processes first: a dead store host must be named by its death, not by the lost store.
        self._check_processes()
        self._board.stamp(self._stamp())
        if (report := self._board.posted()) is not None:
            self._outcome.settle(report)
            return
        self._check_parent()
        if self.met.is_set():
            self._check_heartbeat()
            self._check_own_wait()
            return
        everyone_joined = self._board.has_everyone_joined()
        self.neighbours = self._board.neighbours(self._identity.host)
        self._map_neighbours()
        if everyone_joined:
            self.met.set()

    def _map_neighbours(self) -> None:
        for rank, process in self.neighbours.items():
            if rank not in self._cells and process.progress_fd is not None:
                with contextlib.suppress(OSError):  # another user's, or gone: the stamp must do
                    self._cells[rank] = NeighbourProgress(process.pid, process.progress_fd)

    def _stamp(self, *, is_done: bool = False) -> Stamp:
        self._progress.publish()  # what was written without a mark
        place = Stamp.of(self._progress, beat=0, still_s=0.0).place
        if place != self._place:
            self._place, self._moved_s = place, self._clock.now_s
        still_s = self._clock.now_s - self._moved_s
        stamp = Stamp.of(self._progress, beat=self.beats, still_s=still_s, is_done=is_done)
        if stamp.waiting_for is None and still_s > self._silence_s / 2:
            call = distributed_call(self._main_thread)
            if call is not None:
                stamp = replace(stamp, waiting_for=EVERYONE, doing=f"{stamp.doing}, {call}")
        self._waiting_for = stamp.waiting_for
        return stamp

    def _post(self, report: FailureReport) -> None:
        self._outcome.settle(self._board.post(report))

    def _check_processes(self) -> None:
        for rank, identity in list(self.neighbours.items()):
            if identity.is_alive():
                continue
            stamp = self.host_stamp if rank == HOST_RANK else self._board.read([rank])[0]
            if stamp is not None and stamp.is_done:
                del self.neighbours[rank]
                continue
            self._post(self.killed(rank, identity, stamp))
            return

    def _check_heartbeat(self) -> None:
        stamp, self.host_stamp = self._board.read([self._successor, HOST_RANK])
        if stamp.is_done:  # it watches no one any more: watch whom it watched
            self._successor = (self._successor + 1) % self._world_size
            self._heard = _Heard()
            return
        if self._successor == self._rank:
            return
        if stamp.beat != self._heard.beat:
            self._heard = _Heard(beat=stamp.beat, at_s=self._clock.now_s)
            return
        process = self.neighbours.get(self._successor)
        quiet_s = self._clock.now_s - self._heard.at_s
        if process is not None and quiet_s > self._silence_s / 2 and self._heard.cpu_s is None:
            self._heard.cpu_s = process.cpu_s()
        if quiet_s <= self._silence_s:
            return
        cause = f"silent for {quiet_s:.1f} s: no heartbeat"
        if process is not None and process.is_stopped():
            cause += ", its process is stopped"
        elif process is not None and process.cpu_s() - (self._heard.cpu_s or 0.0) > _BUSY_S:
            # Extension code may hold the interpreter lock for long: it computes, it is not lost.
            self._heard = _Heard(beat=stamp.beat, at_s=self._clock.now_s)
            return
        self._post(self.report_on(self._successor, stamp, "silent", cause))

    def _check_own_wait(self) -> None:
        now_s = self._clock.now_s
        if self._waiting_for is None or now_s - self._moved_s < self._silence_s:
            self._next_walk_s = 0.0
            return
        if now_s < self._next_walk_s:
            return
        self._next_walk_s = now_s + self._walk_s
        if self._waiting_for == EVERYONE:
            chain = None
        else:
            chain = find_deadlock(self._rank, lambda r: self._board.read([r])[0], self._silence_s)
        if chain is None:
            # One rank looks at all: the store's host, or the next one once that has ended.
            if self._rank == HOST_RANK or (self.host_stamp is not None and self.host_stamp.is_done):
                self._check_parting()
            return
        last, last_stamp = chain[-1]
        waits = "\n".join(f"    rank {r}: {stamp.doing}" for r, stamp in chain)
        if last_stamp.is_done:
            cause = f"deadlock: rank {last} has ended its run, and others still wait for it"
            waits += " (its last word; it has ended)"
            named, stamp = last, last_stamp
        else:
            ring = [r for r, _ in chain]
            ring = ring[ring.index(last_stamp.waiting_for or 0) :]
            cause = f"deadlock: ranks {', '.join(map(str, ring))} wait for each other"
            named = min(ring)  # so that every rank of the ring names the same one
            stamp = dict(chain)[named]
        self._post(self.report_on(named, stamp, "deadlock", cause, f"  waits:\n{waits}"))

    def _check_parting(self) -> None:
        stamps = self._board.read(range(self._world_size))
        places = find_parting(stamps, self._silence_s)
        if places is None:
            return
        waits = "\n".join(
            f"    rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {doing}"
            for doing, ranks in places.items()
        )
        odd = next(iter(places.values()))[0]
        cause = f"deadlock: all ranks wait, and rank {odd} not for what the others wait for"
        self._post(self.report_on(odd, stamps[odd], "deadlock", cause, f"  waits:\n{waits}"))

    def _check_parent(self) -> None:
        if self._parent_pid is None or os.getppid() == self._parent_pid:
            return
        host = self.neighbours.get(HOST_RANK)
        host_is_done = self.host_stamp is not None and self.host_stamp.is_done
        if host_is_done and (host is None or host.pid == self._parent_pid):
            return  # the parent was rank 0 and has ended cleanly before its children
        cause = f"its parent, process {self._parent_pid}, is gone"
        self._post(self.report_on(self._rank, self._stamp(), "parent", cause))

    def _store_lost(self, exc: RuntimeError) -> None:
        host = self.neighbours.get(HOST_RANK)
        if self.host_stamp is not None and self.host_stamp.is_done:
            return  # rank 0 ended cleanly and took the store along
        end = time.monotonic() + _STORE_LOSS_S
        while host is not None and host.is_alive() and time.monotonic() < end:
            time.sleep(_LINGER_POLL_S)
        report = self.dead_store_host()
        if report is None:
            cause = f"the rendezvous store is gone, and with it, most likely, its host: {exc}"
            report = self.report_on(HOST_RANK, self.host_stamp, "store", cause.split("\n")[0])
        self._outcome.settle(report)

    def _linger(self) -> None:
        """Keep the store until the others no longer need it (the process may end after this)."""
        end = time.monotonic() + LINGER_S
        while time.monotonic() < end:
            self.beats += 1
            if (report := self._outcome.report or self._board.posted()) is not None:
                self._outcome.settle(report)
            others = self._world_size - 1
            if report is not None and report.is_gone and report.rank != self._rank:
                others -= 1
            ended = int(report is None)  # its own clean end counts among those released
            if self._board.num_released() >= others + ended:
                break
            time.sleep(_LINGER_POLL_S)
        self._outcome.read_by_all.set()
