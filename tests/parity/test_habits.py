"""What users' steps do beside their mathematics: exact, or refused with the reason."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.parity import differences, fit, plain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Base(LightningModule):
    network: Callable[[], nn.Module] = Stack

    def __init__(self) -> None:
        super().__init__()
        self.model = type(self).network()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        self.log("loss", loss, True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.step(batch))

    def step(self, batch: Any) -> torch.Tensor:
        return functional.mse_loss(self.model(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class StackWithLoss(Stack):
    """Computes its own loss, a mean over the tokens that count, as many language models do."""

    def forward(self, x: torch.Tensor, batch: Any) -> Any:
        x = super().forward(x)
        each = functional.mse_loss(x, batch["y"], reduction="none").mean(-1)
        return x, (each * batch["mask"]).sum() / batch["mask"].sum()


class OwnLoss(Base):
    network = StackWithLoss

    def step(self, batch: Any) -> torch.Tensor:
        return self.model(batch["x"], batch)[1]


class AutoEncoder(nn.Module):
    """Returns its latent, which an earlier stage has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.Sequential(Block(), Block(), Block(), Block())

    def forward(self, x: torch.Tensor) -> Any:
        latent = self.encoder(x)
        return self.decoder(latent), latent


class Latent(Base):
    network = AutoEncoder

    def step(self, batch: Any) -> torch.Tensor:
        out, latent = self.model(batch["x"])
        self.log("latent", latent.abs().mean())
        return functional.mse_loss(out, batch["y"]) + 0.1 * latent.pow(2).mean()


class TakesApart(Base):
    def step(self, batch: Any) -> torch.Tensor:
        target = batch.pop("y")
        return functional.mse_loss(self.model(batch["x"]), target)


class MixesUp(Base):
    """Draws from NumPy and Python before the network, and uses the draws in the loss too."""

    def step(self, batch: Any) -> torch.Tensor:
        share = np.random.beta(2.0, 2.0) * random.random()  # noqa: NPY002
        x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        return share * functional.mse_loss(self.model(x), batch["y"]) + (1 - share)


class ChangesBatch(Base):
    def step(self, batch: Any) -> torch.Tensor:
        batch["x"] /= 2
        return super().step(batch)


class CollectingStack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(4, *x.shape, dtype=x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x)
            kept[i] = x
        return kept.mean(0)


class Collects(Base):
    network = CollectingStack


class AddingBlock(Block):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        total.add_(x.detach())
        return x


class AddingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AddingBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, total)
        return x + total


class Adds(Base):
    network = AddingStack


class Hooked(Base):
    network = staticmethod(
        lambda: nn.Sequential(*(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(4)))
    )


class Thaw(Callback):
    """Freezes the first blocks for the first epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model.blocks[:2].requires_grad_(trainer.current_epoch > 0)


class Finetune(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        raise NotImplementedError


def loaders() -> Any:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 6, (22,), generator=generator)
    data = [
        {
            "x": torch.randn(5, 6, generator=generator, dtype=torch.float64),
            "y": torch.randn(5, 6, generator=generator, dtype=torch.float64),
            "mask": (torch.arange(5) < length).double(),
        }
        for length in lengths
    ]
    return DataLoader(data, batch_size=6), DataLoader(data, batch_size=6)


@dataclass(frozen=True)
class Case:
    module: Callable[[], LightningModule]
    callbacks: Callable[[], list[Any]] = list


EXACT = {
    "loss in the network": Case(OwnLoss),
    "latent in the loss": Case(Latent),
    "batch taken apart": Case(TakesApart),
    "thawing layers": Case(Base, lambda: [Thaw()]),
}


@pytest.mark.world_size(2, deadline_s=120)
def test_as_on_one_device() -> None:
    failures = []
    for name, case in EXACT.items():
        options = {"max_epochs": 2, "callbacks": case.callbacks}
        expected = plain(case.module, loaders, **options)
        actual = fit(case.module, loaders, PipeSwiftStrategy(micro_batches=3), **options)
        failures += [f"{name}: {line}" for line in differences(actual, expected)]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("loss", ["auto", "per_sample"])
@pytest.mark.world_size(2, deadline_s=120)
def test_draws_outside_torch_agree_on_all_stages(loss: str) -> None:
    strategy = PipeSwiftStrategy(micro_batches=3, loss=loss)
    losses = fit(MixesUp, loaders, strategy, max_epochs=2).losses
    every: list[Any] = [None, None]
    dist.all_gather_object(every, losses)
    assert every[0] == every[1]
    assert len(set(losses)) == len(losses)  # the draws go on from step to step


REFUSED = {
    "batch changed in place": (ChangesBatch, "changes its batch in place"),
    "activations collected in place": (Collects, "into a tensor in place"),
    "arguments changed by layers": (Adds, "changes a tensor or a list that it is given"),
    "layers with hooks": (Hooked, "forward pre-hook"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.world_size(2, deadline_s=120)
def test_refused_with_the_reason(name: str) -> None:
    module, text = REFUSED[name]
    with pytest.raises(Exception, match=text):
        fit(module, loaders, PipeSwiftStrategy(micro_batches=3), max_epochs=1)


@pytest.mark.world_size(2, deadline_s=120)
def test_callbacks_that_need_all_parameters_are_refused() -> None:
    options = {"max_epochs": 1, "callbacks": lambda: [Finetune()]}
    with pytest.raises(Exception, match=r"the callback Finetune .* each stage holds only its own"):
        fit(Base, loaders, PipeSwiftStrategy(micro_batches=3), **options)
