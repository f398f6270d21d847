"""Networks whose parts meet in unusual ways, batches of any shape, and how they are trained."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import LightningModule

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
from tests.helpers.parity import Failures, compare, plain

Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]

NETWORKS: dict[str, Case] = {
    "tied modules": (lambda: Language(Transformer(tied="module")), loaders(tokens), {}),
    "tied by use": (lambda: Language(Transformer(tied="functional")), loaders(tokens), {}),
    "padding of any length": (Padded, loaders(Ragged, collate_fn=pad), {}),
    "U-Net": (lambda: Regression(UNet()), loaders(vectors), {}),
    "input to each block": (lambda: Regression(Residual()), loaders(vectors), {}),
    "tuples": (lambda: Regression(Structured("tuple")), loaders(vectors), {}),
    "dicts": (lambda: Regression(Structured("dict")), loaders(vectors), {}),
    "parameter in the loss": (lambda: Temperature(Transformer()), loaders(tokens), {}),
    "dataclasses": (lambda: Nested(stack()), loaders(vectors, collate_fn=nest), {}),
    "a layer not called": (lambda: Regression(Partial()), loaders(vectors), {}),
}
TIED = NETWORKS["tied by use"][:2]
TRAINING: dict[str, Case] = {
    "frozen start": (lambda: Frozen(Transformer(), 1), loaders(tokens), {}),
    "frozen stages": (lambda: Frozen(Transformer(), 3), loaders(tokens), {}),
    "parameter groups": (lambda: Grouped(Transformer(tied="module")), loaders(tokens), {}),
    "accumulation": (*TIED, {"accumulate_grad_batches": 3, "max_epochs": 9}),
    "clip by norm": (*TIED, {"gradient_clip_val": 0.05}),
    "clip by value": (
        *TIED,
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
    "clip and accumulate": (
        *NETWORKS["tied modules"][:2],
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 6},
    ),
    "clip, frozen": (lambda: Frozen(Transformer(), 3), loaders(tokens), {"gradient_clip_val": 0.1}),
}


def _check(cases: dict[str, Case], stages: int) -> None:
    failures = Failures()
    for name, (module, data, options) in cases.items():
        options = {"max_epochs": 4, **options}
        want = plain(module, data, **options)
        strategy = {"stages": stages, "micro_batches": 3}
        compare(failures, f"{name}, {stages} stages", module, data, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(1, deadline_s=60)
def test_networks_on_one_stage() -> None:
    _check(NETWORKS, 1)


@pytest.mark.world_size(2, deadline_s=60)
def test_networks_on_two_stages() -> None:
    _check(NETWORKS, 2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=90)
def test_networks_on_four_stages() -> None:
    _check(NETWORKS, 4)


@pytest.mark.world_size(2, deadline_s=60)
def test_training_on_two_stages() -> None:
    _check(TRAINING, 2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=90)
def test_training_on_four_stages() -> None:
    _check(TRAINING, 4)
