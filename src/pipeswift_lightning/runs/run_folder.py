"""A run's folder, read back: its report, its metrics and its pictures."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

__all__ = ["RunFolder", "RunFolderError", "differing_keys", "find_runs"]

Series = Mapping[str, list[tuple[int, float]]]
_MARKS = ("job.json", "job_result.json", "progress.json", ".hydra/overrides.yaml")


class RunFolderError(ValueError):
    """Folders in which no run can be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run has written.

    Attributes:
        path: Its folder.
        name: How it is called in tables.
        overrides: What its command line changed of the configuration, ``key=value``.
        report: Its ``job.json``; empty if it has none.
        result: Its ``job_result.json``, which sweeps write; empty if it has none.
        series: Each metric's values by step, from its ``metrics.csv``; of several, a later one
            goes on from the step at which it begins, as a resumed run does.
    """

    path: Path
    name: str
    overrides: tuple[str, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    series: Series = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> "RunFolder":
        """Read a folder; what is missing or torn is left out."""
        tables = sorted(path.glob("**/metrics.csv"), key=_natural)
        return cls(
            path=path,
            name=name or path.name,
            overrides=_overrides(path / ".hydra" / "overrides.yaml"),
            report=_json(path / "job.json"),
            result=_json(path / "job_result.json"),
            series=_joined(map(_series, tables)),
        )

    @property
    def choices(self) -> dict[str, str]:
        """What its command line changed, by key."""
        return dict(override.partition("=")[::2] for override in self.overrides)

    @property
    def status(self) -> str:
        """``finished``, or how else it ended."""
        told = self.report.get("status") or self.result.get("state")
        return str(told) if told else "no report"

    @property
    def is_finished(self) -> bool:
        """Whether it has run to its end."""
        return self.status == "finished" and self.result.get("state", "completed") == "completed"

    @property
    def error(self) -> str:
        """Why it failed, if it says so."""
        return str(self.report.get("error") or self.result.get("error") or "")

    def timelines(self, ending: str) -> list[Path]:
        """Return the files of its timelines with this ending, the last step last."""
        return sorted(self.path.glob(f"**/timelines/step_*{ending}"), key=_natural)


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """Return the runs in some folders, each a run or a folder of runs, in order of their names.

    Raises:
        RunFolderError: There is none in one of them.
    """
    runs: list[RunFolder] = []
    for path in paths:
        marked = {p.parents[mark.count("/")] for mark in _MARKS for p in path.glob(f"**/{mark}")}
        if not marked:
            message = (
                f"{path} holds no run. Rule: a run's folder has a job.json, which JobReport "
                "writes. Remedy: name the folder of a run or of a sweep, such as logs/train"
            )
            raise RunFolderError(message)
        folders = sorted(marked, key=_natural)
        for folder in folders:
            name = folder.relative_to(path).as_posix() if folder != path else folder.name
            runs.append(RunFolder.read(folder, name))
    return runs


def differing_keys(runs: Sequence[RunFolder]) -> tuple[str, ...]:
    """Return the keys of the configuration in which the runs' command lines differ.

    Example:
        >>> one = RunFolder(path=Path("0"), name="0", overrides=("seed=1", "trainer.devices=1"))
        >>> two = RunFolder(path=Path("1"), name="1", overrides=("seed=1", "trainer.devices=2"))
        >>> differing_keys([one, two])
        ('trainer.devices',)
    """
    names = dict.fromkeys(name for run in runs for name in run.choices)
    return tuple(n for n in names if len({run.choices.get(n) for run in runs}) > 1)


def _natural(path: Path) -> list[list[tuple[int, str]]]:
    """Order ``2`` before ``10``, and ``version_9`` before ``version_10``."""
    return [
        [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", part)]
        for part in path.parts
    ]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _overrides(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    content = OmegaConf.to_container(OmegaConf.load(path))
    return tuple(map(str, content)) if isinstance(content, list) else ()


def _joined(tables: Iterable[Series]) -> Series:
    """Return one series of a run's tables in their order; steps that were done again count once."""
    joined: dict[str, list[tuple[int, float]]] = {}
    for table in tables:
        first = min((points[0][0] for points in table.values()), default=math.inf)
        joined = {
            name: [point for point in points if point[0] < first] for name, points in joined.items()
        }
        for name, points in table.items():
            joined.setdefault(name, []).extend(points)
    return {name: points for name, points in joined.items() if points}


def _series(path: Path) -> Series:
    series: dict[str, list[tuple[int, float]]] = {}
    text = path.read_text(errors="replace").replace("\0", "")
    whole = text[: text.rfind("\n") + 1]  # a line without its end is still being written
    for row in csv.DictReader(whole.splitlines()):
        step = _number(row.pop("step", None))
        if step is None:
            continue
        for name, value in row.items():
            if name and name != "epoch" and (number := _number(value)) is not None:
                series.setdefault(name, []).append((int(step), number))
    return series


def _number(text: str | None) -> float | None:
    """Return a finite number; None for what is none, as a torn line may hold."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
