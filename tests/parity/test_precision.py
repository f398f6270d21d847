"""Less than double precision: what one device computes, to rounding; one scale for fp16."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.comparison import LOSS
from pipeswift_lightning.strategies.loss_weights import Rule
from tests.helpers.modules import WIDTH, Base
from tests.helpers.parity import Failures, Outcome, differences, fit, on_rank_zero, plain
from tests.helpers.transparent import Gan
from tests.parity.test_loss_weight import OwnLoss, Tokens, outside, rows

STEPS = 9


class HalfPrecision(Base):
    """Overflows on one stage at one step, in a parameter that only this stage has."""

    rate = 0.01

    def __init__(self, overflowing: str, *, frozen: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        if frozen:
            self.net[2:].requires_grad_(False)  # the last stage has nothing to train
        self.overflowing = overflowing
        self.scales: list[float] = []

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).float().pow(2).mean(1)

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx in (4, 5):
            gradient = self.get_parameter(self.overflowing).grad
            if gradient is not None:
                gradient[0] = float("inf")

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def loader() -> DataLoader:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8 * STEPS, WIDTH, generator=draw)
    return DataLoader(TensorDataset(x, x.roll(1, 1).tanh()), batch_size=8)


def run(strategy: Any, overflowing: str, **kwargs: Any) -> tuple[Outcome, list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    module = HalfPrecision(overflowing, **kwargs)
    torch.manual_seed(7)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    outcome = fit(
        lambda: module,
        loader,
        strategy,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        precision=None,
        max_epochs=1,
        gradient_clip_val=0.5,
    )
    assert "unscale_" not in vars(scaler)  # it is the user's again
    return outcome, module.scales


@pytest.mark.world_size(2, deadline_s=120)
def test_all_stages_skip_the_same_steps() -> None:
    """Compared with one device; products of half precision depend on the rows of a batch."""
    failures = Failures()
    for overflowing, frozen in (
        ("net.0.weight", False),
        ("net.3.bias", False),
        ("net.1.bias", True),
    ):
        want, scales = on_rank_zero(lambda: run("auto", overflowing, frozen=frozen))  # noqa: B023
        assert scales[3:7] == [2048.0, 1024.0, 512.0, 512.0]
        # How the loss is found changes nothing of where it overflows.
        losses = ("whole_batch", "transparent") if frozen else ("per_sample",)
        for loss in losses:
            options = {"loss": loss}
            strategy = PipeSwiftStrategy(micro_batches=2, **options)
            got, mine = run(strategy, overflowing, frozen=frozen)
            name = f"{overflowing}, {options}"
            failures.add(name, differences(got, want, tolerance=2e-3))
            failures.add(name, [] if mine == scales else [f"scales {mine} for {scales}"])
    failures.check()


class InPrecision(HalfPrecision):
    """Tells in which types it was computed."""

    def __init__(self) -> None:
        super().__init__("net.0.weight")
        self.types: set[torch.dtype] = set()

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        self.types |= {p.dtype for p in self.parameters()}
        found = self.net(x)
        self.types.add(found.dtype)  # the last stage alone comes here
        return (found - y).float().pow(2).mean(1)

    def on_after_backward(self) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.mark.world_size(2, deadline_s=120)
def test_each_precision_computes_in_its_types_and_to_rounding() -> None:
    failures = Failures()
    tolerances = {"32-true": 1e-5, "bf16-mixed": 3e-2, "bf16-true": 6e-2}
    half = torch.bfloat16
    types = {"32-true": {torch.float32}, "bf16-mixed": {torch.float32, half}, "bf16-true": {half}}
    for precision, tolerance in tolerances.items():
        options = {"precision": precision, "max_epochs": 1, "gradient_clip_val": 0.5}
        want = plain(InPrecision, loader, **options)
        for loss in ("per_sample", "whole_batch"):
            made: list[InPrecision] = []

            def make() -> InPrecision:
                made.append(InPrecision())  # noqa: B023 -- called at once
                return made[-1]  # noqa: B023

            strategy = PipeSwiftStrategy(micro_batches=2, loss=loss)
            got = fit(make, loader, strategy, **options)
            failures.add(f"{precision}, {loss}", differences(got, want, tolerance=tolerance))
            last = dist.get_rank() == 1
            kept = types[precision] - ({half} if precision == "bf16-mixed" and not last else set())
            assert made[0].types == kept, precision
    failures.check()


class Weighs(Callback):
    """Notes by what the loss of micro-batches is weighted in the end."""

    def __init__(self) -> None:
        self.rules: tuple[Rule, ...] | None = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        policy = trainer.strategy._steps._policy
        self.rules = None if policy.whole else policy._left[LOSS]


@pytest.mark.world_size(2, deadline_s=120)
def test_weights_are_never_guessed_in_half_precision() -> None:
    """A mean over tokens: by tokens on all ranks, or whole where rounding hides which it is."""
    failures = Failures()
    data = lambda: tuple(DataLoader(half_rows(), batch_size=8) for _ in "tv")  # noqa: E731
    for precision, tolerance in {"bf16-mixed": 3e-2, "bf16-true": 8e-2}.items():
        for module in (lambda: Tokens(OwnLoss()), outside):
            options: dict[str, Any] = {"precision": precision, "max_epochs": 2}
            want = plain(module, data, **options)
            weighs = Weighs()
            strategy = PipeSwiftStrategy(micro_batches=[3, 3, 2])
            got = fit(module, data, strategy, callbacks=[weighs], **options)
            failures.add(precision, differences(got, want, tolerance=tolerance))
            assert weighs.rules is None or Rule.TOKENS in weighs.rules
            assert on_rank_zero(lambda: weighs.rules) == weighs.rules  # noqa: B023 -- at once
    failures.check()


def half_rows() -> list[dict[str, Tensor]]:
    return [{**row, "x": row["x"].float()} for row in rows()]


# -- several optimizers ------------------------------------------------------------------------


class Overflowing(Gan):
    """A gradient of the generator's last stage overflows in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def manual_backward(self, loss: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, **kwargs)
        gradient = self.generator[3].linear.bias.grad
        if gradient is not None and self.trainer.fit_loop.epoch_loop.batch_idx == 1:
            gradient[0] = float("inf")
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def on_validation_epoch_end(self) -> None:
        """Shows nothing: its samples are drawn in double precision."""


def _scaled(strategy: Any) -> tuple[Outcome, list[float]]:
    made: list[Overflowing] = []

    def make() -> Overflowing:
        made.append(Overflowing())
        return made[-1]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    options: dict[str, Any] = {"plugins": plugins, "precision": None, "max_epochs": 1}
    outcome = fit(make, loader, strategy, **options)
    return outcome, made[0].scales


@pytest.mark.world_size(2, deadline_s=120)
def test_two_optimizers_share_one_scale() -> None:
    """All stages skip the generator's step that overflowed on one of them, and no other."""
    want, scales = on_rank_zero(lambda: _scaled("auto"))
    assert any(after < before for before, after in pairwise(scales))
    got, mine = _scaled(PipeSwiftStrategy(micro_batches=1))
    assert mine == scales
    found = differences(got, want, tolerance=1e-5)
    assert not found, found
