"""Losses that are means over tokens, micro-batch by micro-batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.modules import WIDTH, Block
from tests.helpers.parity import Failures, compare, fit, lone_trainer, plain

LENGTH, CLASSES = 5, 4


class OwnLoss(nn.Module):
    """Returns a mean over the labels that are not -100, as Hugging Face's models do."""

    def __init__(self, *, shifted: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.shifted = shifted

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = self.drop(layer(x))
        logits = self.head(x)
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": functional.cross_entropy(logits.mT, labels), "logits": logits}


class Tokens(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model = network
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        out = self.model(batch["x"], batch["labels"])
        self.log("loss", out["loss"], on_step=True, on_epoch=True, sync_dist=True)
        self.log("given", out["loss"] * 2, batch_size=len(batch["x"]), sync_dist=True)
        self.log("mean of samples", out["logits"].mean(), sync_dist=True)
        return {"loss": out["loss"], "copy": out["loss"].detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.model(batch["x"], batch["labels"])["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Weighted(Tokens):
    """Counts its tokens itself: its batches call the labels otherwise."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"x": batch["x"], "labels": batch["words"]}, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step({"x": batch["x"], "labels": batch["words"]}, batch_idx)

    def micro_batch_weight(self, micro_batch: Any) -> float:
        return float((micro_batch["words"] != -100).sum())


class Outside(Tokens):
    """Computes the same mean in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        logits = self.model(batch["x"])
        loss = functional.cross_entropy(logits.mT, batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.model(batch["x"]).mean())


def rows(name: str = "labels") -> list[dict[str, Tensor]]:
    """Samples with 0 to 4 labels after the first; the first three of each eight have none."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for i in range(32):
        count = 0 if i % 8 < 3 else int(torch.randint(5, (), generator=draw))
        labels = torch.randint(CLASSES, (LENGTH,), generator=draw)
        labels[1 + count :] = -100
        labels[0] = -100 if i % 2 else labels[0]
        x = torch.randn(LENGTH, WIDTH, generator=draw, dtype=torch.float64)
        found.append({"x": x, name: labels})
    return found


def loaders(name: str = "labels") -> tuple[DataLoader, DataLoader]:
    return DataLoader(rows(name), batch_size=8), DataLoader(rows(name)[:8], batch_size=8)


def outside() -> Outside:
    return Outside(nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)))


Case = tuple[Callable[[], LightningModule], str, dict[str, Any]]
CASES: dict[str, Case] = {
    "found": (lambda: Tokens(OwnLoss()), "labels", {}),
    "found, shifted": (lambda: Tokens(OwnLoss(shifted=True)), "labels", {}),
    "named": (lambda: Tokens(OwnLoss()), "labels", {"loss_weight": "tokens"}),
    "hook": (lambda: Weighted(OwnLoss()), "words", {}),
    "outside, found": (outside, "labels", {}),
    "outside, unchecked": (outside, "labels", {"loss_weight": "tokens", "loss": "per_sample"}),
}


@pytest.mark.world_size(2, deadline_s=180)
def test_token_means_equal_one_device_and_data_parallel() -> None:
    failures = Failures()
    for name, (module, labels, options) in CASES.items():
        want = plain(module, lambda labels=labels: loaders(labels), max_epochs=3)
        strategy = {"micro_batches": [3, 3, 2], **options}
        compare(
            failures,
            name,
            module,
            lambda labels=labels: loaders(labels),
            strategy,
            want,
            max_epochs=3,
        )
    module = CASES["found, shifted"][0]
    want = fit(module, loaders, DDPStrategy(process_group_backend="gloo"), max_epochs=5)
    strategy = {"micro_batches": 3, "stages": 1}
    compare(failures, "replicas", module, loaders, strategy, want, max_epochs=5)
    failures.check()


def _calls(module: Tokens, steps: int) -> int:
    fit_alone(module, steps, loaders()[:1])
    return module.calls


def fit_alone(module: Tokens, steps: int, data: tuple[DataLoader, ...], **options: Any) -> None:
    torch.manual_seed(0)
    trainer = lone_trainer(
        PipeSwiftStrategy(**{"micro_batches": 4, **options}),
        max_steps=steps,
        precision="64-true",
        num_sanity_val_steps=0,
    )
    trainer.fit(module, *data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokens(OwnLoss()),
        lambda: Tokens(OwnLoss(shifted=True, dropout=0.5)),
        outside,
    ],
    ids=["own loss", "own loss, dropout", "loss outside"],
)
def test_a_token_mean_runs_by_micro_batches_once_it_is_checked(make) -> None:
    assert _calls(make(), 7) - _calls(make(), 6) == 4


def test_evaluation_joins_the_loss_by_the_weights_that_training_found() -> None:
    sizes: list[int] = []
    module = Tokens(OwnLoss())
    module.model.head.register_forward_hook(lambda _, args, out: sizes.append(len(out)))
    fit_alone(module, 4, loaders())
    assert sizes[-4:] == [2, 2, 2, 2]  # the last batch is one of validation


def test_a_loss_that_no_weights_explain_runs_whole() -> None:
    class Summed(OwnLoss):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {**super().forward(x, labels), "loss": x.sum() + self.head(x).sum()}

    with pytest.warns(UserWarning, match="not known to be a mean of its"):
        calls = _calls(Tokens(Summed()), 7)
    assert calls - _calls(Tokens(Summed()), 6) == 1


def test_a_weight_that_is_no_number_is_refused() -> None:
    class Wrong(Tokens):
        def micro_batch_weight(self, micro_batch: Any) -> float:
            return float("nan")

    with pytest.raises(ValueError, match=r"returned nan. Rule: .* Remedy: "):
        _calls(Wrong(OwnLoss()), 1)


def test_tokens_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r'loss_weight="tokens", but .* Rule: .* Remedy: '):
        fit_alone(
            _Renamed(OwnLoss()), 1, loaders("words")[:1], loss="per_sample", loss_weight="tokens"
        )


class _Renamed(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"x": batch["x"], "labels": batch["words"]}, batch_idx)
