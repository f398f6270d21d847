"""Layers that move between stages in mid-run: the result is one device's."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.strategies import repartition
from pipeswift_lightning.strategies.repartition import RepartitionError
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import (
    VOCABULARY,
    WIDTH,
    Block,
    Language,
    Regression,
    Transformer,
    loaders,
    tokens,
    vectors,
)
from tests.helpers.parity import Failures, Outcome, compare, differences, fit, plain
from tests.helpers.transparent import Manual


class Moves(Callback):
    """Gives the stages other layers after some steps, and notes what each rank held then."""

    def __init__(self, at: dict[int, list[int]]) -> None:
        self.at = at
        self.moved: list[Any] = []
        self.held: list[int] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        layers = self.at.get(trainer.fit_loop.epoch_loop.total_batch_idx + 1)
        strategy = trainer.strategy
        if layers is None or not isinstance(strategy, PipeSwiftStrategy):
            return
        if strategy.why_fixed() is not None:
            with pytest.raises(RepartitionError, match="a step is under way"):
                strategy.repartition(layers)
            return
        if not self.moved:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(repartition, "room_bytes", lambda device, step_bytes: 0.0)
                with pytest.raises(RepartitionError, match="no room"):
                    strategy.repartition(layers)
        self.moved.append(strategy.repartition(layers))
        here = {n: p for n, p in module.named_parameters() if not p.is_meta}
        self.held.append(sum(p.numel() for p in here.values()))
        # Each optimizer has what is here, and its state.
        for optimizer in trainer.optimizers:
            grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert grouped == {id(p) for p in here.values()}
            assert {id(p) for p in optimizer.state} <= grouped


class Normed(nn.Module):
    """A layer with a buffer that each step changes, a bias in another order in memory, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.data = self.linear.weight.data.t().contiguous().t()
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta:
            self.seen += 1
        y = torch.tanh(self.linear(x)) * self.scale + 0.001 * self.seen
        return nn.functional.dropout(y, 0.1, self.training)


class Groups(Regression):
    """Adam in named groups, one of which only the first layer is in; frozen and thawed layers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Normed() for _ in range(6))))

    def configure_optimizers(self) -> Any:
        first, rest = self.net[0].parameters(), self.net[1:].parameters()
        return torch.optim.Adam(
            [{"params": list(first), "lr": 0.01}, {"params": list(rest), "weight_decay": 0.1}],
            lr=0.05,
            amsgrad=True,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].requires_grad_(batch_idx > 2)


class Momentum(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def tied(dropout: float = 0.0) -> LightningModule:
    return Language(Transformer(num_blocks=6, tied="module", dropout=dropout))


def momentum() -> LightningModule:
    return Momentum(Transformer(tied="functional"))


# Module, data, moves, and the arguments of the strategy and of the Trainer.
Case = tuple[
    Callable[[], LightningModule], Any, dict[int, list[int]], dict[str, Any], dict[str, Any]
]
PER_SAMPLE = {"micro_batches": 3, "loss": "per_sample"}
WHOLE_BATCH = {"micro_batches": 2, "loss": "whole_batch", "recompute": 1}
AS_PLAIN: dict[str, Case] = {
    "tied, clipped": (
        tied,
        loaders(tokens),
        {3: [2, 4], 5: [4, 2]},
        PER_SAMPLE,
        {"gradient_clip_val": 0.05},
    ),
    "accumulated": (
        momentum,
        loaders(tokens),
        {1: [2, 2], 2: [1, 3], 5: [3, 1]},  # after the first batch, no step is done
        WHOLE_BATCH,
        {"accumulate_grad_batches": 2},
    ),
}
AS_UNMOVED: dict[str, Case] = {
    "groups": (Groups, loaders(vectors), {2: [1, 5], 4: [5, 1], 8: [3, 3]}, PER_SAMPLE, {}),
    "dropout": (lambda: tied(0.1), loaders(tokens), {2: [1, 5], 7: [5, 1]}, WHOLE_BATCH, {}),
}


@pytest.mark.world_size(2, deadline_s=120)
def test_two_stages() -> None:
    failures = Failures()
    for name, (module, data, at, strategy, flags) in AS_PLAIN.items():
        trainer = {"max_epochs": 2, **flags}
        want = plain(module, data, **trainer)
        moves = Moves(at)
        compare(failures, name, module, data, strategy, want, callbacks=[moves], **trainer)
        assert len(moves.moved) == 2, moves.moved
    for name, (module, data, at, strategy, flags) in AS_UNMOVED.items():
        moves = Moves(at)
        unmoved, moved = (
            fit(module, data, PipeSwiftStrategy(**strategy), callbacks=c, max_epochs=2, **flags)
            for c in ([], [moves])
        )
        failures.add(name, differences(moved, unmoved, tolerance=0.0))
        assert len(moves.moved) == len(at), moves.moved
    failures.check()


@pytest.mark.world_size(2, deadline_s=60)
def test_stages_of_whole_steps_are_fixed() -> None:
    said: list[str] = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            said.append(trainer.strategy.why_fixed())
            with pytest.raises(RepartitionError, match="transparent mode"):
                trainer.strategy.repartition([2, 3])

    fit(Manual, loaders(vectors), PipeSwiftStrategy(), callbacks=[Asks()], max_steps=1)
    assert "every rank runs whole steps" in said[0]


# -- four ranks -------------------------------------------------------------------------------


class OnMeta(Language):
    """Never whole on a rank."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Transformer(num_blocks=6, tied="functional").double()


class Cut(Callback):
    """Notes the layers of the stages after the first step."""

    sizes: list[int]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if not hasattr(self, "sizes"):
            self.sizes = [len(layers) for layers in trainer.strategy.partition.ranges]


def _both(name: str, case: Case, failures: Failures) -> tuple[Outcome, Moves]:
    """Fit with and without moves; note where they differ, to the last bit."""
    module, data, at, strategy, flags = case
    moves = Moves(at)
    more = flags.pop("callbacks", [])
    unmoved, moved = (
        fit(module, data, PipeSwiftStrategy(**strategy), callbacks=c, max_epochs=2, **flags)
        for c in ([], [moves, *more])
    )
    if module is OnMeta:  # it stays divided, elsewhere than before
        unmoved.parameters, moved.parameters = {}, {}
    failures.add(name, differences(moved, unmoved, tolerance=0.0))
    assert len(moves.moved) == len(at), moves.moved
    return unmoved, moves


FOUR = {"stages": 4, "micro_batches": 2, "loss": "per_sample"}


def _replicas(failures: Failures) -> None:
    strategy = {**FOUR, "stages": 2}
    _both("replicas", (momentum, loaders(tokens), {1: [3, 1], 2: [1, 3]}, strategy, {}), failures)


def _far(folder: Path, failures: Failures) -> None:
    """Layers travel far, and the tied embedding changes one of its two owners."""
    at = {2: [1, 1, 1, 3], 6: [3, 1, 1, 1], 8: [1, 2, 2, 1]}
    saves = TopologyCheckpoint(folder, every_n_steps=7, keep=None)
    make, data = partial(tied, 0.1), loaders(tokens)
    want, moves = _both("far", (make, data, at, FOUR, {"callbacks": [saves]}), failures)
    # Never the whole module: at most three blocks, and the embedding.
    block = sum(p.numel() for p in Block().parameters())
    assert max(moves.held) < 3 * block + 2 * WIDTH * VOCABULARY, moves.held
    described = json.loads((folder / "step7" / "topology.json").read_text())
    assert described["layers"] == [[0, 3], [3, 4], [4, 5], [5, 6]]

    # It goes on with the stages that the checkpoint knows, as if nothing had moved.
    cut, path = Cut(), str(folder / "step7")
    strategy = PipeSwiftStrategy(**FOUR)
    again = fit(make, data, strategy, callbacks=[cut], max_epochs=2, ckpt_path=path)
    assert cut.sizes == [3, 1, 1, 1]
    want.losses, want.rates = want.losses[7:], want.rates[7:]
    want.logged = want.logged[-len(again.logged) :]
    failures.add("resumed", differences(again, want))


def _meta(failures: Failures) -> None:
    at = {2: [1, 1, 1, 3], 6: [3, 1, 1, 1]}
    _both("meta", (OnMeta, loaders(tokens), at, FOUR, {}), failures)


def _four(folder: Path) -> None:
    failures = Failures()
    _replicas(failures)
    _far(folder, failures)
    _meta(failures)
    failures.check()


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    run_ranks(_four, 4, {"folder": tmp_path}, deadline_s=150)
