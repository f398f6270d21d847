"""The watchdog of one Trainer call."""

import os

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
        self._runs = 0
        self._watchdog: Watchdog | None = None
        self._told = False

    def start(self, groups: MeshGroups) -> None:
        """Begin to watch; collective over all ranks."""
        if groups.mesh.world_size == 1:
            return
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(
            f"pipeswift/watchdog/{restart}/{self._runs}",
            _get_default_store(),
        )
        self._runs += 1
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
