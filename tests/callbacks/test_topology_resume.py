"""What a checkpoint in shards holds, and what a run makes of it, on one device."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.checkpoint.staging import DefaultStager
from torchmetrics import MeanMetric

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.strategies.consolidate import consolidate
from pipeswift_lightning.strategies.logged_result import revived
from tests.helpers.modules import Language, Transformer, loaders, tokens
from tests.helpers.parity import lone_trainer, quiet

DATA = loaders(tokens)


def _trainer(**kwargs: Any) -> Trainer:
    quiet()
    return lone_trainer(PipeSwiftStrategy(), **{"max_epochs": 1, **kwargs})


class Clamps(Language):
    """Changes all parameters right after the save has begun, as a target network's average does."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float(self.global_step))


class Notes(Callback):
    """Keeps the parameters as they are when the save is made."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append({n: p.detach().clone() for n, p in module.named_parameters()})


def test_a_hook_may_change_parameters_once_the_save_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = DefaultStager._stage

    def slow_copy(self: DefaultStager, tensors: Any) -> Any:
        time.sleep(0.05)
        return copy(self, tensors)

    monkeypatch.setattr(DefaultStager, "_stage", slow_copy)
    notes = Notes()
    callback = TopologyCheckpoint(tmp_path / "saves", every_n_steps=1, keep=None)
    module = Clamps(Transformer())
    _trainer(callbacks=[notes, callback]).fit(module.double(), DATA())
    for step, seen in enumerate(notes.seen[:-1], start=1):  # the last is saved after the epoch
        file = tmp_path / f"{step}.ckpt"
        consolidate(tmp_path / "saves" / f"step{step}", file)
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert all(torch.equal(saved[name], value) for name, value in seen.items()), step
    assert len(notes.seen) == 5


def test_a_finished_run_is_resumed_and_its_trainer_used_again(tmp_path: Path) -> None:
    callback = TopologyCheckpoint(tmp_path, every_n_steps=5)
    first = _trainer(callbacks=[callback])
    first.fit(Language(Transformer()).double(), DATA())
    again, module = _trainer(), Language(Transformer()).double()
    again.fit(module, DATA(), ckpt_path=tmp_path)
    (want,), (got,) = first.optimizers, again.optimizers
    for one, other in zip(
        want.param_groups[0]["params"], got.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(want.state[one]["exp_avg_sq"], got.state[other]["exp_avg_sq"])
    again.validate(module, DATA(), verbose=False)
    again.fit_loop.max_epochs = 2
    again.fit(module, DATA())
    assert again.global_step == 10


class Rare(Language):
    """Logs a value and a metric in the first batch of each epoch alone, and some in the third."""

    def __init__(self) -> None:
        super().__init__(Transformer())
        self.mean = MeanMetric()
        self.seen: list[dict[str, float]] = []

    def on_train_start(self) -> None:
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            value = self.current_epoch + 1.0
            self.mean.update(value)
            self.log("metric", self.mean, on_epoch=True)
            for reduce in ("mean", "sum", "max", "min", sum):
                name = f"{getattr(reduce, '__name__', 'torch')}-{reduce}"
                self.log(name, value, on_step=True, on_epoch=True, reduce_fx=reduce)
        if batch_idx in (0, 3):
            self.log("two", float(batch_idx), on_epoch=True, on_step=False, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append({n: float(v) for n, v in metrics.items() if not n.startswith("val")})


def test_what_was_logged_before_the_save_alone_is_reported(tmp_path: Path) -> None:
    callback = TopologyCheckpoint(tmp_path, every_n_steps=2, keep=None)
    straight, resumed = Rare().double(), Rare().double()
    _trainer(callbacks=[callback], max_epochs=2).fit(straight, DATA())
    quiet()
    filters = [*warnings.filters]
    _trainer(max_epochs=2).fit(resumed, DATA(), ckpt_path=tmp_path / "step2")
    assert not {f for f in warnings.filters if "resumable" in str(f)} - {*filters}
    assert straight.seen[0]["two"] == 1.5
    assert straight.seen[1]["metric"] == 2.0
    assert len(resumed.seen) == 2
    for got, want in zip(resumed.seen, straight.seen, strict=True):
        assert got == pytest.approx(want, abs=1e-12)


def test_a_checkpoint_names_no_function_but_a_reduction() -> None:
    state = {"reduce": "exec", "is_builtin": True}
    with pytest.raises(CheckpointError, match=r"reduction 'exec'\. Rule: .* Remedy: "):
        revived(state, Trainer.__new__(Trainer), Language(Transformer()))
