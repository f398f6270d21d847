"""A checkpoint in one file is mapped: what a rank does not touch takes no memory."""

import re
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from pipeswift_lightning.strategies.mapped_file import can_map, owned, owned_extras, read_mapped

LAYERS, SIZE = 8, 1 << 20  # float64: 8 MB a layer


def _resident_bytes(path: Path) -> int:
    """Bytes of a file that this process has touched through mappings of it."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_only_what_is_touched_is_read(tmp_path: Path) -> None:
    file = tmp_path / "whole.ckpt"
    weights = {f"layer{i}": torch.full((SIZE,), float(i), dtype=torch.float64) for i in range(8)}
    score = torch.ones(3)
    torch.save({"state_dict": weights, "callbacks": {"score": score}, "epoch": 3}, file)
    assert can_map(TorchCheckpointIO(), file)
    loaded = read_mapped(file, weights_only=None)
    assert loaded["epoch"] == 3
    assert _resident_bytes(file) < 4 * SIZE  # of 64 MB
    mine = owned(loaded["state_dict"]["layer5"])
    assert mine.equal(weights["layer5"])
    assert 8 * SIZE <= _resident_bytes(file) < 12 * SIZE
    callbacks = loaded.pop("callbacks")
    del loaded
    assert _resident_bytes(file) == 0  # so the file may be replaced
    assert callbacks["score"].equal(score)


def test_what_a_module_may_keep_is_copied() -> None:
    module, state = nn.Linear(1, 1), {"weight": torch.ones(1), "extra": [torch.ones(1)]}
    got = owned_extras(module, state)
    assert got["weight"] is state["weight"]
    assert got["extra"][0] is not state["extra"][0]


def test_other_readers_and_formats_are_left_to_lightning(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        """A user's."""

    file, legacy = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    torch.save({}, file)
    torch.save({}, legacy, _use_new_zipfile_serialization=False)
    assert can_map(AsyncCheckpointIO(TorchCheckpointIO()), file)
    assert not can_map(Own(), file)
    assert not can_map(TorchCheckpointIO(), legacy)
    assert not can_map(TorchCheckpointIO(), tmp_path / "none")
    assert not can_map(TorchCheckpointIO(), "s3://bucket/a.ckpt")
