"""Steps that every rank runs whole: manual optimisation, several calls, several networks."""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.runtime import collective_call
from tests.helpers.modules import Regression, loaders, stack, vectors
from tests.helpers.parity import (
    Failures,
    Outcome,
    compare,
    differences,
    fit,
    let_go,
    make_trainer,
    on_rank_zero,
    plain,
)
from tests.helpers.transparent import (
    Block,
    CarelessGan,
    Conditional,
    Gan,
    LateTwice,
    Manual,
    MeanTeacher,
    Parts,
    Penalty,
    Recomputed,
    Siamese,
    two_loaders,
)


@dataclass(frozen=True)
class Case:
    make: Callable[[], LightningModule]
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def module(self) -> LightningModule:
        return self.make().double()


CASES = {
    "manual": Case(Manual, {"micro_batches": [3, 1, 4]}, {"max_epochs": 4}),
    "gan": Case(Gan, {"micro_batches": 3}),
    "gan, small discriminator": Case(lambda: Gan(1), {"micro_batches": 3, "recompute": 1}),
    "gan, one graph": Case(CarelessGan, {"micro_batches": 2}),
    "siamese": Case(
        lambda: Siamese(recompute=True),
        {"micro_batches": 3},
        {"accumulate_grad_batches": 2, "max_epochs": 4, "num_sanity_val_steps": 1},
    ),
    "twice only later": Case(LateTwice, {"micro_batches": 3}),
    "teacher": Case(MeanTeacher, {"network": ["student", "teacher"], "micro_batches": 3}),
    "parts": Case(Parts, {"micro_batches": 3}),
    "named parts": Case(
        Parts, {"network": ["coder.encoder", "coder.decoder", "tables.start"], "micro_batches": 3}
    ),
    "conditional": Case(Conditional, {"micro_batches": 3}, {"gradient_clip_val": 0.3}),
}
ON_FOUR = ("gan", "conditional")


def _check(names: Any) -> None:
    failures = Failures()
    for name in names:
        case = CASES[name]
        options = {"max_epochs": 2, **case.trainer}
        want = plain(case.module, two_loaders, **options)
        compare(failures, name, case.module, two_loaders, case.strategy, want, **options)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_two_stages() -> None:
    _check(CASES)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_four_stages() -> None:
    _check(ON_FOUR)


@pytest.mark.world_size(1)
def test_one_stage() -> None:
    """Nothing to pipeline: the step runs as it stands."""
    for name in ("manual", "siamese"):
        case = CASES[name]
        want = fit(case.module, two_loaders, "auto", max_epochs=2)
        got = fit(case.module, two_loaders, PipeSwiftStrategy(micro_batches=3), max_epochs=2)
        assert differences(got, want, logged=True) == []


# -- replicas ---------------------------------------------------------------------------------


def _replicated(make: Callable[[], LightningModule]) -> list[str]:
    """Compare two pipelines of two stages with one device on both replicas' samples."""

    def share() -> DataLoader:
        indices = range(dist.get_rank() // 2, 32, 2)
        return DataLoader(torch.utils.data.Subset(vectors(32), indices), batch_size=8)

    def module() -> LightningModule:
        return make().double()

    options: dict[str, Any] = {"max_epochs": 4, "use_distributed_sampler": False}
    want = plain(module, lambda: DataLoader(vectors(32), batch_size=16), **options)
    strategy = PipeSwiftStrategy(stages=2, micro_batches=3)
    got = fit(module, share, strategy, **options)
    got.losses, got.logged, got.metrics, got.bar = want.losses, want.logged, want.metrics, want.bar
    return differences(got, want)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_two_pipelines_of_two_stages() -> None:
    failures = Failures()
    failures.add("gan", _replicated(lambda: Gan(rows=8)))
    failures.add("manual", _replicated(Manual))
    failures.check()


# -- checkpoints ------------------------------------------------------------------------------


def _resumed(
    folder: Path, case: Case, save: Any, resume: Callable[..., Outcome]
) -> tuple[Outcome, Any]:
    def keep() -> list[Callback]:
        return [ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)]

    save(case.module, two_loaders, max_epochs=2, enable_checkpointing=True, callbacks=keep)
    path = str(folder / "epoch=1.ckpt")
    dist.barrier()
    outcome = resume(case.module, two_loaders, max_epochs=4, ckpt_path=path)
    return outcome, torch.load(path, weights_only=False)


def _pipelined(*args: Any, **kwargs: Any) -> Outcome:
    return fit(*args[:2], PipeSwiftStrategy(micro_batches=3), **kwargs)


@pytest.mark.world_size(2, deadline_s=120)
def test_a_checkpoint_is_lightnings_own(tmp_path: Path) -> None:
    case = CASES["gan"]
    want = plain(case.module, two_loaders, max_epochs=4)
    steps = len(want.losses) // 2
    want.losses, want.logged = want.losses[steps:], []
    want.rates = want.rates[steps:]
    files = []
    for name, save, resume in (("ours", _pipelined, plain), ("lightning's", plain, _pipelined)):
        outcome, file = _resumed(tmp_path / name, case, save, resume)
        outcome.logged = []
        assert differences(outcome, want) == [], name
        files.append(file)
    mine, other = files
    assert list(mine["state_dict"]) == list(other["state_dict"])
    assert len(mine["optimizer_states"]) == 2
    for a, b in zip(mine["optimizer_states"], other["optimizer_states"], strict=True):
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=1e-10)


@pytest.mark.world_size(2, deadline_s=120)
def test_a_checkpoint_in_shards(tmp_path: Path) -> None:
    case = CASES["gan"]

    def keep() -> list[Callback]:
        return [TopologyCheckpoint(tmp_path, every_n_steps=8)]

    want = plain(case.module, two_loaders, max_epochs=3)
    _pipelined(case.module, two_loaders, max_epochs=2, callbacks=keep)
    latest = str(TopologyCheckpoint.latest(tmp_path))
    got = _pipelined(case.module, two_loaders, max_epochs=3, callbacks=keep, ckpt_path=latest)
    want.losses, want.rates = want.losses[-4:], want.rates[-4:]
    got.logged = want.logged
    assert differences(got, want) == []


# -- the choice of the mode -------------------------------------------------------------------


class Look(Callback):
    """Notes in the last step what this rank holds of each child."""

    def __init__(self) -> None:
        self.mode = ""
        self.held: dict[str, float] = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.mode = "cut" if trainer.strategy.session.transparent is None else "transparent"
        for name, child in module.named_children():
            parameters = list(child.parameters())
            if parameters:
                here = sum(not p.is_meta for p in parameters) / len(parameters)
                self.held[name] = here


def _looked_at(make: Callable[[], LightningModule], **strategy: Any) -> Look:
    look = Look()
    strategy = {"micro_batches": 3, **strategy}
    fit(make, two_loaders, PipeSwiftStrategy(**strategy), max_epochs=1, callbacks=[look])
    return look


@pytest.mark.world_size(2, deadline_s=120)
def test_the_mode_is_chosen_by_what_the_step_does() -> None:
    gan = _looked_at(CASES["gan, small discriminator"].module)
    assert gan.mode == "transparent"
    assert gan.held == {"generator": 0.5, "discriminator": 1.0}
    siamese = _looked_at(CASES["siamese"].module)
    assert siamese.mode == "transparent"
    assert siamese.held == {"net": 0.5, "project": 1.0}
    adversarial = _looked_at(CASES["conditional"].module, network="net")
    assert adversarial.mode == "transparent"
    teacher = _looked_at(CASES["teacher"].module, network=["student", "teacher"])
    assert teacher.held["student"] == teacher.held["teacher"] < 0.7
    once = _looked_at(lambda: Regression(stack()).double())
    assert once.mode == "cut"
    forced = _looked_at(lambda: Regression(stack()).double(), loss="transparent")
    assert forced.mode == "transparent"


@pytest.mark.parametrize(
    ("make", "text"),
    [(Penalty, "create_graph=True"), (Recomputed, "within torch.utils.checkpoint")],
)
@pytest.mark.world_size(2, deadline_s=120)
def test_refused_with_the_reason(make: Callable[[], LightningModule], text: str) -> None:
    with pytest.raises(Exception, match=text):
        _looked_at(lambda: make().double(), network="net")


class Frees(Manual):
    """Counts what its calls still hold, once their graph has been walked."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        before = _held_calls()
        self.manual_backward(loss)
        self.counts = (before, _held_calls())  # the loss is still here


def _held_calls() -> int:
    return sum(type(o) is collective_call._Call for o in gc.get_objects())


@pytest.mark.world_size(2, deadline_s=120)
def test_activations_are_freed_with_the_graph() -> None:
    made: list[Frees] = []

    def make() -> Frees:
        made.append(Frees().double())
        return made[-1]

    fit(make, two_loaders, PipeSwiftStrategy(micro_batches=3), max_epochs=1)
    assert made[0].counts == (1, 0)


# -- every entry point ------------------------------------------------------------------------


class Entries(Manual):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


def _entries(strategy: Any) -> list[Any]:
    torch.manual_seed(3)
    module, (train, val) = Entries().double(), two_loaders()
    trainer = make_trainer(strategy, max_epochs=1)
    results: list[Any] = [trainer.validate(module, val, verbose=False)]
    trainer.fit(module, train, val)
    results += [trainer.test(module, val, verbose=False), trainer.predict(module, val)]
    let_go(trainer)
    return results


@pytest.mark.world_size(2, deadline_s=120)
def test_every_entry_point() -> None:
    want = on_rank_zero(lambda: _entries("auto"))
    torch.testing.assert_close(
        _entries(PipeSwiftStrategy(micro_batches=3)), want, rtol=0, atol=1e-10
    )


# -- precision and randomness -----------------------------------------------------------------


@pytest.mark.world_size(2, deadline_s=120)
def test_mixed_precision() -> None:
    """One micro-batch rounds as one device does."""
    for name in ("siamese", "manual"):
        options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 2}
        make, strategy = CASES[name].make, PipeSwiftStrategy(micro_batches=1)
        data = loaders(lambda: _single(vectors()))
        want = plain(make, data, **options)
        got = fit(make, data, strategy, **options)
        assert differences(got, want, tolerance=1e-6) == [], name


def _single(data: Any) -> Any:
    return torch.utils.data.TensorDataset(*(t.float() for t in data.tensors))


class Noisy(Siamese):
    """Draws in the step, between the calls, and within the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(4)))

    def configure_pipeline(self) -> list[nn.Module]:
        return list(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x + 0.1 * torch.randn_like(x))
        share = random.random() * np.random.rand()  # noqa: NPY002
        loss = functional.mse_loss(out, y) + share * self.net(x * torch.rand(())).pow(2).mean()
        self.log("loss", loss)
        return loss


@pytest.mark.world_size(2, deadline_s=120)
def test_draws_agree_on_all_ranks_and_for_any_cut() -> None:
    outcomes = []
    for partition in ([1, 3], [3, 1]):
        strategy = PipeSwiftStrategy(
            network="net", loss="transparent", partition=partition, micro_batches=3
        )
        outcomes.append(fit(lambda: Noisy().double(), two_loaders, strategy, max_epochs=2))
    assert differences(*outcomes) == []
    losses = outcomes[0].losses
    assert len(set(losses)) == len(losses)
    assert on_rank_zero(lambda: losses) == losses
