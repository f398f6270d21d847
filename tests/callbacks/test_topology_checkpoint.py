"""When it saves, what it keeps, what is reused, and what is refused."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.callbacks.topology_checkpoint import require_own_signals
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.runtime.topology import Topology
from pipeswift_lightning.strategies.checkpoint_folder import find_sound
from pipeswift_lightning.strategies.consolidate import consolidate
from pipeswift_lightning.strategies.shard_source import ShardSource
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Transformer, loaders, tokens
from tests.helpers.networks import Grouped
from tests.helpers.parity import fit, lone_trainer, make_trainer, quiet

DATA = loaders(tokens)


def _module(**kwargs: Any) -> Language:
    return Language(Transformer(**kwargs)).double()


def _steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step*"))


class Asks(Callback):
    """Asks for a save while a batch runs, on one rank only."""

    def __init__(self, batch: int, rank: int, file: Path | None = None) -> None:
        self.batch, self.rank, self.file = batch, rank, file

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if (batch_idx, trainer.global_rank) != (self.batch, self.rank):
            return
        if self.file is None:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()


class SeesPartition(Callback):
    def __init__(self) -> None:
        self.layers: list[int] = []
        self.sizes: list[int] = []

    def on_train_end(self, trainer, module) -> None:
        session = trainer.strategy.session
        self.layers = [len(layers) for layers in session.partition.ranges]
        self.sizes = list(session.plan.micro_batches.sizes)


def _triggers(folder: Path) -> None:
    train = partial(fit, _module, DATA, max_epochs=1)
    before = signal.getsignal(signal.SIGUSR1)
    file = folder / "asked" / "SAVE_NOW"
    asked = TopologyCheckpoint(folder / "asked", signals=["SIGUSR1"])
    asks = [Asks(0, rank=1, file=file), Asks(2, rank=1)]
    train(PipeSwiftStrategy(), callbacks=[asked, *asks])
    assert _steps(folder / "asked") == ["step1", "step3"]
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not file.exists()
    by_clock = TopologyCheckpoint(folder / "clock", every_minutes=1e-9, keep=1)
    train(PipeSwiftStrategy(), callbacks=[by_clock])
    assert _steps(folder / "clock") == ["step5"]


def _reuse(folder: Path) -> None:
    """Cut and micro-batches stay as they were on the same mesh, unless the user says otherwise."""
    saves = TopologyCheckpoint(folder / "cut", every_n_steps=2, keep=None)
    odd = PipeSwiftStrategy(partition=[1, 3], micro_batches=[5, 2, 1])
    fit(_module, DATA, odd, max_epochs=1, callbacks=[saves])
    path = str(folder / "cut" / "step2")
    for own, layers in ((None, [1, 3]), ([2, 2], [2, 2])):
        sees = SeesPartition()
        again = PipeSwiftStrategy(partition=own)
        kwargs = {"ckpt_path": path, "max_steps": 4, "callbacks": [sees]}
        fit(_module, DATA, again, **kwargs)
        assert (sees.layers, sees.sizes) == (layers, [5, 2, 1])


def _finished(folder: Path) -> None:
    """A run that is over loads all of its state though no step cuts the module any more."""
    saves = TopologyCheckpoint(folder / "over", every_n_steps=5)
    fit(_module, DATA, PipeSwiftStrategy(), max_epochs=1, callbacks=[saves])
    trainer, module = make_trainer(PipeSwiftStrategy(), max_epochs=1), _module()
    trainer.fit(module, DATA(), ckpt_path=folder / "over")
    (state,) = (optimizer.state for optimizer in trainer.optimizers)
    assert [int(s["step"]) for s in state.values()] == [5] * len(list(module.parameters()))
    trainer.validate(module, DATA(), verbose=False)


class Refutes(Callback):
    """Lets one replica find that its loss is no mean over samples."""

    def on_train_start(self, trainer, module) -> None:
        trainer.strategy._steps._policy.whole = trainer.global_rank == 1


class SeesScope(Callback):
    whole = False

    def on_train_start(self, trainer, module) -> None:
        self.whole = trainer.strategy._steps._policy.whole


def _by_replica(folder: Path) -> None:
    """Each replica goes on with what it has learnt; other replicas with what any has."""
    saves = TopologyCheckpoint(folder / "scopes", every_n_steps=2)
    fit(_module, DATA, PipeSwiftStrategy(stages=1), max_steps=3, callbacks=[Refutes(), saves])
    for stages in (1, 2):
        sees = SeesScope()
        kwargs = {"ckpt_path": str(folder / "scopes"), "max_steps": 4, "callbacks": [sees]}
        fit(_module, DATA, PipeSwiftStrategy(stages=stages), **kwargs)
        assert sees.whole == (stages == 2 or dist.get_rank() == 1)


def _all(folder: Path) -> None:
    _triggers(folder)
    _reuse(folder)
    _finished(folder)
    _by_replica(folder)
    _unwritable(folder)


@pytest.mark.slow
def test_it_saves_when_asked_and_reuses_what_it_recorded(tmp_path: Path) -> None:
    run_ranks(_all, 2, {"folder": tmp_path}, deadline_s=120)
    assert torch.load(tmp_path / "cut" / "step2" / "lightning.pt", weights_only=True)


# -- one device: a mesh of one stage ------------------------------------------------------------


def _trainer(**kwargs: Any) -> Trainer:
    quiet()
    return lone_trainer(PipeSwiftStrategy(), max_epochs=1, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("one")
    torch.manual_seed(1)
    callback = TopologyCheckpoint(folder, every_n_steps=2, asynchronous=False)
    _trainer(callbacks=[callback]).fit(_module(tied="module"), DATA())
    assert _steps(folder) == ["step2", "step4"]
    return folder


def test_weights_are_loaded_for_evaluation_and_elsewhere(saved: Path, tmp_path: Path) -> None:
    losses = _trainer().validate(_module(tied="module"), DATA(), ckpt_path=saved, verbose=False)
    consolidate(saved, tmp_path / "whole.ckpt")
    network = Transformer(tied="module").double()
    again = Language.load_from_checkpoint(tmp_path / "whole.ckpt", network=network)
    assert _trainer().validate(again, DATA(), verbose=False) == losses
    with pytest.raises(CheckpointError, match=r"exists\. Rule: .* Remedy: "):
        consolidate(saved, tmp_path / "whole.ckpt")
    safetensors = pytest.importorskip("safetensors.torch")
    consolidate(saved, tmp_path / "weights.safetensors")
    other = _module(tied="module")
    assert safetensors.load_model(other, tmp_path / "weights.safetensors") == (set(), [])
    assert _trainer().validate(other, DATA(), verbose=False) == losses


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            partial(_module, num_blocks=3, tied="module"),
            r"another model:\n  model.blocks.3.norm.weight: float64\[6\] in the checkpoint, absent",
        ),
        (_module, r"model.head.weight: tied to model.embed.weight in the checkpoint, float64"),
        (partial(Grouped, Transformer(tied="module")), "1 groups in the checkpoint, 3 groups in"),
    ],
    ids=["other shapes", "untied", "other groups"],
)
def test_another_model_is_refused(saved: Path, module: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        _trainer().fit(module().double(), DATA(), ckpt_path=str(saved / "step2"))
    assert "Rule: " in str(refused.value)
    assert "Remedy: " in str(refused.value)


class Renames(Language):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        assert weights["model.embed.weight"].shape == self.model.embed.weight.shape
        weights["model.other.weight"] = weights.pop("model.head.weight")


def test_a_hook_that_changes_what_is_only_described_is_refused(saved: Path) -> None:
    module = Renames(Transformer(tied="module"))
    with pytest.raises(CheckpointError, match=r"changed \['model.head.weight'.*Rule:"):
        _trainer().fit(module.double(), DATA(), ckpt_path=str(saved))


def test_another_format_and_a_changed_description_are_refused(saved: Path, tmp_path: Path) -> None:
    described = json.loads((saved / "step2" / "topology.json").read_text())
    less = {k: v for k, v in described.items() if k not in ("layers", "versions")}
    model = described["model"]
    for changed, words in (
        ({**described, "format_version": 99}, r"version 99\. Rule: .* 3 alone\. Remedy: .*newer "),
        ({**described, "format_version": 1}, r"version 1\. Rule: .* 3 alone\. Remedy: .*older "),
        ({**described, "format_version": None}, "version None"),
        ({**less, "more": 1}, r"json lacks 'layers', 'versions' and has an unknown 'more'\. Rule:"),
        ({**described, "layout": {"backend": "gloo"}}, r"'layout' in .* lacks 'num_replicas', "),
        ({**described, "model": {**model, "digest": "0"}}, r"been changed.*Rule: .* Remedy: "),
    ):
        (tmp_path / "topology.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=words):
            Topology.read(tmp_path)


def _flip(file: Path) -> None:
    """Change one bit in the middle of a file; of a digit, if it is text, which stays JSON then."""
    content = bytearray(file.read_bytes())
    place = len(content) // 2
    if file.suffix == ".json":
        place = next(i for i in range(place, len(content)) if chr(content[i]) in "2345678")
    content[place] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_by_name(saved: Path, tmp_path: Path) -> None:
    """Once, sizes alone were compared, and another number was trained with."""
    for file in sorted((saved / "step4").iterdir()):
        folder = tmp_path / file.name
        shutil.copytree(saved, folder)
        latest = TopologyCheckpoint.latest(folder)
        assert latest == folder / "step4"
        _flip(folder / "step4" / file.name)
        refused = rf"step4 is no whole checkpoint: .*{file.name} .*checksum.*Rule: .*Remedy: "
        with pytest.raises(CheckpointError, match=refused):
            find_sound(folder / "step4")
        for meant in (folder, str(folder / "LATEST"), latest):
            with pytest.warns(UserWarning, match=rf"step4 is passed over: .*{file.name}"):
                assert find_sound(meant) == folder / "step2"
    with pytest.raises(CheckpointError, match=rf"step4 is no whole checkpoint: .*{file.name}"):
        _trainer().fit(_module(tied="module"), DATA(), ckpt_path=str(folder / "step4"))
    trainer = _trainer()
    with pytest.warns(UserWarning, match="step4 is passed over"):
        trainer.fit(_module(tied="module"), DATA(), ckpt_path=latest)
    assert trainer.global_step == 5
    _flip(folder / "step2" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint \(step2: .*; step4: .*Remedy:"):
        consolidate(folder, tmp_path / "whole.ckpt")


def test_a_checkpoint_of_the_format_without_checksums_is_read(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step4", tmp_path / "step4")
    file = tmp_path / "step4" / "topology.json"
    described = json.loads(file.read_text())
    old = {k: v for k, v in described.items() if k not in ("checksums", "checksum")}
    file.write_text(json.dumps({**old, "format_version": 2}))
    trainer = _trainer()
    trainer.fit(_module(tied="module"), DATA(), ckpt_path=TopologyCheckpoint.latest(tmp_path))
    assert trainer.global_step == 5


def test_a_state_that_lacks_keys_is_refused_with_all_of_them(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step2", tmp_path / "step2")
    source = ShardSource.open(tmp_path / "step2")
    for name, keys in (("rank0.pt", ("steps", "seeds")), ("lightning.pt", ("callbacks", "loops"))):
        file = tmp_path / "step2" / name
        state = torch.load(file, weights_only=True)
        torch.save({k: v for k, v in state.items() if k not in keys}, file)
        read = partial(source.rank_state, 0) if name == "rank0.pt" else source.lightning_state
        first, second = sorted(keys)
        with pytest.raises(CheckpointError, match=rf"{name} lacks '{first}', '{second}'\. Rule:"):
            read()
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .*Rule: .*Remedy: "):
            read()


class Counts(Callback):
    """Counts the batches, after a checkpoint that comes before it in the list."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Configured(Language):
    def __init__(self, width: Any, odd: Any) -> None:
        super().__init__(Transformer())
        self.save_hyperparameters()


def test_states_are_of_after_the_batch_and_hyper_parameters_are_kept(tmp_path: Path) -> None:
    callback = TopologyCheckpoint(tmp_path, every_n_steps=2, keep=None)
    module = Configured(OmegaConf.create({"a": [1, 2]}), odd=Path)
    with pytest.warns(UserWarning, match=r"hyper-parameters \['odd'\] are no plain values"):
        _trainer(callbacks=[callback, Counts()]).fit(module, DATA())
    counts = Counts()
    trainer = _trainer(callbacks=[counts])
    trainer.fit(Configured(1, 2), DATA(), ckpt_path=tmp_path / "step4")
    assert counts.batches == trainer.global_step == 5
    consolidate(tmp_path / "step2", tmp_path / "whole.ckpt")
    again = Configured.load_from_checkpoint(tmp_path / "whole.ckpt", odd=None)
    assert again.hparams.width == {"a": [1, 2]}


class Odd(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"odd": Path}


def test_state_that_could_only_be_executed_is_refused(tmp_path: Path) -> None:
    callback = TopologyCheckpoint(tmp_path, every_n_steps=1, asynchronous=False)
    with pytest.raises(CheckpointError, match=r"state of 'callbacks' holds .* Rule: .* Remedy: "):
        _trainer(callbacks=[callback, Odd()]).fit(_module(), DATA())
    assert _steps(tmp_path) == []


def _unwritable(folder: Path) -> None:
    """Before the first batch, on every rank, though only one of them cannot write."""
    (folder / "file").touch()
    mine = folder / "file" if dist.get_rank() == 1 else folder / "mine"
    callback, counts = TopologyCheckpoint(mine, every_n_steps=1), Counts()
    with pytest.raises(CheckpointError, match=r"\(rank 1: .*file.*\)\. Rule: .* Remedy: "):
        fit(_module, DATA, PipeSwiftStrategy(), max_epochs=1, callbacks=[callback, counts])
    assert counts.batches == 0


def test_arguments_and_strategies_are_checked() -> None:
    for name in ("SIGKILL", "SIGSTOP", "SIGSEGV"):
        with pytest.raises(ValueError, match=rf"{name}, which cannot be .*Rule: .* Remedy: "):
            TopologyCheckpoint("x", signals=["SIGUSR1", name])
    with pytest.raises(ValueError, match=r"SIGNONE.*Rule: .* Remedy: one of SIGHUP"):
        TopologyCheckpoint("x", signals=["SIGNONE"])
    slurm, other = SLURMEnvironment(requeue_signal=signal.SIGUSR1), [signal.SIGUSR2]
    require_own_signals(slurm, other)
    require_own_signals(SLURMEnvironment(auto_requeue=False), [signal.SIGUSR1])
    with pytest.raises(ValueError, match=r"SIGUSR1, at which Lightning requeues.* Rule: .* Remedy"):
        require_own_signals(slurm, [*other, signal.SIGUSR1])
    trainer = Trainer(
        strategy="auto", accelerator="cpu", logger=False, callbacks=[TopologyCheckpoint("x")]
    )
    with pytest.raises(ValueError, match=r'Rule: .* Remedy: Trainer\(strategy="pipeswift"'):
        trainer.fit(_module(), DATA())
    assert not dist.is_initialized()
