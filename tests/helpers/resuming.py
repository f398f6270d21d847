"""A module and its data that go on identically only if all of a run's state is restored."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.modules import VOCABULARY, Language, Transformer, tokens


class Everything(Language):
    """Dropout, tied weights, a metric over the epoch, and a scheduler that monitors the epoch."""

    logs_all = True

    def __init__(self) -> None:
        super().__init__(Transformer(dropout=0.2, tied="module"))
        self.accuracy = MulticlassAccuracy(VOCABULARY)

    def per_sample(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits = self.model(ids[:, :-1]).transpose(1, 2)
        if self.trainer.training:
            self.accuracy(logits, ids[:, 1:])
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", factor=0.5, patience=0
        )
        monitor = {"scheduler": scheduler, "monitor": "train/loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": monitor}


class Noisy(Dataset):
    """Draws from the global generator for each sample, as an augmentation does."""

    def __init__(self) -> None:
        self.data = tokens()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        (ids,) = self.data[index]
        return ((ids + torch.randint(0, 2, ())) % VOCABULARY,)


def everything() -> Language:
    return Everything().double()


def shuffled() -> Any:
    return DataLoader(Noisy(), 8, shuffle=True), DataLoader(tokens(9), 4)
