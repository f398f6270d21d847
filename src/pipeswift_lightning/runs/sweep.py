"""The members of a sweep beside each other: what differs, what it cost, and which was best."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeswift_lightning.runs.run_folder import RunFolder, differing_keys

__all__ = ["Member", "SweepTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One finished member of a sweep.

    Attributes:
        run: Its folder.
        choices: Its values of the keys in which members differ, in the table's order.
        stages: Number of stages.
        micro_batches: Number of micro-batches; None if no plan was made.
        schedule: Its name; None likewise.
        step_s: Median of its steps, in seconds.
        bubble: Mean measured bubble of its stages; None if not measured.
        completion_s: Job completion time, in seconds.
    """

    run: RunFolder
    choices: tuple[str, ...]
    stages: int | None
    micro_batches: int | None
    schedule: str | None
    step_s: float
    bubble: float | None
    completion_s: float

    @classmethod
    def of(cls, run: RunFolder, choices: tuple[str, ...]) -> "Member":
        """Read a member's report."""
        report, plan = run.report, run.report.get("plan", {})
        bubbles = report.get("bubble_by_stage")
        return cls(
            run=run,
            choices=choices,
            stages=report.get("stages"),
            micro_batches=plan.get("micro_batches"),
            schedule=plan.get("schedule"),
            step_s=report["step_s"]["median"],
            bubble=statistics.fmean(bubbles) if bubbles else None,
            completion_s=report["job_completion_s"],
        )

    def row(self) -> list[str]:
        """Return its row of the table, as text."""
        return [
            self.run.name,
            *self.choices,
            _text(self.stages),
            _text(self.micro_batches),
            _text(self.schedule),
            f"{1e3 * self.step_s:.1f}",
            "-" if self.bubble is None else f"{self.bubble:.1%}",
            f"{self.completion_s:.1f}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTable:
    """A sweep's members.

    Attributes:
        keys: Of the configuration, in which members differ.
        members: Those that have finished, in the sweep's order.
        failed: The others, those that were pruned before they started included.
    """

    keys: tuple[str, ...]
    members: tuple[Member, ...]
    failed: tuple[RunFolder, ...]

    @classmethod
    def of(cls, runs: Sequence[RunFolder]) -> "SweepTable":
        """Compare the runs of a sweep."""
        keys = differing_keys(runs)
        finished = [run.is_finished and bool(run.report.get("step_s")) for run in runs]
        members = tuple(
            Member.of(run, tuple(run.choices.get(key, "") for key in keys))
            for run, done in zip(runs, finished, strict=True)
            if done
        )
        failed = tuple(run for run, done in zip(runs, finished, strict=True) if not done)
        return cls(keys=keys, members=members, failed=failed)

    @property
    def best(self) -> Member | None:
        """The member with the least job completion time; None if none has finished."""
        return min(self.members, key=lambda member: member.completion_s, default=None)

    def rows(self) -> list[list[str]]:
        """Return the table as text: the head, then a row a member."""
        columns = (
            "run",
            *_short(self.keys),
            "stages",
            "micro-batches",
            "schedule",
            "step, ms",
            "bubble",
        )
        return [[*columns, "completion, s"], *(m.row() for m in self.members)]

    def render(self) -> Group:
        """Lay the table out for a terminal; the least job completion time is marked."""
        head, *rows = self.rows()
        of = len(self.members) + len(self.failed)
        table = Table(title=f"{len(self.members)} of {of} runs have finished")
        texts = {"run", "schedule", *_short(self.keys)}
        for name in head:
            lines = re.sub(r"(?<=[_,.-]) ?", "\n", name).split("\n")
            side: Literal["left", "right"] = "left" if name in texts else "right"
            width = max(map(len, lines))
            table.add_column("\n".join(lines), justify=side, min_width=width, overflow="fold")
        for member, row in zip(self.members, rows, strict=True):
            least = member is self.best
            style = "bold green" if least else None
            marked = [*row[:-1], f"least {row[-1]}" if least else row[-1]]
            table.add_row(*map(Text, marked), style=style)
        others = [
            Text(
                f"{run.name} ({self._choices(run)}): {run.status}. {run.error}",
                style="dim" if run.status == "pruned" else "red",
            )
            for run in self.failed
        ]
        return Group(table, *others)

    def _choices(self, run: RunFolder) -> str:
        return " ".join(f"{k}={value}" for k, value in run.choices.items() if k in self.keys)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _short(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys' last parts, where these are enough to tell them apart."""
    ends = [key.rpartition(".")[2] for key in keys]
    return tuple(end if ends.count(end) == 1 else key for end, key in zip(ends, keys, strict=True))
