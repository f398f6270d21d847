"""Networks whose parts meet in unusual ways, batches of any shape, and how they are trained."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Regression, Transformer, loaders, stack, tokens, vectors
from tests.helpers.networks import (
    Frozen,
    Grouped,
    Nested,
    Padded,
    Partial,
    Ragged,
    Residual,
    Structured,
    Temperature,
    UNet,
    nest,
    pad,
)
from tests.helpers.parity import Failures, compare, fit, plain


class Early(Residual):
    """Python evaluates the scale before the block: that value crosses the cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = self.start(x)
        for i, block in enumerate(self.blocks):
            x = self.scale[i] * block(x, x0)
        return x


Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]

NETWORKS: dict[str, Case] = {
    "tied modules": (lambda: Language(Transformer(tied="module")), loaders(tokens), {}),
    "tied by use": (lambda: Language(Transformer(tied="functional")), loaders(tokens), {}),
    "padding of any length": (Padded, loaders(Ragged, collate_fn=pad), {}),
    "U-Net": (lambda: Regression(UNet()), loaders(vectors), {}),
    "input to each block": (lambda: Regression(Residual()), loaders(vectors), {}),
    "a value no layer takes": (lambda: Regression(Early()), loaders(vectors), {}),
    "tuples": (lambda: Regression(Structured("tuple")), loaders(vectors), {}),
    "dicts": (lambda: Regression(Structured("dict")), loaders(vectors), {}),
    "parameter in the loss": (lambda: Temperature(Transformer()), loaders(tokens), {}),
    "dataclasses": (lambda: Nested(stack()), loaders(vectors, collate_fn=nest), {}),
    "a layer not called": (lambda: Regression(Partial()), loaders(vectors), {}),
}
AT_ONCE = ["tied by use", "padding of any length", "parameter in the loss", "dataclasses"]
TIED = NETWORKS["tied by use"][:2]
TRAINING: dict[str, Case] = {
    "frozen start": (lambda: Frozen(Transformer(), 1), loaders(tokens), {}),
    "frozen stages": (lambda: Frozen(Transformer(), 3), loaders(tokens), {}),
    "parameter groups": (lambda: Grouped(Transformer(tied="module")), loaders(tokens), {}),
    "accumulation": (*TIED, {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "clip by norm": (*TIED, {"gradient_clip_val": 0.05}),
    "clip by value": (
        *TIED,
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
    "clip and accumulate": (
        *NETWORKS["tied modules"][:2],
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 2},
    ),
    "shuffled, clipped": (
        NETWORKS["tied by use"][0],
        loaders(tokens, shuffle=True),
        {
            "max_epochs": 2,
            "gradient_clip_val": 0.05,
            "seed": partial(seed_everything, 5, verbose=False),
        },
    ),
    "clip, frozen": (lambda: Frozen(Transformer(), 3), loaders(tokens), {"gradient_clip_val": 0.1}),
}
ON_MIDDLE_STAGES = ["frozen stages", "parameter groups", "clip and accumulate", "clip, frozen"]


def _check(cases: dict[str, Case], stages: int) -> None:
    failures = Failures()
    for name, (module, data, options) in cases.items():
        length = {"max_epochs": 1} if stages == 2 else {"max_epochs": 2, "max_steps": 7}
        options = {**length, **options}
        want = plain(module, data, **options)
        loss = "per_sample" if stages == 2 else "auto"
        strategy = {"stages": stages, "micro_batches": 3, "loss": loss}
        compare(failures, f"{name}, {stages} stages", module, data, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(1, deadline_s=120)
def test_networks_on_one_stage() -> None:
    _check({name: NETWORKS[name] for name in AT_ONCE}, 1)  # nothing is cut


@pytest.mark.world_size(2, deadline_s=120)
def test_networks_on_two_stages() -> None:
    _check(NETWORKS, 2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_networks_on_four_stages() -> None:
    _check(NETWORKS, 4)


@pytest.mark.world_size(2, deadline_s=120)
def test_training_on_two_stages() -> None:
    _check(TRAINING, 2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_training_on_four_stages() -> None:
    _check({name: TRAINING[name] for name in ON_MIDDLE_STAGES}, 4)


# -- data parallel ----------------------------------------------------------------------------

REPLICATED = ["accumulation", "clip by norm", "clip and accumulate", "shuffled, clipped"]


def _options(name: str) -> dict[str, Any]:
    return {"max_epochs": 2, **TRAINING[name][2]}


def _ddp(folder: Path) -> None:
    for name in REPLICATED:
        module, data, _ = TRAINING[name]
        outcome = fit(module, data, DDPStrategy(process_group_backend="gloo"), **_options(name))
        torch.save(outcome, folder / f"{name}-{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ddp")
    run_ranks(_ddp, 2, {"folder": folder}, deadline_s=120)
    return folder


@pytest.mark.world_size(4, deadline_s=120)
def test_training_on_two_stages_and_two_replicas(ddp: Path) -> None:
    failures = Failures()
    for name in REPLICATED:
        module, data, _ = TRAINING[name]
        want = torch.load(ddp / f"{name}-{dist.get_rank() // 2}.pt", weights_only=False)
        strategy = {"stages": 2, "micro_batches": 3}
        compare(failures, name, module, data, strategy, want, **_options(name))
    failures.check()
