"""A checkpoint in one file is mapped: what a rank does not touch takes no memory."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.mapped_file import can_map, owned, owned_extras, read_mapped
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Transformer, loaders, tokens
from tests.helpers.parity import fit, lone_trainer, make_trainer

SIZE = 1 << 20  # float64: 8 MB a layer


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


def test_a_copy_is_a_leaf_of_the_same_kind(tmp_path: Path) -> None:
    """A callback's parameter became a tensor with a history, which deepcopy refuses."""
    file = tmp_path / "a.ckpt"
    saved = {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "plain": torch.ones(2),
    }
    torch.save({"callbacks": {"ema": saved}}, file)
    loaded = deepcopy(read_mapped(file, weights_only=None)["callbacks"]["ema"])
    for name, tensor in saved.items():
        assert type(loaded[name]) is type(tensor)
        assert loaded[name].requires_grad == tensor.requires_grad
        assert loaded[name].is_leaf
        assert loaded[name].equal(tensor)


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


class Alone(Language):
    """Without a scheduler, so that its rate is what a hook makes it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Watches(Callback):
    """Changes the rate before the first step, and looks at what the optimizer holds."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rates: list[float] = []
        self.held: list[int] = []
        self.mapped: list[int] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self._look(trainer)
        if len(self.rates) == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self._look(trainer)

    def _look(self, trainer) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.held.append(len(trainer.optimizers[0].state))
        self.mapped.append(_resident_bytes(self.file))


def _make() -> Alone:
    return Alone(Transformer()).double()


def _resume(file: Path) -> None:
    watches = Watches(file)
    fit(
        _make,
        loaders(tokens),
        PipeSwiftStrategy(),
        callbacks=[watches],
        max_steps=7,
        ckpt_path=str(file),
    )
    whole = len(list(_make().parameters()))
    assert watches.rates == [0.02, 0.01, 0.01, 0.01], watches
    assert watches.held[0] == 0
    assert 0 < watches.held[1] < whole
    assert watches.mapped[1:] == [0, 0, 0]  # let go of, once all is copied
    trainer = make_trainer(PipeSwiftStrategy(), max_steps=5)  # no step comes that would cut it
    trainer.fit(_make(), loaders(tokens)(), ckpt_path=file)
    assert len(trainer.optimizers[0].state) == whole


def test_an_optimizers_state_waits_for_the_cut(tmp_path: Path) -> None:
    """Its settings do not: a rate that a hook set before the first step was overwritten."""
    trainer = lone_trainer("auto", max_steps=5)
    module = _make()
    trainer.fit(module, loaders(tokens)())
    trainer.optimizers[0].param_groups[0]["lr"] = 0.02
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    run_ranks(_resume, 2, {"file": tmp_path / "whole.ckpt"}, deadline_s=100)
