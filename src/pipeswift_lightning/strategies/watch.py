"""The watchdog of one Trainer call."""

from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pipeswift_lightning.runtime.communication import CommunicationError, is_communication_error
from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.watchdog import PipelineFailure, Watchdog
from pipeswift_lightning.strategies.launcher import launcher_pid

__all__ = ["FailureWatch"]


class FailureWatch:
    """Starts a `Watchdog` for each Trainer call, and turns errors into their root cause."""

    def __init__(self, silence_s: float) -> None:
        self.progress = Progress()
        self.silence_s = silence_s
        self._watchdog: Watchdog | None = None
        self._told = False
        self._rank = 0
        self.has_begun = False  # ever: all ranks were there

    def start(self, mesh: Mesh, rank: int) -> None:
        """Begin to watch; collective over all ranks."""
        if mesh.world_size == 1:
            return
        store = _fresh_store(rank)
        self._told = False
        self._rank = rank
        self._watchdog = Watchdog(
            store,
            rank,
            mesh.world_size,
            self.progress,
            silence_s=self.silence_s,
            stage_of_rank=lambda other: mesh.coordinate(other).stage,
            expected_parent_pid=launcher_pid(),
        )
        self._watchdog.start()
        self.has_begun = True

    def stop(self) -> None:
        """End the watch."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def root_cause(self, error: BaseException, mesh: Mesh) -> BaseException:
        """Return what to raise instead of a communication error: the failure behind it."""
        if self._watchdog is None:
            return error
        self._told = True
        position = error.peer if isinstance(error, CommunicationError) else None
        peer = None
        if position is not None:
            replica = mesh.coordinate(self._rank).replica
            peer = mesh.rank(stage=position, replica=replica)
        with suppress(RuntimeError):
            return self._watchdog.explain(error, peer)
        # A signal came meanwhile (torchrun's agent sends SIGTERM when a rank dies), and its handler
        # failed: Lightning's begins a collective with ranks that are gone. The reason is the same.
        return self._watchdog.explain(error, peer)

    def told(self, error: BaseException, mesh: Mesh) -> BaseException:
        """Tell the other ranks that this one fails; return what to raise: ``error`` or its cause.

        ``error`` gets a note of where it happened.
        """
        if self._watchdog is None or self._told or isinstance(error, PipelineFailure):
            return error
        if is_communication_error(error):
            return self.root_cause(error, mesh)
        report = self._watchdog.describe(error)
        standing = self._watchdog.post_failure(report)
        # Not before: Ctrl-C is pressed twice, and the second may end this very call.
        self._told = True
        error.add_note(f"pipeswift: on {report.who()}, {report.activity()}")
        if standing.rank != report.rank and standing.cause != report.cause:
            first = standing.message().split("\n")[0]
            error.add_note(f"pipeswift: another rank had failed before. {first}")
        return error

    def require_whole(self, what: str) -> None:
        """Refuse what needs all ranks once one has failed: it would never end, or be partial.

        Raises:
            PipelineFailure: A rank has failed.
        """
        report = self._watchdog.first_failure() if self._watchdog is not None else None
        if report is not None:
            failure = PipelineFailure(report)
            failure.add_note(f"pipeswift: hence not {what}, which needs all ranks")
            raise failure

    @property
    def failed(self) -> bool:
        """Whether some rank has failed."""
        return self._told or (
            self._watchdog is not None and self._watchdog.first_failure() is not None
        )


def _fresh_store(rank: int) -> PrefixStore:
    """Return a part of the default store that no earlier run has written to.

    Rank 0 counts the runs and tells the others: a process may see many strategies (one after the
    other on one process group, or over a launcher's store that outlives restarts), and ranks that
    join late have not seen them all.
    """
    store = _get_default_store()
    box = [store.add("pipeswift/runs", 1) if rank == 0 else 0]
    dist.broadcast_object_list(box, src=0)
    return PrefixStore(f"pipeswift/watchdog/{box[0]}", store)
