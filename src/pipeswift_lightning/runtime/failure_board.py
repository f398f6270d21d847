"""What ranks tell each other about failures, through a ``torch.distributed`` store."""

from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from pipeswift_lightning.runtime.failure import FailureReport
from pipeswift_lightning.runtime.process import ProcessIdentity
from pipeswift_lightning.runtime.progress import Stamp

__all__ = ["FailureBoard"]

_FIRST = "first"  # the first failure's report: written once, by compare_set


class FailureBoard:
    """Keys and their meaning, in one place; every method is a fixed number of store operations.

    A store client serialises its operations, and a blocked one blocks them all: each thread
    takes a board of its own (:meth:`clone`). Store errors pass through as ``RuntimeError``.

    Args:
        store: TCPStore or FileStore, or a prefix of one, that no earlier board has used.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def clone(self) -> "FailureBoard":
        """Return a board on the same keys over a connection of its own."""
        store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        return FailureBoard(store, self._rank, self._world_size)

    def join(self, identity: ProcessIdentity, stamp: Stamp) -> None:
        """Say who this rank is. The last to join finds everyone's identity and stamp present.

        Raises:
            ValueError: The store holds this rank already.
        """
        if self._store.check([f"stamp/{self._rank}"]):
            message = (
                f"rank {self._rank} has already joined this store: a watchdog needs a store no "
                "earlier one has used; wrap it in a PrefixStore that names the restart and the run"
            )
            raise ValueError(message)
        self.stamp(stamp)
        slot = self._store.add(f"host/{identity.host}/count", 1) - 1
        self._store.set(f"host/{identity.host}/{slot}", f"{self._rank} {identity.to_json()}")
        self._store.add("joined", 1)

    def has_everyone_joined(self) -> bool:
        """Whether all ranks have joined."""
        return int(self._store.add("joined", 0)) >= self._world_size

    def missing(self) -> list[int]:
        """Return the ranks that have not joined; one operation a rank, for an error message."""
        return [r for r in range(self._world_size) if not self._store.check([f"stamp/{r}"])]

    def neighbours(self, host: str) -> dict[int, ProcessIdentity]:
        """Return the other ranks on ``host`` that have joined so far, by rank."""
        count = self._store.add(f"host/{host}/count", 0)
        found: dict[int, ProcessIdentity] = {}
        for key in (f"host/{host}/{slot}" for slot in range(count)):
            if self._store.check([key]):  # a rank may have its slot and not yet have filled it
                rank, _, text = self._store.get(key).decode().partition(" ")
                found[int(rank)] = ProcessIdentity.from_json(text)
        found.pop(self._rank, None)
        return found

    def stamp(self, stamp: Stamp) -> None:
        """Publish this rank's progress."""
        self._store.set(f"stamp/{self._rank}", stamp.to_json())

    def read(self, ranks: Sequence[int]) -> list[Stamp]:
        """Return the stamps of ``ranks``, which must have joined."""
        return [Stamp.from_json(t) for t in self._store.multi_get([f"stamp/{r}" for r in ranks])]

    def post(self, report: FailureReport) -> FailureReport:
        """Post ``report`` unless there is one already; return the one that stands."""
        return FailureReport.from_json(self._store.compare_set(_FIRST, "", report.to_json()))

    def posted(self) -> FailureReport | None:
        """Return the first failure, if there is one."""
        if not self._store.check([_FIRST]):
            return None
        return FailureReport.from_json(self._store.get(_FIRST))

    def acknowledge(self) -> None:
        """Say that this rank has read the report, so that the store's host may go."""
        self._store.add("acknowledged", 1)

    def finish(self, stamp: Stamp) -> None:
        """Say that this rank ends cleanly."""
        self.stamp(stamp)
        self._store.add("finished", 1)

    def num_released(self) -> int:
        """Return how many ranks no longer need the store: they have read the report or ended."""
        return int(self._store.add("acknowledged", 0) + self._store.add("finished", 0))
