"""Where a rank stands: a cell its main thread writes, and the stamp its watcher publishes."""

import json
import mmap
import os
import struct
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["EVERYONE", "NeighbourProgress", "Progress", "Stamp"]

EVERYONE = -2  # what a rank in a collective waits for


_CELL = struct.Struct("<iiiq200s100s")  # stage, micro-batch, awaited rank, step, words, batch
_NONE = -1  # how a cell says None


@dataclass(slots=True, weakref_slot=True)
class Progress:
    """What one rank does now; written by the main thread, read by the watcher thread.

    Plain attributes, no lock. The watcher may catch them half written; that is harmless, since a
    rank that is stuck has finished writing. The executor writes them, by :meth:`mark`, before
    every instruction and every wait.

    Once it is shared (:meth:`share`), other processes of this host can read what was marked, so
    that a killed or stopped rank's last place is known exactly, not as of its last stamp.

    Attributes:
        stage: The stage that works, or ``None`` outside the pipeline.
        micro_batch: The micro-batch, or ``None``.
        doing: Words; processes of this host see 200 bytes of them.
        waiting_for: The peer rank whose message is awaited, or `EVERYONE` in a collective.
            ``None`` while this rank computes.
        step: Runs of the schedule so far; raised by one at each, so that the same wait in the
            next step counts as progress.
        moves: Counts the marks, so that the same wait again counts as progress.
        batch: Which batch is at work, in the user's words; processes of this host see 100 bytes.

    Example:
        >>> progress = Progress()
        >>> progress.mark("waiting for the gradient", micro_batch=3, waiting_for=2)
    """

    stage: int | None = None
    micro_batch: int | None = None
    doing: str = "outside a step"
    waiting_for: int | None = None
    step: int | None = None
    moves: int = 0
    batch: str = ""
    _cell: bytearray | mmap.mmap = field(
        default_factory=lambda: bytearray(_CELL.size), init=False, repr=False, compare=False
    )
    _fd: int | None = field(default=None, init=False, repr=False, compare=False)

    def mark(
        self,
        doing: str,
        *,
        stage: int | None = None,
        micro_batch: int | None = None,
        waiting_for: int | None = None,
    ) -> None:
        """Say what is done now; the stage stays unless it is given. About 0.5 us."""
        if stage is not None:
            self.stage = stage
        self.micro_batch = micro_batch
        self.doing = doing
        self.waiting_for = waiting_for
        self.moves += 1
        self.publish()

    def publish(self) -> None:
        """Let other processes see the attributes as they are."""
        stage, micro_batch, peer, step = self.stage, self.micro_batch, self.waiting_for, self.step
        _CELL.pack_into(
            self._cell,
            0,
            _NONE if stage is None else stage,
            _NONE if micro_batch is None else micro_batch,
            _NONE if peer is None else peer,
            _NONE if step is None else step,
            self.doing.encode(),
            self.batch.encode(),
        )

    def share(self) -> int | None:
        """Move to memory that others can map; return its descriptor, ``None`` if there is none."""
        if self._fd is None and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("pipeswift-progress")  # ends with us, however we end
            os.ftruncate(self._fd, _CELL.size)
            self._cell = mmap.mmap(self._fd, _CELL.size)
            weakref.finalize(self, os.close, self._fd)
        self.publish()
        return self._fd


class NeighbourProgress:
    """The `Progress` of another process of this host, readable even after that process's end.

    Args:
        pid: The process, which must live.
        fd: What its :meth:`Progress.share` returned.

    Raises:
        OSError: It may not be read.
    """

    def __init__(self, pid: int, fd: int) -> None:
        with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _CELL.size, access=mmap.ACCESS_READ)

    def stamp(self, beat: int) -> "Stamp":
        """Return what it shows."""
        *numbers, doing, batch = _CELL.unpack_from(self._map)
        stage, micro_batch, peer, step = (None if n == _NONE else n for n in numbers)
        return Stamp(
            beat=beat,
            stage=stage,
            micro_batch=micro_batch,
            doing=doing.rstrip(b"\0").decode(errors="ignore"),
            waiting_for=peer,
            step=step,
            batch=batch.rstrip(b"\0").decode(errors="ignore"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """One rank's :class:`Progress` as its peers see it, at most a tick old.

    Attributes:
        beat: Counts the ticks of its watcher: proof of life, not of progress.
        still_s: Seconds without progress, by that rank's own clock.
        is_done: The rank ended cleanly; silence is no failure any more.
        stage: See :class:`Progress`, as for the fields below.
        micro_batch: See above.
        doing: See above.
        waiting_for: See above.
        step: See above.
        moves: See above.
        batch: See above.
    """

    beat: int
    still_s: float = 0.0
    is_done: bool = False
    stage: int | None = None
    micro_batch: int | None = None
    doing: str = "not yet in a step"
    waiting_for: int | None = None
    step: int | None = None
    moves: int = 0
    batch: str = ""

    @classmethod
    def of(cls, progress: Progress, *, beat: int, still_s: float, is_done: bool = False) -> "Stamp":
        """Return the stamp of ``progress`` as it stands."""
        return cls(
            beat=beat,
            still_s=round(still_s, 3),
            is_done=is_done,
            stage=progress.stage,
            micro_batch=progress.micro_batch,
            doing=progress.doing,
            waiting_for=progress.waiting_for,
            step=progress.step,
            moves=progress.moves,
            batch=progress.batch,
        )

    @property
    def place(self) -> tuple[object, ...]:
        """What must change for the rank to have made progress."""
        return self.stage, self.micro_batch, self.doing, self.waiting_for, self.step, self.moves

    def to_json(self) -> str:
        """Return the stamp as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Stamp":
        """Return the stamp that :meth:`to_json` wrote."""
        return cls(**json.loads(text))
