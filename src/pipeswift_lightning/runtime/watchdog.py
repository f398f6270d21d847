"""End a run whose ranks can no longer finish it, quickly, everywhere, and with the true reason.

A rank that fails leaves its peers in a ``wait()`` that either never returns (NCCL, a stopped
process) or raises an error that names the wrong rank (gloo: "Connection closed by peer", from
whoever left first). So each rank keeps two threads:

* the *watcher* (:mod:`pipeswift_lightning.runtime.watcher`) stamps progress into the rendezvous
  store, looks after its neighbours and posts the first failure, which wins by ``compare_set``;
* the *guard* never touches the store, and so cannot block. It ends the process when a failure
  is known and the main thread does not come out by itself, or when the watcher is stuck because
  the store's host no longer answers.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from pipeswift_lightning.runtime.failure import (
    FailureKind,
    FailureReport,
    PipelineFailure,
    describe_exception,
)
from pipeswift_lightning.runtime.failure_board import FailureBoard
from pipeswift_lightning.runtime.progress import Progress, Stamp
from pipeswift_lightning.runtime.watcher import (
    HOST_RANK,
    LINGER_S,
    AwakeClock,
    Outcome,
    Watcher,
)

__all__ = ["EXIT_CODE", "FailureReport", "PipelineFailure", "Progress", "Watchdog"]

EXIT_CODE = 1
_EXPLAIN_S = 0.5  # a posted report reaches every rank within a tick or two
_UNWINDING_S = 2.0
_LAST_WORDS_S = 1.0  # for the callback; flushing output gets a fifth of it
_GUARD_POLL_S = 0.02
# One rank's tick costs the store's host 17 us of processor time (measured, TCPStore of torch
# 2.13), so thousands of ranks tick less often, lest they take more than a sixth of a core there.
_TICK_S_PER_RANK = 1e-4


class Watchdog:
    """Failure detection for one rank.

    Call :meth:`start` on every rank once the process group stands, and :meth:`stop` at the clean
    end. Between them the executor writes ``progress``; if an instruction raises, call
    :meth:`post_failure` with :meth:`describe` and re-raise; if a communication wait raises,
    raise :meth:`explain` instead, which finds out who really failed.

    A rank that computes for hours is never ended while its threads run, nor, on the same host,
    while it uses its processor. A stopped rank is ended (``SIGKILL``), so that no orphan stays.

    Args:
        store: The process group's store, wrapped so that no earlier watchdog has used these keys:
            ``PrefixStore(f"watchdog/{restart}/{run}", store)``.
        rank: This rank.
        world_size: Number of ranks.
        progress: The cell the executor writes.
        silence_s: A rank that shows no life for so long is lost; ranks that have waited in a
            ring for so long are in a deadlock. Longer than the slowest single transfer.
        tick_s: Seconds between two looks; a dead process on this host is seen within one. Raised
            by itself above 1,000 ranks.
        stage_of_rank: Gives the stage of a rank, for reports on ranks outside the pipeline.
        grace_s: Seconds the main thread has to notice a failure before the process is ended.
        unwind_s: Seconds it has to come out once it has called :meth:`explain` or
            :meth:`post_failure` (it runs exception hooks and closes loggers).
        join_s: Seconds :meth:`start` waits for the other ranks.
        expected_parent_pid: End the process when it loses this parent; ``None`` to not look.
        on_abort: Called, best effort, before the process is ended from here.

    Example:
        >>> from torch.distributed import HashStore
        >>> watchdog = Watchdog(HashStore(), rank=0, world_size=1, progress=Progress())
        >>> watchdog.start()
        >>> watchdog.stop()
        >>> print(watchdog.first_failure())
        None
    """

    def __init__(  # noqa: PLR0913 -- each is a knob of its own; all but four have a default
        self,
        store: Store,
        rank: int,
        world_size: int,
        progress: Progress,
        *,
        silence_s: float = 10.0,
        tick_s: float = 0.1,
        stage_of_rank: Callable[[int], int] | None = None,
        grace_s: float = 0.5,
        unwind_s: float = 10.0,
        join_s: float = 300.0,
        expected_parent_pid: int | None = None,
        on_abort: Callable[[FailureReport], None] | None = None,
    ) -> None:
        if not 0 < tick_s <= silence_s / 5:
            message = f"tick_s={tick_s} must be positive and at most silence_s / 5={silence_s / 5}"
            raise ValueError(message)
        self._store = store  # keeps a hosted store alive
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._silence_s = silence_s
        self._tick_s = max(tick_s, min(world_size * _TICK_S_PER_RANK, silence_s / 5))
        self._grace_s = grace_s
        self._unwind_s = unwind_s
        self._join_s = join_s
        self._on_abort = on_abort
        self._board = FailureBoard(store, rank, world_size)  # the main thread's
        self._outcome = Outcome()
        self._watcher = Watcher(
            self._board.clone(),
            self._outcome,
            rank=rank,
            world_size=world_size,
            progress=progress,
            silence_s=silence_s,
            tick_s=self._tick_s,
            stage_of_rank=stage_of_rank,
            parent_pid=expected_parent_pid,
        )
        self._main_knows = threading.Event()  # the main thread is on its way out
        self._stopped = threading.Event()
        self._guard = threading.Thread(target=self._keep, name="pipeswift-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch; every rank must call this, and it returns once all have.

        From then on each rank knows its neighbours' processes, so that none can be lost unseen.

        Raises:
            ValueError: The store has been used by an earlier watchdog.
            PipelineFailure: A rank failed meanwhile.
            TimeoutError: Not all ranks came within ``join_s``; it names those that did not.
        """
        self._watcher.start()
        self._guard.start()
        end = time.monotonic() + self._join_s
        while not self._watcher.met.wait(self._tick_s / 5):
            if self._outcome.report is not None:
                self._main_knows.set()
                self._wait_for_readers()
                raise PipelineFailure(self._outcome.report)
            if time.monotonic() > end:
                missing = self._board.missing()
                message = (
                    f"{len(missing)} of {self._world_size} ranks did not start within join_s="
                    f"{self._join_s:g} s, the first of them {missing[:8]}: look at their output"
                )
                raise TimeoutError(message)
            self._watcher.look_now()

    def stop(self) -> None:
        """End the watch; from here on only the main thread ends this process.

        After a clean run the others learn that this rank's silence is no failure. The store's
        host (rank 0) waits up to 2 s for the others to end, or to have read a failure. Safe to
        call twice, and on a watchdog that was never started.
        """
        self._stopped.set()
        if self._outcome.report is None:
            limit_s = LINGER_S + self._silence_s
        else:  # the store may never answer again, and only its host still has a duty
            limit_s = LINGER_S if self._rank == HOST_RANK else 2 * self._tick_s
        if self._watcher.is_running():
            self._watcher.stop(limit_s)
        if self._guard.is_alive():
            self._guard.join()

    def first_failure(self) -> FailureReport | None:
        """Return the failure that ended the run, or ``None``; costs nothing."""
        return self._outcome.report

    def describe(self, exc: BaseException) -> FailureReport:
        """Return the report that this rank failed with ``exc`` where its progress stands."""
        cause, detail = describe_exception(exc)
        mine = Stamp.of(self._progress, beat=0, still_s=0.0)
        told_to_end = isinstance(exc, KeyboardInterrupt | SystemExit)
        kind: FailureKind = "interrupt" if told_to_end else "exception"
        return self._watcher.report_on(self._rank, mine, kind, cause, detail)

    def post_failure(self, report: FailureReport) -> FailureReport:
        """Tell every rank about a failure; the first one posted stands. Main thread only.

        On the store's host this returns when the others have read it, after 2 s at most.

        Returns:
            The report that stands: another rank's if that was earlier.
        """
        self._main_knows.set()
        try:
            standing = self._board.post(report)
        except RuntimeError:  # the store is gone; the watcher finds out why, and may know better
            self._outcome.failed.wait(_EXPLAIN_S)
            standing = report
        self._outcome.settle(standing)
        self._wait_for_readers()
        return self._outcome.report or standing

    def explain(self, exc: BaseException, waiting_for: int | None) -> PipelineFailure:
        """Return the true reason why a communication wait raised ``exc``. Main thread only.

        A rank that leaves closes its connections, so the first to raise is rarely the one to
        blame: wait for a report first, then look at the peer.

        Args:
            exc: What the wait raised.
            waiting_for: The peer rank.
        """
        self._main_knows.set()
        self._watcher.look_now()
        if not self._outcome.failed.wait(_EXPLAIN_S):
            report = self._judge(exc, waiting_for)
            # This rank is the last one to suspect: one that unwinds loses its connections before
            # it has told why, and on a busy machine that takes a while.
            if report.rank != self._rank or not self._outcome.failed.wait(_UNWINDING_S):
                self.post_failure(report)
        self._wait_for_readers()
        return PipelineFailure(self._outcome.report or self.describe(exc))

    def _judge(self, exc: BaseException, peer: int | None) -> FailureReport:
        """Decide whose fault an unexplained communication error is; takes three ticks."""
        mine = self.describe(exc)
        if peer is None or peer == self._rank:
            return mine
        try:
            before = self._board.read([peer])[0]
            time.sleep(3 * self._tick_s)
            stamp = self._board.read([peer])[0]
        except RuntimeError:
            return mine
        if stamp.is_done:
            cause = f"rank {peer} has ended its run, and rank {self._rank} still needs it"
            return self._watcher.report_on(peer, stamp, "deadlock", cause, mine.detail)
        if stamp.beat == before.beat:  # on another host, or the watcher had seen it die
            cause = "killed: it closed its connections, and its heartbeat stopped"
            return self._watcher.report_on(peer, stamp, "killed", cause, mine.detail)
        return mine

    def _wait_for_readers(self) -> None:
        if self._rank == HOST_RANK and self._watcher.is_running():
            self._watcher.look_now()
            self._outcome.read_by_all.wait(LINGER_S)

    # -- the guard: no store operation below this line -----------------------------------------

    def _keep(self) -> None:
        clock = AwakeClock(self._silence_s / 4)
        beats, heard_s = -1, 0.0
        suspicion: FailureReport | None = None
        while not self._outcome.failed.wait(self._tick_s):
            now_s = clock.advance()
            if self._stopped.is_set():
                return
            if suspicion is not None:  # a tick old: a report in a living store would be here
                self._outcome.settle(suspicion)
            suspicion = self._watcher.dead_store_host()
            if self._watcher.beats != beats:
                beats, heard_s = self._watcher.beats, now_s
            elif now_s - heard_s > self._silence_s:
                self._outcome.settle(self._store_silent(now_s - heard_s))
        report = self._outcome.report
        if report is not None:
            self._fence(report)
            self._end(report)

    def _store_silent(self, quiet_s: float) -> FailureReport:
        """The watcher hangs in the store: name the rank that is stopped, else the store's host."""
        cause = f"silent for {quiet_s:.1f} s: the rendezvous store does not answer"
        for rank, process in self._watcher.neighbours.items():
            # Stopped, or ended a moment ago by a quicker neighbour's fence.
            if process.is_stopped() or not process.is_alive():
                stamp = self._watcher.host_stamp if rank == HOST_RANK else None
                return self._watcher.report_on(
                    rank, stamp, "silent", f"{cause}, and this rank's process is stopped"
                )
        return self._watcher.report_on(HOST_RANK, self._watcher.host_stamp, "store", cause)

    def _fence(self, report: FailureReport) -> None:
        """End a lost process on this host: should it wake up, it must find nothing to disturb."""
        process = self._watcher.neighbours.get(report.rank)
        if report.is_gone and process is not None:
            process.kill()

    def _end(self, report: FailureReport) -> None:
        """Let the main thread come out by itself; end the process when it does not."""
        began = time.monotonic()
        while not self._stopped.wait(_GUARD_POLL_S):
            limit_s = self._unwind_s if self._main_knows.is_set() else self._grace_s
            if time.monotonic() - began > limit_s:
                break
        else:
            return
        lines = "".join(f"[rank {self._rank}] {line}\n" for line in report.message().split("\n"))
        with contextlib.suppress(OSError):  # stderr may be closed, its reader gone
            os.write(2, lines.encode())
        if self._on_abort is not None:
            _within(_LAST_WORDS_S, lambda: self._call_back(report))
        _within(_LAST_WORDS_S / 5, sys.stdout.flush)
        if self._rank == HOST_RANK and self._watcher.is_running():
            self._outcome.read_by_all.wait(LINGER_S)
        os._exit(EXIT_CODE)

    def _call_back(self, report: FailureReport) -> None:
        try:
            if self._on_abort is not None:
                self._on_abort(report)
        except Exception:  # noqa: BLE001 -- the process ends anyway; the report must stay the news
            traceback.print_exc()


def _within(limit_s: float, action: Callable[[], object]) -> None:
    """Run ``action``, but do not wait for it longer than ``limit_s``."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
