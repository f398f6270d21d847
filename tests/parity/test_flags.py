"""The Trainer's flags, loaders, loggers and callbacks, as on one device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    Timer,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.modules import Language, Regression, Transformer, loader, stack, tokens, vectors
from tests.helpers.parity import (
    Failures,
    compare,
    plain,
)


def language() -> LightningModule:
    return Language(Transformer())


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


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(vectors)

    def val_dataloader(self) -> Any:
        return loader(partial(vectors, 21), batch_size=6)


Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]
FLAGS: dict[str, Case] = {
    "accumulate": (language, token_loaders, {"accumulate_grad_batches": 3}),
    "accumulate, validate between": (
        language,
        token_loaders,
        {"accumulate_grad_batches": 4, "val_check_interval": 1, "max_steps": 4},
    ),
    "accumulate by schedule": (
        regression,
        vector_loaders,
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 5})]},
    ),
    "clip by norm": (language, token_loaders, {"gradient_clip_val": 0.05}),
    "clip by value": (
        language,
        token_loaders,
        {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
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
    "no validation": (regression, vector_loaders, {"limit_val_batches": 0}),
    "sanity check": (regression, vector_loaders, {"num_sanity_val_steps": -1}),
    "streams": (regression, streams, {"val_check_interval": 3}),
    "several loaders": (SeveralLoaders, several_loaders, {}),
    "reloaded": (regression, vector_loaders, {"reload_dataloaders_every_n_epochs": 1}),
    "anomaly detection": (regression, vector_loaders, {"detect_anomaly": True}),
    "no inference mode": (regression, vector_loaders, {"inference_mode": False}),
    "groups": (Groups, vector_loaders, {"callbacks": lambda: [LearningRateMonitor()]}),
    "nothing to train at the end": (FrozenEnd, vector_loaders, {"gradient_clip_val": 0.05}),
    "nothing to train at the start": (FrozenStart, vector_loaders, {"gradient_clip_val": 0.05}),
    "thaws later": (ThawsLater, vector_loaders, {}),
    "one cycle": (lambda: OneCycle(stack()), vector_loaders, {}),
    "own hooks": (lambda: OverridesHooks(stack()), vector_loaders, {}),
    "timer": (regression, vector_loaders, {"callbacks": lambda: [Timer("01:00:00:00")]}),
}


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=150)
def test_flags_on_two_stages() -> None:
    failures = Failures()
    for name, (module, data, options) in FLAGS.items():
        options = {"max_epochs": 4, **options}
        want = plain(module, data, **options)
        compare(failures, name, module, data, {"micro_batches": 3}, want, **options)
    failures.check()
