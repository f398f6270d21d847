"""The Trainer's flags, loaders, loggers and callbacks, as on one device."""

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.modules import (
    Language,
    Regression,
    Transformer,
    loader,
    logging_all,
    stack,
    tokens,
    vectors,
)
from tests.helpers.parity import (
    Failures,
    compare,
    fit,
    let_go,
    make_trainer,
    on_rank_zero,
    plain,
)


def language() -> LightningModule:
    return logging_all(Language(Transformer()))


def regression() -> LightningModule:
    return Regression(stack())


def token_loaders() -> tuple[Any, Any]:
    return loader(tokens), loader(partial(tokens, 21), batch_size=6)


def vector_loaders() -> tuple[Any, Any]:
    return loader(vectors), loader(partial(vectors, 21), batch_size=6)


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        data = vectors()
        return iter([data[i] for i in range(len(data))])


def streams() -> tuple[Any, Any]:
    return DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=5)


class SeveralLoaders(Regression):
    """Trains on a dict of loaders, and validates on two."""

    def __init__(self) -> None:
        super().__init__(stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (torch.cat([batch[name][i] for name in "ab"]) for i in (0, 1))
        loss = self.per_sample((x, y)).mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", self.per_sample(batch).mean())


def several_loaders() -> tuple[Any, Any]:
    train = {"a": loader(vectors), "b": loader(partial(vectors, 21))}
    return train, [loader(partial(vectors, n), batch_size=6) for n in (21, 13)]


class Groups(Regression):
    """Named groups with rates of their own, one of them of a single layer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.net[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        first = [p for n, p in named if n.startswith("net.0.")]
        decayed = [p for n, p in named if p.ndim > 1 and not n.startswith("net.0.")]
        rest = [p for n, p in named if p.ndim < 2 and not n.startswith("net.0.")]
        optimizer = torch.optim.AdamW(
            [
                {"params": first, "lr": 0.01, "name": "first"},
                {"params": decayed, "weight_decay": 0.2, "name": "decayed"},
                {"params": rest, "weight_decay": 0.0, "name": "rest"},
            ],
            lr=0.05,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch", "frequency": 2}]


class FrozenEnd(Regression):
    """The last stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.net[4:].requires_grad_(False)


class FrozenStart(Regression):
    """The first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.net[:4].requires_grad_(False)


class ThawsLater(Regression):
    """Lets a layer learn from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class OneCycle(Regression):
    """A scheduler that needs to know the number of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class OverridesHooks(Regression):
    """Steps, zeroes and moves batches itself, as many projects do."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 6)
        optimizer.step(closure=closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        return

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * 2, y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x / 2, y


Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]
ONCE: dict[str, Any] = {"max_epochs": 1}
FLAGS: dict[str, Case] = {
    "accumulate": (language, token_loaders, {"accumulate_grad_batches": 3, "max_epochs": 3}),
    "accumulate, validate between": (
        language,
        token_loaders,
        {"accumulate_grad_batches": 4, "val_check_interval": 1, "max_steps": 4},
    ),
    "accumulate by schedule": (
        regression,
        vector_loaders,
        {
            "max_epochs": 3,
            "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 5})],
        },
    ),
    "clip by norm": (regression, vector_loaders, {"gradient_clip_val": 0.05, **ONCE}),
    "clip by value": (
        regression,
        vector_loaders,
        {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value", **ONCE},
    ),
    "max steps": (regression, vector_loaders, {"max_steps": 7, "max_epochs": -1}),
    "min epochs": (
        regression,
        vector_loaders,
        {
            "min_epochs": 3,
            "max_epochs": 8,
            "callbacks": lambda: [EarlyStopping("val/loss", 1e9, patience=1)],
        },
    ),
    "overfit": (regression, vector_loaders, {"overfit_batches": 2}),
    "part of an epoch": (
        regression,
        vector_loaders,
        {"limit_train_batches": 0.6, "limit_val_batches": 0.5, "val_check_interval": 0.5},
    ),
    "validation by steps": (
        regression,
        vector_loaders,
        {"check_val_every_n_epoch": None, "val_check_interval": 7},
    ),
    "no validation": (regression, vector_loaders, {"limit_val_batches": 0, **ONCE}),
    "sanity check": (regression, vector_loaders, {"num_sanity_val_steps": -1, **ONCE}),
    "streams": (regression, streams, {"val_check_interval": 3, **ONCE}),
    "several loaders": (SeveralLoaders, several_loaders, ONCE),
    "reloaded": (regression, vector_loaders, {"reload_dataloaders_every_n_epochs": 1}),
    "anomaly detection": (regression, vector_loaders, {"detect_anomaly": True, **ONCE}),
    "no inference mode": (regression, vector_loaders, {"inference_mode": False, **ONCE}),
    "groups": (
        Groups,
        vector_loaders,
        {"max_epochs": 3, "callbacks": lambda: [LearningRateMonitor()]},
    ),
    "nothing to train at the end": (FrozenEnd, vector_loaders, {"gradient_clip_val": 0.05, **ONCE}),
    "nothing to train at the start": (
        FrozenStart,
        vector_loaders,
        {"gradient_clip_val": 0.05, **ONCE},
    ),
    "thaws later": (ThawsLater, vector_loaders, {}),
    "one cycle": (lambda: OneCycle(stack()), vector_loaders, {}),
    "own hooks": (lambda: OverridesHooks(stack()), vector_loaders, {}),
    "timer": (regression, vector_loaders, {"callbacks": lambda: [Timer("01:00:00:00")], **ONCE}),
}


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=150)
def test_flags_on_two_stages() -> None:
    failures = Failures()
    for name, (module, data, options) in FLAGS.items():
        options = {"max_epochs": 2, **options}
        want = plain(module, data, **options)
        compare(failures, name, module, data, {"micro_batches": 3}, want, **options)
    failures.check()


# -- what is written and shown ----------------------------------------------------------------


class Written(BasePredictionWriter):
    """Keeps what a writer is given, batch by batch and in the end."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[int, list[int], list[float]]] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(
        self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ) -> None:
        self.batches.append((dataloader_idx, list(batch_indices), prediction.sum(1).tolist()))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices) -> None:
        self.epoch = [batch_indices, [[p.sum().item() for p in part] for part in predictions]]


class Predicts(Regression):
    def __init__(self) -> None:
        super().__init__(stack())

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(batch[0]) + dataloader_idx


def _predict(strategy: Any) -> Any:
    torch.manual_seed(7)
    writer = Written()
    trainer = make_trainer(strategy, callbacks=[writer])
    loaders = [loader(partial(vectors, n), batch_size=6) for n in (21, 13)]
    found = trainer.predict(Predicts(), loaders)
    let_go(trainer)
    return (
        [[part.detach().clone() for part in each] for each in found],
        writer.batches,
        writer.epoch,
    )


@pytest.mark.world_size(2, deadline_s=120)
def test_predictions_come_in_order_to_every_rank_and_its_writer() -> None:
    want = on_rank_zero(lambda: _predict("auto"))
    got = _predict(PipeSwiftStrategy(micro_batches=[1, 3, 2]))
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-10)
    for mine, other in zip(got[1], want[1], strict=True):
        assert mine[:2] == other[:2]
        assert mine[2] == pytest.approx(other[2], abs=1e-10)
    assert got[2][0] == want[2][0]


def _written(strategy: Any, folder: Path) -> dict[str, Any]:
    """Fit with file loggers, checkpoints and a progress bar; return what lies on the disk."""
    kept = ModelCheckpoint(
        folder / "kept", "{epoch}-{step}", monitor="val/loss", save_top_k=2, save_last=True
    )
    csv_logger = CSVLogger(folder, name="csv", version=0)
    fit(
        language,
        token_loaders,
        strategy,
        max_epochs=3,
        logger=[csv_logger, TensorBoardLogger(folder, name="board", version=0)],
        enable_checkpointing=True,
        callbacks=lambda: [kept, LearningRateMonitor()],
    )
    rows: list[dict[str, str]] = []
    table = Path(csv_logger.log_dir) / "metrics.csv"
    if table.exists():
        rows = list(csv.DictReader(table.open()))
    return {
        "rows": rows,
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt")),
        "best": Path(kept.best_model_path).name,
        "last": Path(kept.last_model_path).name,
    }


@pytest.mark.world_size(2, deadline_s=120)
def test_files_on_disk_are_those_of_one_device(tmp_path: Path) -> None:
    want = on_rank_zero(lambda: _written("auto", tmp_path / "plain"))
    got = _written(PipeSwiftStrategy(micro_batches=3), tmp_path / "pipeline")
    assert {k: v for k, v in got.items() if k != "rows"} == {
        k: v for k, v in want.items() if k != "rows"
    }
    assert len(want["rows"]) > 8
    if dist.get_rank() > 0:
        return  # rank 0 has the logger, and may still be writing
    for mine, other in zip(got["rows"], want["rows"], strict=True):
        assert mine.keys() == other.keys()
        for key, text in other.items():
            assert (mine[key] == "") == (text == ""), key
            if text:
                assert float(mine[key]) == pytest.approx(float(text), abs=1e-10), key


class BarText(Callback):
    """Notes what the progress bar shows."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, module, *args: Any) -> None:
        bar = trainer.progress_bar_callback
        self.shown.append(
            {k: v for k, v in bar.get_metrics(trainer, module).items() if k != "v_num"}
        )


@pytest.mark.world_size(2, deadline_s=120)
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_same(bar: Any) -> None:
    def shown(strategy: Any) -> list[dict[str, Any]]:
        notes = BarText()
        trainer = make_trainer(
            strategy, max_epochs=1, enable_progress_bar=True, callbacks=[bar(), notes]
        )
        torch.manual_seed(7)
        trainer.fit(language(), *token_loaders())
        let_go(trainer)
        return notes.shown

    want = on_rank_zero(lambda: shown("auto"))
    got = shown(PipeSwiftStrategy(micro_batches=3))
    assert [entry.keys() for entry in got] == [entry.keys() for entry in want]
    for mine, other in zip(got, want, strict=True):
        assert {k: float(v) for k, v in mine.items()} == pytest.approx(
            {k: float(v) for k, v in other.items()}, abs=1e-3
        )


@pytest.mark.world_size(2, deadline_s=120)
def test_limits_of_time_and_debugging_runs_end_all_ranks_alike() -> None:
    for options in (
        {"fast_dev_run": 2},
        {"max_time": {"seconds": 1}, "max_epochs": -1},
        {"barebones": False, "max_epochs": 1, "profiler": "simple"},
    ):
        outcome = fit(regression, vector_loaders, PipeSwiftStrategy(micro_batches=2), **options)
        every = on_rank_zero(lambda: outcome.steps)  # noqa: B023 -- called at once
        assert outcome.steps == every > 0
