"""Where a rank stands: a cell its main thread writes, and the stamp its watcher publishes."""

import json
from dataclasses import asdict, dataclass

__all__ = ["Progress", "Stamp"]


@dataclass(slots=True)
class Progress:
    """What one rank does now; written by the main thread, read by the watcher thread.

    Plain attribute writes, no lock: about 20 ns each. The watcher may catch a cell half written;
    that is harmless, since a rank that is stuck has finished writing. The executor writes it
    before every instruction and every wait.

    Attributes:
        stage: The stage that works, or ``None`` outside the pipeline.
        micro_batch: The micro-batch, or ``None``.
        doing: Anything whose ``str()`` reads well. The watcher formats it, ten times a second,
            so that the executor may write an instruction object and save the formatting.
        waiting_for: The peer rank whose message is awaited. ``None`` while this rank computes.
        step: Runs of the schedule so far; raised by one at each, so that the same wait in the
            next step counts as progress.

    Example:
        >>> progress = Progress()
        >>> progress.micro_batch, progress.waiting_for = 3, 2
        >>> progress.doing = "waiting for the gradient of micro-batch 3 from rank 2"
    """

    stage: int | None = None
    micro_batch: int | None = None
    doing: object = "outside a step"
    waiting_for: int | None = None
    step: int | None = None


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
    """

    beat: int
    still_s: float = 0.0
    is_done: bool = False
    stage: int | None = None
    micro_batch: int | None = None
    doing: str = "not yet in a step"
    waiting_for: int | None = None
    step: int | None = None

    @classmethod
    def of(cls, progress: Progress, *, beat: int, still_s: float, is_done: bool = False) -> "Stamp":
        """Return the stamp of ``progress`` as it stands."""
        return cls(
            beat=beat,
            still_s=round(still_s, 3),
            is_done=is_done,
            stage=progress.stage,
            micro_batch=progress.micro_batch,
            doing=str(progress.doing),
            waiting_for=progress.waiting_for,
            step=progress.step,
        )

    @property
    def place(self) -> tuple[object, ...]:
        """What must change for the rank to have made progress."""
        return self.stage, self.micro_batch, self.doing, self.waiting_for, self.step

    def to_json(self) -> str:
        """Return the stamp as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Stamp":
        """Return the stamp that :meth:`to_json` wrote."""
        return cls(**json.loads(text))
