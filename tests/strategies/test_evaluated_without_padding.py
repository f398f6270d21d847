"""Evaluation loses padding only where nothing that a step gives, in any form, depends on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies import planning
from pipeswift_lightning.strategies.likeness import unlike
from tests.helpers.networks import MaskedTransformer, Padded
from tests.helpers.parity import TOLERANCE, lone_trainer
from tests.helpers.planned import costs, loader, quick_choice

CLASSES = 6


@dataclass
class Scored:
    logits: Tensor


class Predicting(Padded):
    """Returns all positions' logits, in a form of its own."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.form(self.model(batch["ids"], mask=batch["mask"]))


def of_tokens(values: Tensor, mask: Tensor) -> Tensor:
    return ((values * mask).sum(1) / mask.sum(1)).mean()


class Counting(Padded):
    """Keeps what it has seen on the module, as Lightning's guides do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.by_kind: dict[str, list[Tensor]] = {"val": []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.per_sample(batch).mean()
        self.seen.append(loss)
        self.by_kind["val"].append(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("seen", float(len(self.seen)))
        self.log("kind", torch.stack(self.by_kind["val"]).mean())


class TwoLoaders(Padded):
    """Looks at the padding of the second loader's batches alone."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self.model(batch["ids"], mask=batch["mask"]).mean(2)
        found = logits.mean() if dataloader_idx else of_tokens(logits, batch["mask"])
        self.log("found", found, batch_size=len(logits))


class Shortened(MaskedTransformer):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, mask)[:, :-1]


class WithWidth(MaskedTransformer):
    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        return super().forward(ids, mask), ids.shape[1]


class Odd(Padded):
    """Its network does not return a row a token, or no tensors alone."""

    def __init__(self, network: type[MaskedTransformer]) -> None:
        super().__init__()
        self.model = network()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.model(batch["ids"], mask=batch["mask"])
        values = (found[0] if isinstance(found, tuple) else found).mean(2)
        self.log("found", of_tokens(values, batch["mask"][:, -values.shape[1] :]))


class Twice(Padded):
    """Gives its network each sample twice."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, mask = (torch.cat([batch[name]] * 2) for name in ("ids", "mask"))
        found = self.model(ids, mask=mask).mean(2)[: len(batch["ids"])]
        self.log("found", of_tokens(found, batch["mask"]))


class Words(Metric):
    """Keeps what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)

    def update(self, names: list[str]) -> None:
        self.words += [(name,) for name in names]

    def compute(self) -> Tensor:
        return torch.tensor(float(len(self.words)))


class Measured(Padded):
    """Has metrics of every kind."""

    def __init__(self) -> None:
        super().__init__()
        each = {"num_classes": CLASSES, "average": "macro"}
        self.rates = MetricCollection([MulticlassPrecision(**each), MulticlassRecall(**each)])
        self.guesses, self.words = CatMetric(), Words()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        mask = batch["mask"]
        guesses = self.model(batch["ids"], mask=mask)[..., :CLASSES].argmax(2)[mask]
        self.rates.update(guesses, batch["ids"][mask] % CLASSES)
        self.guesses.update(guesses.double())
        self.words.update(batch["names"])
        self.log_dict(self.rates)

    def on_validation_epoch_end(self) -> None:
        guesses = self.guesses.compute()
        self.log("in order", (guesses * torch.arange(len(guesses))).sum())
        self.log("words", self.words.compute())
        self.guesses.reset()
        self.words.reset()


@pytest.fixture
def strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipeSwiftStrategy:
    monkeypatch.setattr(planning, "choose_plan", quick_choice)
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    return PipeSwiftStrategy(costs=path, micro_batches=4, loss="per_sample")


def both(
    strategy: PipeSwiftStrategy,
    make: Callable[[], LightningModule],
    run: Callable[[Trainer, LightningModule], Any],
) -> tuple[Any, Any, bool]:
    """Return what plain Lightning finds, what a plan finds, and whether it has lost padding."""
    found = []
    for chosen in ("auto", strategy):
        torch.manual_seed(0)
        found.append(run(lone_trainer(chosen, precision="64-true"), make()))
    trimming = strategy.step_state()["planner"]["trimming"]
    assert trimming["checks"]
    return found[0], found[1], not trimming["kept"]


def validated(trainer: Trainer, module: LightningModule) -> Any:
    num = 2 if isinstance(module, TwoLoaders) else 1
    loaders = [loader(num=43) for _ in range(num)]
    return trainer.validate(module, loaders, verbose=False)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.argmax(2).tolist(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        Scored,
        lambda x: {"words": ["".join(map(str, row)) for row in x.argmax(2).tolist()]},
        lambda x: (x.amax((1, 2)) > 9).tolist(),  # never so: but it does look at padding
    ],
    ids=["integers", "floats", "array", "dataclass", "strings", "rare"],
)
def test_predictions_of_any_form_are_compared(
    strategy: PipeSwiftStrategy, form: Callable[[Tensor], Any]
) -> None:
    want, got, loses = both(
        strategy, lambda: Predicting(form), lambda t, m: t.predict(m, loader(num=43))
    )
    assert unlike(want, got, TOLERANCE) < 0.1  # of 1e-9
    assert not loses


@pytest.mark.parametrize(
    ("make", "loses"),
    [
        (Counting, True),
        (TwoLoaders, False),
        (lambda: Odd(Shortened), False),
        (lambda: Odd(WithWidth), False),
        (Twice, False),
        (Measured, True),
    ],
    ids=["counting", "two loaders", "shortened", "with its width", "twice", "measured"],
)
def test_a_step_of_any_kind_is_evaluated_as_on_one_device(
    strategy: PipeSwiftStrategy, make: Callable[[], LightningModule], loses: bool
) -> None:
    want, got, lost = both(strategy, make, validated)
    for mine, other in zip(got, want, strict=True):
        assert mine == pytest.approx(other, abs=TOLERANCE)
    assert lost is loses
