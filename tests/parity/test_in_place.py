"""Layers that change their input in place, also where it has just arrived from another stage."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.parity import differences, fit, plain


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        return self.linear(x)


class InPlace(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # Cut before the fourth, fifth or seventh layer, a stage begins with one that changes what
        # arrives.
        self.net = nn.Sequential(
            *(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout(0.0), AddsInPlace()),
            *(nn.ReLU(inplace=True), nn.Linear(6, 6), AddsInPlace(), nn.Linear(6, 6)),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x * 1.0)
        out += 0.5  # the network's output too
        loss = (out - y).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loaders():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.flip(0)), batch_size=6)


@pytest.mark.parametrize("loss", ["per_sample", "whole_batch"])
@pytest.mark.world_size(2, deadline_s=120)
def test_in_place_layers_equal_one_device(loss: str) -> None:
    expected = plain(InPlace, loaders, max_epochs=2)
    for partition in ([3, 5], [4, 4], [6, 2]):
        strategy = PipeSwiftStrategy(loss=loss, partition=partition)
        assert not differences(fit(InPlace, loaders, strategy, max_epochs=2), expected)
