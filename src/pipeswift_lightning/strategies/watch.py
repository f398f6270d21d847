"""The watchdog of one Trainer call."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pipeswift_lightning.runtime.communication import CommunicationError
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.watchdog import PipelineFailure, Watchdog
from pipeswift_lightning.strategies.launcher import launcher_pid

__all__ = ["FailureWatch"]


class FailureWatch:
    """Starts a `Watchdog` for each Trainer call, and turns errors into their root cause."""

    def __init__(self, silence_s: float) -> None:
        self.progress = Progress()
        self._silence_s = silence_s
        self._watchdog: Watchdog | None = None
        self._told = False

    def start(self, groups: MeshGroups) -> None:
        """Begin to watch; collective over all ranks."""
        if groups.mesh.world_size == 1:
            return
        store = _fresh_store(groups.rank)
        self._told = False
        self._watchdog = Watchdog(
            store,
            groups.rank,
            groups.mesh.world_size,
            self.progress,
            silence_s=self._silence_s,
            stage_of_rank=lambda rank: groups.mesh.coordinate(rank).stage,
            expected_parent_pid=launcher_pid(),
        )
        self._watchdog.start()

    def stop(self) -> None:
        """End the watch."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def root_cause(self, error: CommunicationError, groups: MeshGroups) -> BaseException:
        """Return what to raise instead of a communication error: the failure behind it."""
        if self._watchdog is None:
            return error
        self._told = True
        peer = None
        if error.peer is not None:
            peer = groups.mesh.rank(stage=error.peer, replica=groups.coordinate.replica)
        return self._watchdog.explain(error, peer)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with ``error``."""
        if self._watchdog is None or self._told or isinstance(error, PipelineFailure):
            return
        self._told = True
        self._watchdog.post_failure(self._watchdog.describe(error))

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
