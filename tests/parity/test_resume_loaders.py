"""Whatever draws the batches, and whatever watches the metrics, goes on within an epoch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Regression, Transformer, stack, tokens, vectors
from tests.helpers.parity import Failures, Outcome, differences, fit
from tests.helpers.resuming import shuffled


class Stream(IterableDataset):
    """Has no length, and draws its own order."""

    def __iter__(self) -> Iterator[Any]:
        data = tokens()
        return iter([data[int(i)] for i in torch.randperm(len(data))])


class Augmented(Dataset):
    """Draws from a generator of its own for each sample."""

    def __init__(self) -> None:
        self.data, self.draw = vectors(), np.random.default_rng(4)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(x + self.draw.normal() for x in self.data[index])


class Paired(Regression):
    """Draws inputs from one loader and targets from another."""

    def __init__(self) -> None:
        super().__init__(stack())

    def per_sample(self, batch: Any) -> Tensor:
        (x, _), (y,) = batch["x"], batch["y"]
        return (self.net(x) - y).pow(2).mean(1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val", (self.net(x) - y).pow(2).mean(), add_dataloader_idx=True)


def _language() -> Language:
    return Language(Transformer(dropout=0.2)).double()


def _own_generators() -> Any:
    draw = torch.Generator().manual_seed(3)
    return DataLoader(Augmented(), 8, shuffle=True, generator=draw)


def _pairs() -> Any:
    targets = TensorDataset(vectors(21)[:][1] * 2)
    loaders = {
        "x": DataLoader(vectors(32), 8, shuffle=True),
        "y": DataLoader(targets, 8, shuffle=True, drop_last=True),
    }
    return loaders, [DataLoader(vectors(9), 4), DataLoader(vectors(12), 4)]


def _sees_metrics(folder: Path) -> list[Any]:
    monitor = "val/dataloader_idx_1"
    return [
        EarlyStopping(monitor, patience=2, min_delta=1e3),
        ModelCheckpoint(folder / "best", "{step}", monitor=monitor, save_top_k=2),
    ]


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    data: Callable[[], Any]
    stop: int
    stages: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], list[Any]] = lambda _: []


CASES = {
    "own generators": Case(lambda: Regression(stack()).double(), _own_generators, 7),
    "a stream": Case(_language, lambda: DataLoader(Stream(), 8), 7),
    "replicas": Case(_language, lambda: DataLoader(tokens(64), 4, shuffle=True), 11, stages=1),
    "windows": Case(_language, shuffled, 3, options={"accumulate_grad_batches": 3}),
    "several": Case(
        lambda: Paired().double(), _pairs, 6, options={"max_epochs": 6}, callbacks=_sees_metrics
    ),
}


def _run(case: Case, folder: Path, *, seed: int, **kwargs: Any) -> tuple[Outcome, list[Any]]:
    seen = case.callbacks(folder)
    saves = TopologyCheckpoint(folder / "saves", every_n_steps=case.stop, keep=2)
    outcome = fit(
        case.make,
        case.data,
        PipeSwiftStrategy(stages=case.stages, micro_batches=2),
        callbacks=[*seen, saves],
        seed=lambda: torch.manual_seed(seed),
        enable_checkpointing=bool(seen),
        **{"max_epochs": 3, **case.options, **kwargs},
    )
    return outcome, seen


def _kept(callback: Any) -> Any:
    if isinstance(callback, EarlyStopping):
        return callback.wait_count, callback.stopped_epoch, float(callback.best_score)
    return {Path(p).name: float(score) for p, score in callback.best_k_models.items()}


def _compare(case: Case, folder: Path) -> list[str]:
    want, watched = _run(case, folder / "straight", seed=7)
    _run(case, folder / "stopped", seed=7, max_steps=case.stop)
    path = str(folder / "stopped" / "saves")
    dist.barrier()
    got, seen = _run(case, folder / "stopped", seed=8, ckpt_path=path)
    num = len(got.losses)
    if not 0 < num < len(want.losses):
        return [f"{num} batches after resuming, of {len(want.losses)}"]
    want.losses, want.rates = want.losses[-num:], want.rates[-len(got.rates) :]
    want.logged = want.logged[-len(got.logged) :]
    kept = [(_kept(a), _kept(b)) for a, b in zip(seen, watched, strict=True)]
    return differences(got, want) + [f"{a} for {b}" for a, b in kept if a != b]


def _all(folder: Path) -> None:
    failures = Failures()
    for name, case in CASES.items():
        try:
            failures.add(name, _compare(case, folder / name))
        except BaseException as error:
            error.add_note(f"in {name}; failures before: {failures.found}")
            raise
    failures.check()


@pytest.mark.slow
def test_batches_and_decisions_are_those_of_a_straight_run(tmp_path: Path) -> None:
    """Their generators were not saved once, nor the samplers of replicas told the epoch."""
    run_ranks(_all, 2, {"folder": tmp_path}, deadline_s=500)
