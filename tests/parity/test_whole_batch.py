"""Losses that are no mean over samples: exact, chosen by itself, and by the user's word."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.parity import differences, fit, lone_trainer, plain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class WithAuxiliary(nn.Module):
    """Returns an auxiliary loss beside its output, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"out": x, "aux": x.pow(2).mean()}


class Module(LightningModule):
    def __init__(self, loss: Callable[..., torch.Tensor], network: nn.Module) -> None:
        super().__init__()
        self.model = network
        self.scale = nn.Parameter(torch.tensor(1.3))  # before the network, outside of it
        self.loss = loss
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = self.loss(self.model(batch["x"] * self.scale), batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(self.model(batch["x"]), batch)
        self.log_dict({"val": loss, "perplexity": (0.01 * loss).exp()})
        self.log("worst", loss, reduce_fx="max")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def token_mean(out, batch):
    """A mean over the tokens that count: samples of 1 to 5 tokens weigh differently."""
    each = functional.mse_loss(out, batch["y"], reduction="none").mean(-1)
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def ignored_labels(out, batch):
    labels = torch.where(batch["mask"].bool(), batch["label"], -100)
    return functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def contrastive(out, batch):
    """Every sample against every other one of the batch."""
    vectors = functional.normalize(out.mean(1), dim=-1)
    return functional.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))


def summed(out, batch):
    return functional.mse_loss(out, batch["y"], reduction="sum")


def sample_mean(out, batch):
    return functional.mse_loss(out, batch["y"])


def with_auxiliary(out, batch):
    return sample_mean(out["out"], batch) + 0.1 * out["aux"]


def chain() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def loaders():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 6, (38,), generator=generator)
    data = [
        {
            "x": torch.randn(5, 6, generator=generator, dtype=torch.float64),
            "y": torch.randn(5, 6, generator=generator, dtype=torch.float64),
            "label": torch.randint(0, 6, (5,), generator=generator),
            "mask": (torch.arange(5) < length).double(),
        }
        for length in lengths
    ]
    return DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)


@dataclass(frozen=True)
class Case:
    name: str
    loss: Callable[..., torch.Tensor]
    network: Callable[[], nn.Module] = chain

    def module(self) -> Module:
        return Module(self.loss, self.network())


CASES = (
    Case("token mean", token_mean),
    Case("ignored labels", ignored_labels),
    Case("contrastive", contrastive),
    Case("sum", summed),
    Case("sample mean", sample_mean),
    Case("auxiliary loss", with_auxiliary, WithAuxiliary),
)


LENGTH = {"max_epochs": 2, "max_steps": 6}  # of 5 batches an epoch: the first ones tell its kind


def _compare(strategy: Callable[[], PipeSwiftStrategy]) -> None:
    failures = []
    for case in CASES:
        expected = plain(case.module, loaders, **LENGTH)
        actual = fit(case.module, loaders, strategy(), **LENGTH)
        failures += [f"{case.name}: {line}" for line in differences(actual, expected)]
    assert not failures, "\n".join(failures)


@pytest.mark.world_size(2, deadline_s=120)
def test_any_loss_equals_one_device_on_two_stages() -> None:
    _compare(lambda: PipeSwiftStrategy(micro_batches=[3, 1, 4]))


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=180)
def test_any_loss_equals_one_device_on_four_stages() -> None:
    _compare(PipeSwiftStrategy)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_two_pipelines_of_two_stages_agree_with_themselves() -> None:
    """Replicas choose the scope by their own batches; that must not part them."""
    strategy = PipeSwiftStrategy(stages=2, micro_batches=4)
    outcome = fit(CASES[0].module, loaders, strategy, max_epochs=2)
    every: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(every, outcome.parameters)
    for other in every[1:]:
        assert all(torch.equal(every[0][name], other[name]) for name in other)


def test_a_sample_mean_runs_by_micro_batches_after_the_first_steps() -> None:
    assert _calls_in_last_step("auto", sample_mean) == 4
    assert _calls_in_last_step("per_sample", sample_mean) == 4


def test_a_token_mean_keeps_to_whole_batches() -> None:
    assert _calls_in_last_step("auto", token_mean) == 2  # up to the network's call, and the loss
    assert _calls_in_last_step("whole_batch", sample_mean) == 2


def _calls_in_last_step(loss: str, function: Callable[..., torch.Tensor]) -> int:
    """How often ``training_step`` runs in step 6 on one stage, with 4 micro-batches."""
    made: list[Module] = []

    def module() -> Module:
        made.append(Module(function, chain()))
        return made[-1]

    def run(steps: int) -> int:
        _fit_alone(module, loss, steps)
        return made[-1].calls

    return run(7) - run(6)


def _fit_alone(module: Callable[[], Module], loss: str, steps: int) -> None:
    torch.manual_seed(0)
    fitted = module()
    trainer = lone_trainer(
        PipeSwiftStrategy(micro_batches=4, loss=loss),
        max_steps=steps,
        precision="64-true",
        limit_val_batches=0,
    )
    trainer.fit(fitted, loaders()[0])
