"""What went wrong, where, and what to do about it: one report, told alike on every rank."""

import json
import traceback
from dataclasses import asdict, dataclass
from typing import Literal

from typing_extensions import override

__all__ = ["FailureKind", "FailureReport", "PipelineFailure", "describe_exception"]

FailureKind = Literal["exception", "interrupt", "killed", "silent", "deadlock", "store", "parent"]
# Frames between the user's own: they fill a screen on every rank and explain nothing.
_MACHINERY = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "pipeswift_lightning"}

_REMEDY: dict[FailureKind, str] = {
    "exception": "Mend the error below; the other ranks only stopped because of it. Then restart "
    "from the last checkpoint.",
    "interrupt": "It was told to end (Ctrl-C, SIGINT or sys.exit on that rank). Restart from the "
    "last checkpoint.",
    "killed": "Look for the out-of-memory killer (dmesg), a kill -9, a pre-emption, or code that "
    "ends the process on this rank. Then restart from the last checkpoint.",
    "silent": "Look for a stopped process, a hung file system or a lost node on this rank. If it "
    "was merely slow, raise silence_s. Then restart from the last checkpoint.",
    "deadlock": "The ranks do not run the same plan: look for steps, batches or collectives that "
    "only some ranks run, and for loaders of unequal length.",
    "store": "Look at the process that hosts the rendezvous store (rank 0, or torchrun's agent) "
    "and at the network to its node. Then restart from the last checkpoint.",
    "parent": "Look for what ended the launcher; a rank without one is ended, so that no orphan "
    "holds a device. Then restart from the last checkpoint.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """The first failure of a run: the root cause, not the errors that followed from it.

    Attributes:
        rank: The rank that failed.
        stage: Its pipeline stage, if known.
        micro_batch: The micro-batch it worked on, if any.
        doing: What it did, in words, e.g. ``"Backward of micro-batch 3"`` or ``"waiting for the
            gradient of micro-batch 3 from rank 2"``.
        cause: The exception's type and text, or e.g. ``"killed"``, ``"silent for 10.2 s"``.
        detail: The traceback, or every rank's wait in a deadlock; may be empty.
        reporter: The rank that noticed.
        batch: The batch it was at, as in ``"training batch 3 of epoch 0 (global step 3)"``; empty
            if there was none yet.
        seen_while: What the reporter did when it noticed; empty if it is the failed rank itself.
        kind: The sort of failure; it selects the advice in :meth:`message`.

    Example:
        >>> report = FailureReport(rank=2, stage=2, micro_batch=3, doing="Backward of "
        ...     "micro-batch 3", cause="killed", detail="", reporter=1, kind="killed")
        >>> FailureReport.from_json(report.to_json()) == report
        True
        >>> print(report.message().splitlines()[0])
        Pipeline stopped: rank 2 (stage 2, micro-batch 3) failed: killed
    """

    rank: int
    stage: int | None
    micro_batch: int | None
    doing: str
    cause: str
    detail: str
    reporter: int
    batch: str = ""
    seen_while: str = ""
    kind: FailureKind = "exception"

    @property
    def is_gone(self) -> bool:
        """Whether the failed rank can no longer act for itself: it must be fenced."""
        return self.kind in ("killed", "silent")

    def to_json(self) -> str:
        """Return the report as one line of JSON, the form it travels in."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "FailureReport":
        """Return the report that :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def who(self) -> str:
        """Return the rank, with its stage and micro-batch where they are known."""
        place = [f"stage {self.stage}" if self.stage is not None else ""]
        place.append(f"micro-batch {self.micro_batch}" if self.micro_batch is not None else "")
        where = ", ".join(part for part in place if part)
        return f"rank {self.rank}{f' ({where})' if where else ''}"

    def activity(self) -> str:
        """Return what the rank did, and at which batch."""
        return self.doing + (f", in {self.batch}" if self.batch else "")

    def remedy(self) -> str:
        """Return what to do."""
        return _REMEDY[self.kind]

    def message(self) -> str:
        """Return what was wrong, where, and what to do, in several lines."""
        lines = [
            f"Pipeline stopped: {self.who()} failed: {self.cause}",
            f"  doing:   {self.activity()}",
        ]
        if self.reporter != self.rank:
            seen = f", {self.seen_while}" if self.seen_while else ""
            lines.append(f"  seen by: rank {self.reporter}{seen}")
        lines.append(f"  do:      {self.remedy()}")
        if self.detail:
            lines.append(self.detail.rstrip())
        return "\n".join(lines)


class PipelineFailure(RuntimeError):  # noqa: N818 -- a failure of the run, not of this rank
    """Raised on a rank that did not fail itself, so that its error names the rank that did."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report.message())
        self.report = report

    @override
    def __reduce__(self) -> tuple[type["PipelineFailure"], tuple[FailureReport]]:
        """Survive pickling: launchers send exceptions from process to process."""
        return type(self), (self.report,)


def describe_exception(exc: BaseException) -> tuple[str, str]:
    """Return the type and text of ``exc``, and where in the user's code it came from.

    The whole traceback is printed by the rank that failed; the others need only what leads there.
    """
    text = str(exc).strip()
    cause = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    shown = traceback.TracebackException.from_exception(exc)
    _keep_user_frames(shown, exc)
    return cause, "".join(shown.format())


def _keep_user_frames(shown: traceback.TracebackException, exc: BaseException) -> None:
    """Drop the frames of Lightning, torch and this package, but never all of them."""
    frames = list(traceback.walk_tb(exc.__traceback__))
    kept = [
        summary
        for summary, (frame, _) in zip(shown.stack, frames, strict=False)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _MACHINERY
    ]
    # The line that raised says most, whosever it is.
    last = [summary for summary in shown.stack[-1:] if summary not in kept]
    shown.stack[:] = [*kept, *last]
    if shown.__cause__ is not None and exc.__cause__ is not None:
        _keep_user_frames(shown.__cause__, exc.__cause__)
    if shown.__context__ is not None and exc.__context__ is not None:
        _keep_user_frames(shown.__context__, exc.__context__)
