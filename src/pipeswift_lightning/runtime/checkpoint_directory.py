"""Folders of checkpoints: which are whole, which is the newest, and how one comes to be whole.

A checkpoint is written as ``stepN.tmp/`` and renamed when every byte is on the disk. So a folder
whose name ends otherwise was whole once, whatever happened later, and nothing is ever overwritten:
a death in the middle of a save leaves what was there before.
"""

import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

__all__ = [
    "LATEST",
    "METADATA_FILE",
    "TOPOLOGY_FILE",
    "CheckpointDirectory",
    "CheckpointError",
    "Commit",
    "find_whole",
    "sync_directory",
    "what_is_missing",
    "write_durably",
]

LATEST = "LATEST"
TOPOLOGY_FILE = "topology.json"
METADATA_FILE = ".metadata"
_NAME = re.compile(r"step(\d+)(?:-v\d+)?")
_LEFT = re.compile(_NAME.pattern + r"(?:\.old)?\.tmp")
_UNFINISHED = ".tmp"
_LINE = 100


class CheckpointError(Exception):
    """A checkpoint cannot be written, read, or used for this model."""


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and return once it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Return once the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def what_is_missing(path: Path) -> str | None:
    """Return why ``path`` is no whole checkpoint; ``None`` if it is one."""
    found = _looked_at(path)
    return found if isinstance(found, str) else None


def _looked_at(path: Path) -> int | str:
    """Return a whole checkpoint's number in its folder; else what is missing.

    Another process may be removing it meanwhile.
    """
    if path.name.endswith(_UNFINISHED):
        return "its name ends with .tmp: it was never finished"
    try:
        described = json.loads((path / TOPOLOGY_FILE).read_text())
        sequence, files = int(described["sequence"]), dict(described["files"])
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {TOPOLOGY_FILE}"
    except (ValueError, KeyError, TypeError):
        return f"its {TOPOLOGY_FILE} cannot be read, or names no files"
    for name, size in files.items():
        try:
            held = (path / name).stat().st_size
        except FileNotFoundError:
            return f"it has no {name}"
        if held != size:
            return f"{name} has {held} bytes of {size}"
    return sequence


def find_whole(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` means; ``None`` if it means no folder of ours.

    Args:
        path: A checkpoint, a folder of checkpoints, or the ``LATEST`` in it; the last two mean the
            newest whole checkpoint.

    Raises:
        CheckpointError: The checkpoint is not whole, or the folder holds none that is.
    """
    if path.name == LATEST and (path.is_file() or path.parent.is_dir()):
        return _newest(path.parent)
    if not path.is_dir():
        return None
    if (path / TOPOLOGY_FILE).exists() or path.name.endswith(_UNFINISHED):
        missing = what_is_missing(path)
        if missing is not None:
            msg = (
                f"{path} is no whole checkpoint: {missing}. Rule: only whole checkpoints are read. "
                f"Remedy: give {path.parent}, which means the newest whole one"
            )
            raise CheckpointError(msg)
        return path
    if any(_NAME.fullmatch(p.name) or _LEFT.fullmatch(p.name) for p in path.iterdir()):
        return _newest(path)
    return None


def _newest(folder: Path) -> Path:
    newest = CheckpointDirectory(folder).newest()
    if newest is None:
        reasons = [f"{p.name}: {what_is_missing(p)}" for p in sorted(folder.glob("step*"))]
        msg = (
            f"{folder} holds no whole checkpoint ({'; '.join(reasons) or 'it has no step folders'})"
            ". Rule: only whole checkpoints are read. Remedy: another folder, or ckpt_path=None to "
            "begin anew (TopologyCheckpoint.latest(folder) returns None then)"
        )
        raise CheckpointError(msg)
    return newest


def _readable(value: Any, indent: str = "") -> str:
    """Return JSON in which what fits a line is on one."""
    line = json.dumps(value)
    if len(line) + len(indent) <= _LINE or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_readable(v, deeper)}" for k, v in value.items()]
    else:
        parts = [_readable(v, deeper) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inside = ",\n".join(deeper + part for part in parts)
    return f"{opening}\n{inside}\n{indent}{closing}"


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """A folder of checkpoints, to which one run writes at a time."""

    path: Path

    def whole(self) -> list[Path]:
        """The whole checkpoints in it, the oldest first."""
        return [path for _, path in self._numbered()]

    def newest(self) -> Path | None:
        """The newest whole checkpoint: ``LATEST`` may lag behind it, if a save died at its end.

        Warns of those that are damaged, and so passed over.
        """
        looks = sorted(self._looks())
        for path, found in looks:
            if isinstance(found, str):
                warnings.warn(f"the checkpoint {path} is passed over: {found}", stacklevel=2)
        whole = [(found, path) for path, found in looks if isinstance(found, int)]
        return max(whole)[1] if whole else None

    def why_not_writable(self) -> str | None:
        """Make the folder, and write to it; return what hinders this process, if anything does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(prefix=".writable", dir=self.path) as file:
                file.write(b"1")
                file.flush()
        except OSError as error:
            return str(error)
        return None

    def begin(self, step: int, keep: int | None) -> "Commit":
        """Choose a name for a checkpoint of ``step``; nothing is written yet."""
        sequence = 1 + max((number for number, _ in self._numbered()), default=0)
        name, version = f"step{step}", 0
        while (self.path / name).exists():
            version += 1
            name = f"step{step}-v{version}"
        return Commit(self.path, name, sequence, keep)

    def _numbered(self) -> list[tuple[int, Path]]:
        """The whole checkpoints with their numbers, the oldest first."""
        return sorted((found, path) for path, found in self._looks() if isinstance(found, int))

    def _looks(self) -> list[tuple[Path, int | str]]:
        """What was found in each folder that has a finished checkpoint's name."""
        if not self.path.is_dir():
            return []
        return [(p, _looked_at(p)) for p in self.path.iterdir() if _NAME.fullmatch(p.name)]


@dataclass(frozen=True, slots=True)
class Commit:
    """One checkpoint on its way: from ``stepN.tmp/`` to ``stepN/`` to ``LATEST``."""

    folder: Path
    name: str
    sequence: int
    keep: int | None

    @property
    def unfinished(self) -> Path:
        """Where the files are written."""
        return self.folder / f"{self.name}{_UNFINISHED}"

    @property
    def target(self) -> Path:
        """Where they are in the end."""
        return self.folder / self.name

    def prepare(self) -> None:
        """Make an empty folder, and remove what dead saves have left; one rank calls this."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            if _LEFT.fullmatch(left.name) and left.is_dir():  # whatever else is here is not ours
                shutil.rmtree(left)
        self.unfinished.mkdir()

    def complete(self, topology: dict[str, Any]) -> None:
        """Describe the checkpoint, make it durable, and let it count; one rank calls this."""
        files = {p.name: p.stat().st_size for p in sorted(self.unfinished.iterdir())}
        described = {**topology, "sequence": self.sequence, "files": files}
        text = _readable(described) + "\n"
        write_durably(self.unfinished / TOPOLOGY_FILE, text.encode())
        sync_directory(self.unfinished)
        os.rename(self.unfinished, self.target)
        sync_directory(self.folder)
        pointer = self.folder / f"{LATEST}{_UNFINISHED}"
        write_durably(pointer, f"{self.name}\n".encode())
        os.replace(pointer, self.folder / LATEST)
        sync_directory(self.folder)
        self._forget_old()

    def _forget_old(self) -> None:
        if self.keep is None:
            return
        for old in CheckpointDirectory(self.folder).whole()[: -self.keep]:
            going = old.with_name(f"{old.name}.old{_UNFINISHED}")
            old.rename(going)  # at once no checkpoint any more, should the removal be cut short
            shutil.rmtree(going)
