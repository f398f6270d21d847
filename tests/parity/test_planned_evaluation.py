"""Evaluation that costs have planned: its micro-batches lose padding, and its results nothing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies import planning
from pipeswift_lightning.strategies.likeness import unlike
from tests.helpers.modules import VOCABULARY
from tests.helpers.networks import MaskedTransformer, Padded
from tests.helpers.parity import (
    TOLERANCE,
    Failures,
    Outcome,
    compare,
    let_go,
    make_trainer,
    on_rank_zero,
    plain,
)
from tests.helpers.planned import (
    FixedWidth,
    PaddingCounts,
    Tokens,
    costs,
    loader,
    pad_to_widest,
    quick_choice,
    token_rows,
)

NARROWEST = 6  # tokens of a row of the narrowest batch


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(costs().to_json())
    return path


def widths_of(module: LightningModule) -> list[int]:
    """Notes the widths of the rows that the module's network sees outside of training."""
    widths: list[int] = []

    def note(network: Any, args: Any, kwargs: Any) -> None:
        if not module.training:
            widths.append(int(args[0].shape[1]))

    module.model.register_forward_pre_hook(note, with_kwargs=True)
    return widths


class Metrics(Padded):
    """Gives a metric every position, or those with a token, and logs nothing else of them."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.seen = MeanMetric(sync_on_compute=False)  # plain Lightning runs beside another rank
        self.masked = masked

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = (self.model(batch["ids"], mask=batch["mask"]) > 0).double().mean(2)
        mask = batch["mask"]
        self.seen.update((hits * mask).sum(1) / mask.sum(1) if self.masked else hits.flatten())

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.seen.reset()


class Shortened(MaskedTransformer):
    """Returns no row for the last token, so that rows cannot be told by their length."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, mask)[:, :-1]


class Called(Padded):
    """Calls a metric, whose state the first look changes on values without data."""

    def __init__(self) -> None:
        super().__init__()
        options = {"average": "micro", "ignore_index": 0, "sync_on_compute": False}
        self.hits = MulticlassAccuracy(VOCABULARY, **options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["ids"], mask=batch["mask"])
        self.hits(logits.transpose(1, 2), batch["ids"])
        self.log("val/hits", self.hits)


class Guessing(Padded):
    """Predicts the logits of all positions, or the best guess of each token."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "all but the last":
            self.model = Shortened()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["ids"], mask=batch["mask"])
        match self.what:
            case "guesses":
                return {"guess": logits.argmax(2) * batch["mask"], "names": batch["names"]}
            case "guesses in a list":
                return logits.argmax(2).tolist()
            case "all but the last":
                return logits * batch["mask"][:, 1:, None]
            case _:
                return logits


class Validated(Tokens):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.model(batch["input_ids"], batch["seen"], batch["labels"])
        self.log("val/loss", found)


VALIDATED: dict[str, tuple[Callable[[], LightningModule], Any, bool]] = {
    "masked": (Padded, loader, True),
    "masked, shortest first": (Padded, loader, True),
    "padding counts": (PaddingCounts, loader, False),
    "a metric of tokens": (partial(Metrics, masked=True), loader, True),
    "a metric that is called": (Called, loader, True),
    "a metric of all positions": (partial(Metrics, masked=False), loader, False),
    "one width": (FixedWidth, partial(loader, pad_to_widest), False),
    "own loss": (partial(Validated, own_loss=True), partial(loader, token_rows), True),
}


@pytest.mark.world_size(2, deadline_s=100)
def test_validation_loses_padding_and_nothing_else(cost_file: Path) -> None:
    failures = Failures()
    planning.choose_plan = quick_choice
    wants: dict[Any, Outcome] = {}
    for name, (make, rows, trims) in VALIDATED.items():
        widths: list[int] = []

        def module(make: Any = make, widths: list[int] = widths) -> LightningModule:
            made: LightningModule = make()
            noted = widths_of(made)
            widths[:] = []
            made.on_fit_end = lambda: widths.extend(noted)  # type: ignore[method-assign]
            return made

        def data(rows: Any = rows) -> tuple[DataLoader, DataLoader]:
            return rows(), rows(num=43)

        options = {"max_epochs": 2}
        if make not in wants:
            wants[make] = plain(make, data, **options)
        want = wants[make]
        strategy: dict[str, Any] = {"costs": cost_file, "loss": "per_sample"}
        if name == "own loss":
            strategy["loss"] = "auto"
        if name.endswith("shortest first"):
            strategy["order"] = "shortest_first"
        compare(failures, name, module, data, strategy, want, **options)
        narrow = any(width < NARROWEST for width in widths[-24:])  # once looks have compared
        failures.add(name, [] if narrow is trims else [f"rows seen: {widths}"])
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_predictions_are_those_of_one_device(cost_file: Path) -> None:
    def predict(strategy: Any, what: str) -> tuple[Any, list[int]]:
        torch.manual_seed(3)
        module = Guessing(what)
        widths = widths_of(module)
        trainer = make_trainer(strategy)
        found = trainer.predict(module, loader(num=43))
        let_go(trainer)
        return found, widths

    failures = Failures()
    planning.choose_plan = quick_choice
    for what in ("guesses", "logits", "guesses in a list", "all but the last"):
        want = on_rank_zero(lambda w=what: predict("auto", w)[0])
        got, widths = predict(PipeSwiftStrategy(costs=cost_file), what)
        for i, (mine, other) in enumerate(zip(got, want, strict=True)):
            same = unlike(mine, other, TOLERANCE) < 0.1  # of 1e-9
            failures.add(f"{what}, batch {i}", [] if same else [f"{mine} for {other}"])
        narrow = any(width < NARROWEST for width in widths[-24:])
        failures.add(what, [] if narrow is (what == "guesses") else [f"rows seen: {widths}"])
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
@pytest.mark.parametrize("buckets", [4, [3, 6]])
def test_buckets_bound_the_widths_that_occur(cost_file: Path, buckets: Any) -> None:
    torch.manual_seed(3)
    module = Padded()
    widths: set[int] = set()
    module.model.register_forward_pre_hook(
        lambda network, args, kwargs: widths.add(int(args[0].shape[1])), with_kwargs=True
    )
    strategy = PipeSwiftStrategy(
        costs=cost_file, loss="per_sample", trim=True, buckets=buckets, micro_batches=4
    )
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, loader(num=64))
    let_go(trainer)
    assert widths <= ({4, 7, 8} if buckets == 4 else {3, 6, 7, 8}), widths  # and whole batches'
    assert len(widths) > 1
