"""A checkpoint in shards goes on as if nothing had stopped, within an epoch, on any topology."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.strategies.consolidate import consolidate
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Base, Language, Transformer, tokens
from tests.helpers.parity import Outcome, differences, fit
from tests.helpers.resuming import everything, shuffled

pytestmark = pytest.mark.slow
MANY = {"max_epochs": 4, "val_check_interval": 2, "gradient_clip_val": 0.5}
FEW = {"max_epochs": 2, "accumulate_grad_batches": 2}


def simple() -> Language:
    return Language(Transformer(tied="functional")).double()


class OnMeta(Language):
    """Never whole on a rank: each stage reads its own part of a checkpoint."""

    def __init__(self) -> None:
        Base.__init__(self)
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Transformer(tied="functional").double()


def ordered(stages: int = 1) -> DataLoader:
    """The same batches of 8 samples on any number of replicas, which share them."""
    size = dist.get_world_size() // stages if dist.is_initialized() else 1
    rank = dist.get_rank() // stages if dist.is_initialized() else 0
    data = tokens(32)
    return DataLoader(data, 8 // size, sampler=DistributedSampler(data, size, rank, shuffle=False))


def _fit(make: Any, data: Any, stages: int, **kwargs: Any) -> Outcome:
    return fit(make, data, PipeSwiftStrategy(stages=stages, micro_batches=2), **kwargs)


def _keep(outcome: Outcome, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(outcome, path)


def _straight(folder: Path) -> None:
    """On four ranks: each of the twenty steps is saved in a thread."""

    def callbacks() -> list[Any]:
        return [
            TopologyCheckpoint(folder / "many", every_n_steps=1, keep=None),
            ModelCheckpoint(folder / "beside", monitor="val/loss", save_top_k=2, save_last=True),
        ]

    got = _fit(everything, shuffled, 4, callbacks=callbacks, enable_checkpointing=True, **MANY)
    _keep(got, folder / "many.pt")
    callback = TopologyCheckpoint(folder / "few", every_n_steps=1, keep=None, asynchronous=False)
    got = _fit(everything, shuffled, 4, callbacks=[callback], **FEW)
    _keep(got, folder / "few.pt")
    for stages in (4, 2):
        where = folder / f"{stages}x{4 // stages}"
        callback = TopologyCheckpoint(where, every_n_steps=2, keep=None)
        _fit(simple, partial(ordered, stages), stages, callbacks=[callback], max_epochs=2)


def _go_on(folder: Path, stages: int, cases: list[tuple[str, int]]) -> None:
    for name, step in cases:
        again = TopologyCheckpoint(folder / "again", every_n_steps=3, keep=1)
        options = {"many": MANY, "few": FEW}[name]
        path = str(folder / name / f"step{step}")
        got = _fit(everything, shuffled, stages, callbacks=[again], ckpt_path=path, **options)
        _compare(got, torch.load(folder / f"{name}.pt", weights_only=False), f"{name} {step}")


def _compare(got: Outcome, want: Outcome, label: str) -> None:
    num = len(got.losses)
    assert num
    want.losses, want.rates = want.losses[-num:], want.rates[-len(got.rates) :]
    want.logged = want.logged[-len(got.logged) :]
    found = differences(got, want)
    assert not found, f"{label}: {found}"


def _go_on_simply(folder: Path, stages: int, sources: list[str], make: Any) -> None:
    want = torch.load(folder / "plain.pt", weights_only=False)
    for source in sources:
        for step in (4, 6):  # an epoch's end, and within one
            path = str(folder / source / f"step{step}")
            got = _fit(make, partial(ordered, stages), stages, max_epochs=2, ckpt_path=path)
            assert len(got.rates) == 8 - step
            label = f"{source} to {stages}x{dist.get_world_size() // stages}, step {step}"
            for name, value in want.parameters.items():
                if make is OnMeta and got.parameters[name].is_meta:
                    continue
                assert (got.parameters[name] - value).abs().max() <= 1e-10, (label, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("sharded")
    torch.save(fit(simple, ordered, "auto", max_epochs=2), where / "plain.pt")
    run_ranks(_straight, 4, {"folder": where}, deadline_s=150)
    return where


def test_twenty_saves_in_a_thread_all_are_whole(folder: Path) -> None:
    names = {p.name for p in (folder / "many").iterdir()}
    assert names == {"LATEST", *(f"step{n}" for n in range(1, 21))}
    assert TopologyCheckpoint.latest(folder / "many") == folder / "many" / "step20"
    assert len(list((folder / "beside").glob("*.ckpt"))) == 3
    described = json.loads((folder / "many" / "step7" / "topology.json").read_text())
    assert described["layers"] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert described["micro_batches"] == [4, 4]
    assert described["layout"]["shared_parameters"] == {"model.embed.weight": [0, 3]}
    assert (described["step"], described["epoch"], described["batches"]) == (7, 1, 2)
    assert described["model"]["aliases"] == {"model.head.weight": "model.embed.weight"}


@pytest.mark.parametrize(
    ("ranks", "stages", "cases"),
    [
        (4, 4, [("many", 7), ("few", 5)]),
        (3, 3, [("many", 5)]),
        (2, 2, [("many", 4), ("few", 3)]),
        (1, 1, [("many", 8)]),
    ],
)
def test_it_goes_on_identically(folder: Path, ranks: int, stages: int, cases: Any) -> None:
    """Losses, logs, metrics, rates and parameters: within an epoch, at its end, mid-validation."""
    kwargs = {"folder": folder, "stages": stages, "cases": cases}
    run_ranks(_go_on, ranks, kwargs, deadline_s=120)


@pytest.mark.parametrize(
    ("ranks", "stages", "sources", "make"),
    [
        (4, 2, ["4x1", "2x2"], simple),
        (2, 1, ["2x2"], simple),
        (2, 2, ["2x2"], OnMeta),
    ],
)
def test_replicas_come_and_go(
    folder: Path, ranks: int, stages: int, sources: list[str], make: Any
) -> None:
    kwargs = {"folder": folder, "stages": stages, "sources": sources, "make": make}
    run_ranks(_go_on_simply, ranks, kwargs, deadline_s=120)


def test_plain_lightning_goes_on_from_a_consolidated_file(folder: Path) -> None:
    want = torch.load(folder / "plain.pt", weights_only=False)
    for source in ("4x1", "2x2"):
        file = folder / f"{source}.ckpt"
        consolidate(folder / source / "step4", file)
        got = fit(simple, ordered, "auto", max_epochs=2, ckpt_path=str(file))
        assert len(got.losses) == 4
        for name, value in want.parameters.items():
            assert (got.parameters[name] - value).abs().max() <= 1e-10, (source, name)
