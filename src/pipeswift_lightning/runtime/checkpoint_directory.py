"""Folders of checkpoints: which are whole, which is the newest, and how one comes to be whole.

A checkpoint is written as ``stepN.tmp/`` and renamed when every byte is on the disk. So a folder
whose name ends otherwise was whole once, whatever happened later, and nothing is ever overwritten:
a death in the middle of a save leaves what was there before. What a disk does to its bytes later is
found by checksums (`why_damaged`), which takes reading all of it.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any

from pipeswift_lightning.runtime.checksum import description_checksum, file_checksum, shares

__all__ = [
    "LATEST",
    "METADATA_FILE",
    "TOPOLOGY_FILE",
    "CheckpointDirectory",
    "CheckpointError",
    "Commit",
    "FoundCheckpoint",
    "find_whole",
    "sync_directory",
    "what_is_missing",
    "why_damaged",
    "write_durably",
]

LATEST = "LATEST"
TOPOLOGY_FILE = "topology.json"
METADATA_FILE = ".metadata"
_NAME = re.compile(r"step(\d+)(?:-v\d+)?")
_LEFT = re.compile(_NAME.pattern + r"(?:\.old)?\.tmp")
_UNFINISHED = ".tmp"
_LINE = 100
_WITHOUT_CHECKSUMS = 2  # the format version that had none
_NOTHING: Mapping[Path, str] = MappingProxyType({})


class CheckpointError(Exception):
    """A checkpoint cannot be written, read, or used for this model."""


class FoundCheckpoint(type(Path())):  # type: ignore[misc]
    """A checkpoint that was found to be the newest, not named by the user.

    So if its bytes turn out to be damaged when they are read, the one before it will do.
    """


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
        described = dict(json.loads((path / TOPOLOGY_FILE).read_text()))
        if not _is_as_written(described):
            return f"its {TOPOLOGY_FILE} does not have the checksum that it names"
        sequence, files = int(described["sequence"]), dict(described["files"])
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {TOPOLOGY_FILE}"
    except (ValueError, KeyError, TypeError):
        return f"its {TOPOLOGY_FILE} cannot be read, or names no files"
    return _wrong_size(path, files) or sequence


def _wrong_size(path: Path, files: Mapping[str, int]) -> str | None:
    for name, size in files.items():
        try:
            held = (path / name).stat().st_size
        except FileNotFoundError:
            return f"it has no {name}"
        if held != size:
            return f"{name} has {held} bytes of {size}"
    return None


def _is_as_written(described: dict[str, Any]) -> bool:
    if described.get("format_version") == _WITHOUT_CHECKSUMS and "checksums" not in described:
        return True
    rest = {key: value for key, value in described.items() if key != "checksum"}
    return bool(described.get("checksum") == description_checksum(rest))


def why_damaged(path: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Read a whole checkpoint, and return what is no longer as it was written.

    Args:
        path: The checkpoint. One without checksums counts as good.
        rank: Which share of the files to read.
        num_ranks: How many read a share each.
    """
    try:
        described = json.loads((path / TOPOLOGY_FILE).read_text())
        recorded, sizes = described.get("checksums", {}), described["files"]
        wrong = [
            name
            for name in shares({name: sizes[name] for name in recorded}, num_ranks)[rank]
            if file_checksum(path / name) != recorded[name]
        ]
    except OSError as error:
        return f"it cannot be read: {error}"
    if not wrong:
        return None
    return f"{', '.join(sorted(wrong))} does not have the checksum of when it was written"


def find_whole(path: Path, damaged: Mapping[Path, str] = _NOTHING) -> Path | None:
    """Return the checkpoint that ``path`` means; ``None`` if it means no folder of ours.

    Args:
        path: A checkpoint, a folder of checkpoints, or the ``LATEST`` in it; the last two mean the
            newest whole checkpoint, as a `FoundCheckpoint` does.
        damaged: Checkpoints that are not whole, as reading them has shown, and why.

    Raises:
        CheckpointError: The checkpoint is not whole, or the folder holds none that is.
    """
    if isinstance(path, FoundCheckpoint):
        return _newest(Path(path.parent), damaged)
    if path.name == LATEST and (path.is_file() or path.parent.is_dir()):
        return _newest(path.parent, damaged)
    if not path.is_dir():
        return None
    if (path / TOPOLOGY_FILE).exists() or path.name.endswith(_UNFINISHED):
        missing = damaged.get(path) or what_is_missing(path)
        if missing is not None:
            msg = (
                f"{path} is no whole checkpoint: {missing}. Rule: only whole checkpoints are read. "
                f"Remedy: give {path.parent}, which means the newest whole one"
            )
            raise CheckpointError(msg)
        return path
    if any(_NAME.fullmatch(p.name) or _LEFT.fullmatch(p.name) for p in path.iterdir()):
        return _newest(path, damaged)
    return None


def _newest(folder: Path, damaged: Mapping[Path, str]) -> Path:
    newest = CheckpointDirectory(folder).newest(damaged)
    if newest is None:
        found = {p: damaged.get(p) or what_is_missing(p) for p in sorted(folder.glob("step*"))}
        reasons = [f"{p.name}: {reason}" for p, reason in found.items()]
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

    def newest(self, damaged: Mapping[Path, str] = _NOTHING) -> Path | None:
        """The newest whole checkpoint: ``LATEST`` may lag behind it, if a save died at its end.

        Warns of those that are damaged, and so passed over.

        Args:
            damaged: Checkpoints that are not whole, as reading them has shown, and why.
        """
        looks = sorted((path, damaged.get(path, found)) for path, found in self._looks())
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

    def complete(
        self, topology: Mapping[str, Any], checksums: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Describe the checkpoint, make it durable, and let it count; one rank calls this.

        Args:
            topology: What the run looks like.
            checksums: Of the files; those that are not among them are read here.
        """
        files = {p.name: p.stat().st_size for p in sorted(self.unfinished.iterdir())}
        sums = {n: checksums.get(n) or file_checksum(self.unfinished / n) for n in files}
        described = {**topology, "sequence": self.sequence, "files": files, "checksums": sums}
        described["checksum"] = description_checksum(described)
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
