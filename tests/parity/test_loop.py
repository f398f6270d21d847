"""Lightning's loop around the pipeline: validation, callbacks, all entry points, and refusals."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

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


def both_loaders() -> tuple[Any, Any]:
    return loader(tokens), loader(partial(tokens, 21), batch_size=6)


class OnPlateau(Language):
    """The rate falls when the validation loss does not."""

    rate = 0.03

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.02
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"},
        }


class Hooked(Language):
    """Logs from hooks around the steps too, and gradients as the optimizer sees them."""

    def on_train_epoch_start(self) -> None:
        self.log("epoch/number", float(self.current_epoch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("hook/steps", float(self.global_step), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self) -> None:
        self.log("val/twice", self.trainer.callback_metrics["val/loss"] * 2, prog_bar=True)


class SometimesLogs(Language):
    """The keys depend on the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        per_sample = self.per_sample(batch)
        for token in ids[:, 0].unique().tolist():
            mine = ids[:, 0] == token
            n = int(mine.sum())
            self.log(f"class/{token}", per_sample[mine].mean(), batch_size=n, on_epoch=True)
        return per_sample.mean()


class ReturnsDict(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "ids": batch[0], "note": "x"}


Case = tuple[Callable[[], LightningModule], dict[str, Any]]
LOOPS: dict[str, Case] = {
    "validation": (lambda: logging_all(Language(Transformer())), {}),
    "validation within epochs": (
        lambda: Hooked(Transformer()),
        {"val_check_interval": 2, "num_sanity_val_steps": 2},
    ),
    "plateau": (lambda: OnPlateau(Transformer()), {"max_epochs": 6}),
    "early stopping": (
        lambda: OnPlateau(Transformer()),
        {"max_epochs": 12, "callbacks": lambda: [EarlyStopping("val/loss", 0.02, patience=1)]},
    ),
    "keys that come and go": (lambda: SometimesLogs(Transformer()), {}),
    "a dict": (lambda: ReturnsDict(Transformer()), {}),
    "limited": (
        lambda: Hooked(Transformer()),
        {
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "check_val_every_n_epoch": 2,
            "max_epochs": 4,
        },
    ),
}


def _loops(stages: int, names: list[str]) -> None:
    failures = Failures()
    for name in names:
        module, options = LOOPS[name]
        options = {"max_epochs": 2, **options}
        want = plain(module, both_loaders, **options)
        strategy = {"stages": stages, "micro_batches": 3}
        label = f"{name}, {stages} stages"
        compare(failures, label, module, both_loaders, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(1, deadline_s=120)
def test_loops_on_one_stage() -> None:
    _loops(1, ["validation within epochs"])


@pytest.mark.world_size(2, deadline_s=120)
def test_loops_on_two_stages() -> None:
    _loops(2, list(LOOPS))


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_loops_on_four_stages() -> None:
    _loops(4, ["validation within epochs", "keys that come and go"])


@pytest.mark.world_size(2, deadline_s=120)
def test_model_checkpoint_keeps_the_same_best_on_every_rank(tmp_path: Path) -> None:
    def keep(folder: Path) -> Any:
        return [ModelCheckpoint(folder, "{epoch}", monitor="val/loss", save_top_k=2)]

    made: list[list[Any]] = []

    def run(strategy: Any, folder: Path) -> tuple[str, dict[str, float], list[str]]:
        callbacks = keep(folder)
        made.append(callbacks)
        options = {"max_epochs": 5, "enable_checkpointing": True, "callbacks": callbacks}
        fit(lambda: OnPlateau(Transformer()), both_loaders, strategy, **options)
        callback = callbacks[0]
        best = {Path(k).name: float(v) for k, v in callback.best_k_models.items()}
        return Path(callback.best_model_path).name, best, sorted(p.name for p in folder.iterdir())

    want = on_rank_zero(lambda: run("auto", tmp_path / "plain"))
    got = run(PipeSwiftStrategy(micro_batches=3), tmp_path / "pipeline")
    assert (got[0], sorted(got[1])) == (want[0], sorted(want[1]))
    assert got[1] == pytest.approx(want[1], abs=1e-10)
    assert got[2] == want[2]


# -- every entry point, in any order ----------------------------------------------------------


def _tour(strategy: Any, order: tuple[str, ...], folder: Path) -> dict[str, Any]:
    torch.manual_seed(7)
    module = Language(Transformer())
    trainer = make_trainer(strategy, max_epochs=2)
    data, other = both_loaders()
    seen: dict[str, Any] = {}
    for i, what in enumerate(order):
        if what == "fit":
            trainer.fit_loop.max_epochs = 2 * (i + 1)
            trainer.fit(module, data, other)
            seen[f"{i} fit"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        elif what == "predict":
            found = trainer.predict(module, other)
            seen[f"{i} predict"] = [x.detach().clone() for x in found]
        elif what == "save":
            trainer.save_checkpoint(folder / f"{i}.ckpt")
            trainer.strategy.barrier()
            saved = torch.load(folder / f"{i}.ckpt", weights_only=True)
            seen[f"{i} saved"] = (saved["state_dict"], saved["optimizer_states"][0]["state"])
        else:
            seen[f"{i} {what}"] = getattr(trainer, what)(module, other, verbose=False)
        ids = torch.arange(10).reshape(2, 5) % 7
        module.double()
        seen[f"{i} call"] = module.model(ids).detach().clone()
        copy.deepcopy(module.model)(ids)
        seen[f"{i} state"] = {k: v.clone() for k, v in module.state_dict().items()}
    let_go(trainer)
    return seen


@pytest.mark.world_size(2, deadline_s=120)
@pytest.mark.parametrize(
    "order",
    [
        ("fit", "save", "validate", "test", "predict", "fit", "save"),
        ("predict", "test", "validate", "fit", "validate", "save"),
    ],
    ids="-".join,
)
def test_entry_points_in_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    want = on_rank_zero(lambda: _tour("auto", order, tmp_path))
    got = _tour(PipeSwiftStrategy(micro_batches=3), order, tmp_path)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key], value, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.world_size(2, deadline_s=120)
def test_evaluation_alone_leaves_the_module_as_it_was() -> None:
    torch.manual_seed(7)
    module = Regression(stack()).double()
    before = copy.deepcopy(module.state_dict())
    objects = {n: id(p) for n, p in module.named_parameters()}
    trainer = make_trainer(PipeSwiftStrategy(micro_batches=2))
    trainer.validate(module, loader(vectors), verbose=False)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert {n: id(p) for n, p in module.named_parameters()} == objects
    assert not module.net._forward_hooks
    assert "forward" not in vars(module.net)


# -- torchmetrics -----------------------------------------------------------------------------


class WithMetrics(Regression):
    """Metrics as users hold them: updated in steps, logged as objects, computed at epoch end."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.held = MeanSquaredError().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x)
        self.error(found.reshape(-1), y.reshape(-1))
        self.log("train/error", self.error, on_step=True, on_epoch=True)
        return (found - y).pow(2).mean(1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.held.update(self.net(x).reshape(-1), y.reshape(-1))
        self.log("val/held", self.held, on_step=False, on_epoch=True)


def vector_loaders() -> tuple[Any, Any]:
    return loader(vectors), loader(partial(vectors, 21), batch_size=6)


@pytest.fixture(scope="module")
def with_metrics() -> Any:
    # Not in a rank: torchmetrics would wait for the other ranks there.
    return fit(WithMetrics, vector_loaders, "auto", max_epochs=3)


@pytest.mark.parametrize("_", ["torchmetrics"])
@pytest.mark.world_size(2, deadline_s=120)
def test_torchmetrics_equal_one_device(with_metrics: Any, _: str) -> None:
    failures = Failures()
    for stages in (2,):
        strategy = {"stages": stages, "micro_batches": 3}
        compare(
            failures, "metrics", WithMetrics, vector_loaders, strategy, with_metrics, max_epochs=3
        )
    failures.check()


# -- what is refused, or warned of ------------------------------------------------------------


class TwoCalls(Regression):
    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - self.net(y)).pow(2).mean(1)


class NoCall(Regression):
    def per_sample(self, batch: Any) -> Tensor:
        return batch[0].mean(1)


class SkipsSome(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss: Tensor = super().training_step(batch, batch_idx)
        return None if len(batch[0]) == 2 else loss


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)], []


class Closing(Regression):
    """Has an optimizer that evaluates the step itself."""

    def __init__(self, kind: Any) -> None:
        super().__init__(stack())
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


class Sharpness(torch.optim.SGD):
    """Looks uphill first, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        closure()
        return loss


REFUSED: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any], str]] = {
    "two calls": (lambda: TwoCalls(stack()), partial(loader, vectors), "twice"),
    "no call": (lambda: NoCall(stack()), partial(loader, vectors), "did not call self.net"),
    "partly skipped": (
        lambda: SkipsSome(Transformer()),
        partial(loader, tokens),
        "returned None for micro-batches",
    ),
    "two optimizers": (
        lambda: TwoOptimizers(stack()),
        partial(loader, vectors),
        "several optimizers",
    ),
    "LBFGS": (
        lambda: Closing(torch.optim.LBFGS),
        partial(loader, vectors),
        "LBFGS evaluates the step several times",
    ),
    "SAM": (
        lambda: Closing(Sharpness),
        partial(loader, vectors),
        "Sharpness evaluates a training step more than once",
    ),
    "too many stages": (
        lambda: Regression(nn.Sequential(nn.Linear(6, 6))),
        partial(loader, vectors),
        "1 layers, but 2 stages",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.world_size(2, deadline_s=120)
def test_refused_with_the_reason(name: str) -> None:
    module, data, text = REFUSED[name]
    with pytest.raises(Exception, match=text):
        fit(module, data, PipeSwiftStrategy(micro_batches=3, loss="per_sample"), max_epochs=1)


@pytest.mark.world_size(2, deadline_s=120)
def test_batch_norm_warns() -> None:
    network = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))  # noqa: E731
    make = lambda: Regression(network())  # noqa: E731
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="BatchNorm"):
            fit(make, partial(loader, vectors), PipeSwiftStrategy(micro_batches=2), max_epochs=1)
    else:
        fit(make, partial(loader, vectors), PipeSwiftStrategy(micro_batches=2), max_epochs=1)


@pytest.mark.world_size(1)
def test_a_fit_loads_no_package_that_is_not_in_use() -> None:
    """Transformers' models and Hydra were, on each rank: a third of a second of each start."""
    fit(lambda: Regression(stack()), lambda: loader(vectors), PipeSwiftStrategy(), max_steps=1)
    found = {"transformers.modeling_utils", "accelerate", "hydra"} & sys.modules.keys()
    assert found == set()
