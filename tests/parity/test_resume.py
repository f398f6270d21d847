"""A checkpoint is Lightning's own: written at any number of stages, read at any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Transformer, loaders, tokens
from tests.helpers.networks import Frozen, Grouped, Temperature
from tests.helpers.parity import (
    Outcome,
    differences,
    fit,
    let_go,
    make_trainer,
)

EPOCHS, DATA = 3, loaders(tokens)
MODULES: dict[str, Any] = {
    "tied": lambda: Language(Transformer(tied="module")).double(),
    "groups": lambda: Grouped(Transformer(tied="functional")).double(),
    "frozen": lambda: Frozen(Transformer(), 2).double(),
    "loss": lambda: Temperature(Transformer()).double(),
    "dropout": lambda: Language(Transformer(dropout=0.3)).double(),
}
PLAIN = [name for name in MODULES if name != "dropout"]  # draws other masks in one piece


def _strategy() -> Any:
    return PipeSwiftStrategy(micro_batches=3) if dist.is_initialized() else "auto"


def _label() -> str:
    return f"{dist.get_world_size()} stages" if dist.is_initialized() else "plain"


def _save(folder: Path, names: list[str]) -> None:
    """Train half of the epochs; checkpoints at the end of the second, and inside it."""
    for name in names:
        where = folder / f"{name} {_label()}"

        def keep(where: Path = where) -> Any:
            options: dict[str, Any] = {"save_top_k": -1, "save_weights_only": False}
            return [
                ModelCheckpoint(where, "{step}", every_n_train_steps=7, **options),
                ModelCheckpoint(where, "{epoch}", every_n_epochs=1, **options),
            ]

        fit(
            MODULES[name],
            DATA,
            _strategy(),
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=keep,
        )


def _resume(folder: Path, sources: list[tuple[str, str]], file: str) -> None:
    for name, source in sources:
        outcome = fit(
            MODULES[name],
            DATA,
            _strategy(),
            max_epochs=EPOCHS,
            ckpt_path=str(folder / f"{name} {source}" / file),
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(outcome, folder / f"{name} {source} to {_label()} {file}.pt")


def _straight(folder: Path, names: list[str]) -> None:
    for name in names:
        outcome = fit(MODULES[name], DATA, _strategy(), max_epochs=EPOCHS)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(outcome, folder / f"{name} straight {_label()}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("resume")
    _save(where, PLAIN)
    _straight(where, PLAIN)
    run_ranks(_save, 4, {"folder": where, "names": list(MODULES)}, deadline_s=120)
    run_ranks(_straight, 2, {"folder": where, "names": ["dropout"]}, deadline_s=120)
    return where


def _read(path: Path) -> Outcome:
    outcome: Outcome = torch.load(path, weights_only=False)
    return outcome


def _compare(got: Outcome, want: Outcome, label: str) -> None:
    steps = len(got.losses)
    want.losses, want.rates = want.losses[-steps:], want.rates[-len(got.rates) :]
    want.logged = want.logged[-len(got.logged) :]
    found = differences(got, want, logged=True)
    assert not found, f"{label}: {found}"


@pytest.mark.parametrize(
    ("source", "stages"),
    [
        ("4 stages", 0),
        ("4 stages", 2),
        ("4 stages", 4),
        ("plain", 4),
    ],
)
def test_continuing_equals_a_straight_run(folder: Path, source: str, stages: int) -> None:
    sources = [(name, source) for name in PLAIN]
    file = "epoch=1.ckpt"
    if stages:
        kwargs = {"folder": folder, "sources": sources, "file": file}
        run_ranks(_resume, stages, kwargs, deadline_s=120)
    else:
        _resume(folder, sources, file)
    label = f"{stages} stages" if stages else "plain"
    for name in PLAIN:
        got = _read(folder / f"{name} {source} to {label} {file}.pt")
        assert len(got.losses) == 5
        _compare(got, _read(folder / f"{name} straight plain.pt"), f"{name}, {source} to {label}")


def test_continuing_within_an_epoch_does_what_lightning_does(folder: Path) -> None:
    file = "step=7.ckpt"
    _resume(folder, [("tied", "plain")], file)
    want = _read(folder / f"tied plain to plain {file}.pt")
    for source in ("plain", "4 stages"):
        kwargs = {"folder": folder, "sources": [("tied", source)], "file": file}
        run_ranks(_resume, 2, kwargs, deadline_s=120)
        _compare(_read(folder / f"tied {source} to 2 stages {file}.pt"), want, source)


def test_continuing_draws_what_a_straight_run_draws(folder: Path) -> None:
    file = "epoch=1.ckpt"
    kwargs = {"folder": folder, "sources": [("dropout", "4 stages")], "file": file}
    run_ranks(_resume, 2, kwargs, deadline_s=120)
    got = _read(folder / f"dropout 4 stages to 2 stages {file}.pt")
    _compare(got, _read(folder / "dropout straight 2 stages.pt"), "dropout")


@pytest.mark.parametrize("file", ["epoch=1.ckpt", "step=7.ckpt"])
def test_the_file_is_lightnings_own(folder: Path, file: str) -> None:
    for name in PLAIN:
        mine = torch.load(folder / f"{name} 4 stages" / file, weights_only=False)
        other = torch.load(folder / f"{name} plain" / file, weights_only=False)
        assert list(mine) == list(other)
        assert list(mine["state_dict"]) == list(other["state_dict"])
        torch.testing.assert_close(mine["state_dict"], other["state_dict"], rtol=0, atol=1e-10)
        for a, b in zip(mine["optimizer_states"], other["optimizer_states"], strict=True):
            assert a["param_groups"] == b["param_groups"]
            assert a["state"].keys() == b["state"].keys()
            torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=1e-10)
        assert mine["lr_schedulers"] == other["lr_schedulers"]
        assert mine["loops"] == other["loops"]


def _save_after(folder: Path) -> None:
    torch.manual_seed(7)
    module = MODULES["tied"]()
    trainer = make_trainer(_strategy(), max_epochs=2)
    trainer.fit(module, DATA())
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    let_go(trainer)
    dist.barrier()
    again = Language.load_from_checkpoint(
        folder / "weights.ckpt", network=Transformer(tied="module"), weights_only=False
    )
    for name, value in module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].double(), value, rtol=0, atol=1e-6)


def test_saving_after_fit(folder: Path, tmp_path: Path) -> None:
    run_ranks(_save_after, 2, {"folder": tmp_path}, deadline_s=120)
    got = torch.load(tmp_path / "after.ckpt", weights_only=False)
    want = torch.load(folder / "tied plain" / "epoch=1.ckpt", weights_only=False)
    torch.testing.assert_close(got["state_dict"], want["state_dict"], rtol=0, atol=1e-10)
    mine, other = got["optimizer_states"][0], want["optimizer_states"][0]
    assert mine["param_groups"] == other["param_groups"]
    torch.testing.assert_close(mine["state"], other["state"], rtol=0, atol=1e-10)
