"""What has gone silently wrong for users of other pipelines: the same as on one device, here."""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Sampler

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.modules import Language, Regression, Transformer, loader, stack, tokens, vectors
from tests.helpers.networks import Padded, Ragged, pad
from tests.helpers.parity import (
    Failures,
    Outcome,
    compare,
    differences,
    fit,
    lone_trainer,
    on_rank_zero,
    plain,
)
from tests.helpers.transparent import Manual, two_loaders

TIED = partial(Transformer, tied="functional")


class ClipsItself(Language):
    """Clips by torch's function in Lightning's hook, and logs what it returns."""

    order: float = float("inf")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = clip_grad_norm_(self.parameters(), 0.05, norm_type=self.order)
        self.log("norm", norm, on_step=True, on_epoch=True)
        end = clip_grad_norm_(self.model.norm.parameters(), 0.02)  # on one stage alone
        self.log("norm of the end", end)
        everything = torch.nn.utils.get_total_norm([p for p in self.parameters() if not p.is_meta])
        assert everything > 0  # parameters are no gradients: this stage's own


class ClipsBySum(ClipsItself):
    order = 1.0


class ManualClips(Manual):
    """Clips by hand, without Lightning; its head is on every stage."""

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("norm", clip_grad_norm_(self.parameters(), 0.3))


class Skipping(Language):
    """Leaves out a batch: the parameters must not even decay."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss: Tensor = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Picky(Language):
    """Logs other keys for each micro-batch: those of the tokens that it holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        per_sample = self.per_sample(batch)
        for token in ids[:, 0].unique().tolist():
            mine = per_sample[ids[:, 0] == token]
            options: dict[str, Any] = {"sync_dist": bool(token % 2), "on_epoch": True}
            self.log(f"{token}", mine.mean(), batch_size=len(mine), **options)
            self.log(f"{token} worst", mine.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return per_sample.mean()


class Shortens(Padded):
    """Each micro-batch is cut to its own longest row: shapes change within a step."""

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        rows = torch.split(batch["ids"], list(sizes))
        names = [batch["names"][sum(sizes[:i]) :][:n] for i, n in enumerate(sizes)]
        return [
            {**batch, "ids": ids, "mask": ids > 0, "names": name}
            for ids, name in zip((_cut(part) for part in rows), names, strict=True)
        ]


def _cut(ids: Tensor) -> Tensor:
    return ids[:, : int((ids > 0).sum(1).max())]


class InOrder(Sampler[list[int]]):
    """A user's own batches, of several sizes."""

    def __iter__(self) -> Any:
        return iter([[0, 5, 9, 3], [7, 2, 1], [8, 4, 6, 10, 11, 12]])

    def __len__(self) -> int:
        return 3


class OnPlateau(Language):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.05
        )
        monitored = {"scheduler": scheduler, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": monitored}


class Diverging(Regression):
    """Its loss grows, and is nan in the end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("grows", loss.detach() + self.current_epoch, on_step=False, on_epoch=True)
        late = float("nan") if self.current_epoch > 2 else 1.0
        self.log("breaks", loss.detach() * late, on_step=False, on_epoch=True)
        return loss


def text() -> tuple[DataLoader, DataLoader]:
    return loader(partial(tokens, 21)), loader(partial(tokens, 9), batch_size=6)


def numbers() -> DataLoader:
    return loader(partial(vectors, 21))


def ragged() -> DataLoader:
    return DataLoader(Ragged(21), batch_size=8, collate_fn=pad)


def stops(monitor: str, **kwargs: Any) -> dict[str, Any]:
    stopping = partial(EarlyStopping, monitor, check_on_train_epoch_end=True, **kwargs)
    return {"max_epochs": 6, "callbacks": lambda: [stopping()]}


Case = tuple[
    Callable[[], LightningModule], Callable[[], Any], dict[str, Any], dict[str, dict[str, Any]]
]
BY_MICRO_BATCH = {"by micro-batch": {"loss": "per_sample"}}
EACH_LOSS = {**BY_MICRO_BATCH, "whole": {"loss": "whole_batch"}, "whole steps": {
    "loss": "transparent"}}  # fmt: skip
CASES: dict[str, Case] = {
    "clipped by the largest gradient": (lambda: ClipsItself(TIED()), text, {}, EACH_LOSS),
    "clipped by the sum": (lambda: ClipsBySum(TIED()), text, {}, BY_MICRO_BATCH),
    "clipped by hand": (lambda: ManualClips().double(), two_loaders, {}, {"": {}}),
    "skipped batches": (lambda: Skipping(TIED()), text, {}, EACH_LOSS),
    "skipped, accumulated": (
        lambda: Skipping(TIED()),
        text,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        BY_MICRO_BATCH,
    ),
    "other keys": (lambda: Picky(Transformer()), text, {}, BY_MICRO_BATCH),
    "shapes within a step": (
        Shortens,
        ragged,
        {},
        {**BY_MICRO_BATCH, "gpipe": {"loss": "per_sample", "schedule": "gpipe"}},
    ),
    "a batch sampler": (
        lambda: Regression(stack()),
        lambda: DataLoader(vectors(), batch_sampler=InOrder()),
        {},
        BY_MICRO_BATCH,
    ),
    "divergence": (
        lambda: Diverging(stack()),
        numbers,
        stops("grows", divergence_threshold=3.0, patience=9),
        BY_MICRO_BATCH,
    ),
    "a loss that is no number": (
        lambda: Diverging(stack()),
        numbers,
        stops("breaks", patience=9),
        BY_MICRO_BATCH,
    ),
    "good enough": (
        lambda: Diverging(stack()),
        numbers,
        stops("train/loss", stopping_threshold=0.6, patience=9),
        BY_MICRO_BATCH,
    ),
}


@pytest.mark.world_size(2, deadline_s=120)
def test_as_on_one_device() -> None:
    warnings.filterwarnings("ignore", ".*returned.*None.*")
    failures = Failures()
    for name, (module, data, options, strategies) in CASES.items():
        options = {"max_epochs": 2, **options}
        want = plain(module, data, **options)
        for how, given in strategies.items():
            strategy = {"micro_batches": 3, **given}
            compare(failures, f"{name}, {how}", module, data, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_any_number_of_micro_batches_under_each_schedule() -> None:
    """Fewer than stages too: elsewhere that hangs, or is forbidden."""
    failures = Failures()
    module, data = lambda: Regression(stack()), lambda: DataLoader(vectors(12), 4)
    want = plain(module, data, max_epochs=1)
    for num in (1, 2, 3, 4):
        for order in ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"warm_up": 2.0}):
            strategy = {"micro_batches": num, "loss": "per_sample", **order}
            compare(failures, f"{num}, {order}", module, data, strategy, want, max_epochs=1)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_replicas_may_not_skip_a_batch() -> None:
    """One could leave out what the others train on. Lightning's own words."""
    strategy = PipeSwiftStrategy(stages=1)
    with pytest.raises(RuntimeError, match="returning None in distributed training"):
        fit(lambda: Skipping(TIED()), text, strategy, max_epochs=1)


# -- gradients that are not finite ------------------------------------------------------------


class Poisoned(Regression):
    """One gradient of the first stage is not finite, in the third batch."""

    def __init__(self, value: float) -> None:
        super().__init__(stack())
        self.value = value

    def on_after_backward(self) -> None:
        gradient = self.net[0].bias.grad
        if gradient is not None and self.trainer.global_step == 2:
            gradient[1] = self.value


class Demanding(Poisoned):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


def _numbers_for_nan(outcome: Outcome) -> Outcome:
    """Nan equals nan here: what is lost has to be lost alike."""
    outcome.parameters = {n: p.nan_to_num(nan=9.9) for n, p in outcome.parameters.items()}
    return outcome


@pytest.mark.world_size(2, deadline_s=120)
def test_a_gradient_that_is_not_finite_spoils_the_same_on_all_stages() -> None:
    failures, original = Failures(), torch.nn.utils.clip_grad._get_total_norm
    strategy = partial(PipeSwiftStrategy, micro_batches=3, loss="per_sample")
    for value in (float("inf"), float("nan")):
        for algorithm in ("norm", "value"):
            module = partial(Poisoned, value)
            options: dict[str, Any] = {
                "max_epochs": 1,
                "limit_train_batches": 3,
                "gradient_clip_val": 0.1,
                "gradient_clip_algorithm": algorithm,
            }
            want = _numbers_for_nan(plain(module, numbers, **options))
            assert all((p == 9.9).all() for p in want.parameters.values()) == (
                algorithm == "norm" and value != value
            )
            got = _numbers_for_nan(fit(module, numbers, strategy(), **options))
            failures.add(f"{value}, {algorithm}", differences(got, want))
    failures.check()
    with pytest.raises(RuntimeError, match=r"by stage: \[nan, .*look at the stage"):
        fit(partial(Demanding, float("nan")), numbers, strategy(), max_epochs=1)
    assert torch.nn.utils.clip_grad._get_total_norm is original


# -- what a step leaves behind ----------------------------------------------------------------


class Copies(Callback):
    """Compares both stages' copies of a tied weight, after each step."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weight = module.model.embed.weight
        every = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(every, weight.detach())
        assert torch.equal(every[0], every[1])
        self.seen += 1


@pytest.mark.world_size(2, deadline_s=120)
def test_both_copies_of_a_tied_weight_are_equal_after_each_step() -> None:
    for options in ({"loss": "per_sample"}, {"loss": "whole_batch"}):
        copies = Copies()
        strategy = PipeSwiftStrategy(micro_batches=3, **options)
        given: dict[str, Any] = {"gradient_clip_val": 0.05, "callbacks": [copies]}
        fit(lambda: Language(TIED()), text, strategy, max_epochs=2, **given)
        assert copies.seen == 6


@pytest.mark.world_size(2, deadline_s=120)
def test_the_rate_falls_on_a_plateau_over_a_resumed_run_too(tmp_path: Path) -> None:
    def run(make: Callable[[], Any], folder: Path) -> Outcome:
        saving: dict[str, Any] = {
            "callbacks": lambda: [ModelCheckpoint(folder, "last")],
            "enable_checkpointing": True,
        }
        fit(lambda: OnPlateau(TIED()).double(), text, make(), max_epochs=3, **saving)
        path = str(folder / "last.ckpt")
        return fit(lambda: OnPlateau(TIED()).double(), text, make(), max_epochs=7, ckpt_path=path)

    want = on_rank_zero(lambda: run(lambda: "auto", tmp_path / "plain"))
    assert len(set(want.rates)) > 1
    got = run(partial(PipeSwiftStrategy, micro_batches=3), on_rank_zero(lambda: tmp_path / "ours"))
    found = differences(got, want)
    assert not found, found


def test_accumulation_beyond_an_epoch_warns() -> None:
    def heard(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = PipeSwiftStrategy(micro_batches=2)
            fit(lambda: Regression(stack()), lambda: DataLoader(vectors(), 19), "auto", **options)
            _alone(strategy, **options)
        return [str(w.message) for w in caught if "an epoch has" in str(w.message)]

    schedule = [GradientAccumulationScheduler({0: 1, 1: 3})]
    for options in ({"accumulate_grad_batches": 4}, {"callbacks": schedule}):
        (text,) = heard(max_epochs=2, **options)
        assert re.search(r"grad_batches=[34], but an epoch has 2 .*Rule: .*Remedy: ", text)
    assert heard(max_epochs=2, accumulate_grad_batches=2) == []


def _alone(strategy: PipeSwiftStrategy, **options: Any) -> None:
    trainer = lone_trainer(strategy, precision="64-true", num_sanity_val_steps=0, **options)
    trainer.fit(Regression(stack()), DataLoader(vectors(), 19))
