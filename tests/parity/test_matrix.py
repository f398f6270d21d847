"""Every schedule, number of stages and replicas, module style and split, against plain Lightning."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import (
    ChainedTransformer,
    HookedTransformer,
    Language,
    Regression,
    Transformer,
    loaders,
    stack,
    tokens,
    vectors,
)
from tests.helpers.parity import Failures, Outcome, compare, differences, fit, plain

STYLES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    "sequential": (lambda: Regression(stack()), loaders(vectors)),
    "blocks": (lambda: Language(Transformer()), loaders(tokens)),
    "hook": (lambda: Language(HookedTransformer()), loaders(tokens)),
    "chain": (lambda: Language(ChainedTransformer()), loaders(tokens)),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "deep": {"schedule": "1f1b", "warm_up": 2.0},
}
# A batch of 8, and of 5 at the end of an epoch: equal, not divisible, and named one by one.
SPLITS: dict[str, Any] = {"equal": 4, "uneven": 3, "sizes": [1, 4, 3]}
EPOCHS = 4  # of 5 batches: 20 steps


def combinations() -> Iterator[tuple[str, str, str]]:
    yield from ((a, b, c) for a in STYLES for b in SCHEDULES for c in SPLITS)


def _against_plain(stages: int) -> None:
    failures = Failures()
    wanted = {n: plain(*style, max_epochs=EPOCHS) for n, style in STYLES.items()}
    for style, schedule, split in combinations():
        strategy = {**SCHEDULES[schedule], "micro_batches": SPLITS[split], "stages": stages}
        name = f"{style}, {schedule}, {split}, {stages} stages"
        compare(failures, name, *STYLES[style], strategy, wanted[style], max_epochs=EPOCHS)
    failures.check()


@pytest.mark.world_size(1, deadline_s=60)
def test_one_stage() -> None:
    _against_plain(1)


@pytest.mark.world_size(2, deadline_s=90)
def test_two_stages() -> None:
    _against_plain(2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=150)
def test_four_stages() -> None:
    _against_plain(4)


@pytest.mark.world_size(2, deadline_s=60)
def test_a_second_run_is_bit_identical() -> None:
    failures = Failures()
    for style in STYLES:
        strategy = {"micro_batches": 3, "warm_up": 2.0}
        runs = [fit(*STYLES[style], PipeSwiftStrategy(**strategy), max_epochs=2) for _ in "ab"]
        failures.add(style, differences(*runs, tolerance=0.0))
    failures.check()
