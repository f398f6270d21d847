"""Where in a save a rank dies."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.filesystem as dcp_files

from pipeswift_lightning.runtime import checkpoint_directory
from pipeswift_lightning.runtime.checkpoint_directory import Commit
from pipeswift_lightning.runtime.sharded_state import ShardWriter


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _around(
    owner: Any,
    name: str,
    at: int,
    *,
    before: bool = False,
    when: Callable[..., bool] = lambda *_: True,
) -> None:
    """Die at the call number ``at`` of a function for which ``when`` holds, or once it returns."""
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        counted = when(*args)
        due = counted and calls[0] == at
        calls[0] += counted
        if due and before:
            _die()
        result = original(*args, **kwargs)
        if due:
            _die()
        return result

    setattr(owner, name, deadly)


def _makes_whole(_source: Any, target: Any, **_: Any) -> bool:
    return not str(target).endswith(".tmp")


def _moves_latest(_source: Any, target: Any, **_: Any) -> bool:
    return str(target).endswith(checkpoint_directory.LATEST)


def _in_a_shard(at: int) -> None:
    """Half of a tensor is written, and some before it."""
    calls = [0]
    original = ShardWriter.write_data

    def write_data(self: ShardWriter, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > at:
            _tear_tensors()
        return original(self, *args)

    ShardWriter.write_data = write_data  # type: ignore[method-assign]


def _tear_tensors() -> None:
    original, written = dcp_files._write_item, [0]

    def torn(transforms: Any, stream: Any, *args: Any) -> Any:
        result = original(transforms, stream, *args)
        written[0] += 1
        if written[0] == 3:
            stream.flush()
            os.ftruncate(stream.fileno(), stream.tell() - 100)
            _die()
        return result

    dcp_files._write_item = torn


def _in_a_removal(at: int) -> None:
    def half_removed(path: Any, *_: Any, **__: Any) -> None:
        next(iter(Path(path).iterdir())).unlink()
        _die()

    original, calls = shutil.rmtree, [0]

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        (half_removed if calls[0] > at else original)(path, *args, **kwargs)

    checkpoint_directory.shutil.rmtree = rmtree  # type: ignore[assignment]


PHASES: dict[str, Callable[[int], None]] = {
    "before anything is written": lambda at: _around(Commit, "prepare", at, before=True),
    "in an empty folder": lambda at: _around(Commit, "prepare", at),
    "in the middle of a shard": _in_a_shard,
    "before the description": lambda at: _around(Commit, "complete", at, before=True),
    "before the rename": lambda at: _around(os, "rename", at, before=True, when=_makes_whole),
    "before LATEST moves": lambda at: _around(os, "replace", at, before=True, when=_moves_latest),
    "after LATEST has moved": lambda at: _around(os, "replace", at, when=_moves_latest),
    "while an old one is removed": _in_a_removal,
    "after the save": lambda at: _around(Commit, "complete", at),
}
ANY_RANK = "in the middle of a shard"  # the only one of them that is not rank 0's alone
