"""Every schedule, number of stages and replicas, style and split, against plain Lightning."""

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
    logging_all,
    stack,
    tokens,
    vectors,
)
from tests.helpers.parity import Failures, Outcome, compare, differences, fit, plain

STYLES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    "sequential": (lambda: logging_all(Regression(stack())), loaders(vectors)),
    "blocks": (lambda: logging_all(Language(Transformer())), loaders(tokens)),
    "hook": (lambda: Language(HookedTransformer()), loaders(tokens)),
    "chain": (lambda: Language(ChainedTransformer()), loaders(tokens)),
}
# By default some steps check the loss in GPipe's order; here every step follows its schedule.
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "loss": "per_sample"},
    "1f1b": {"schedule": "1f1b", "loss": "per_sample"},
    "deep": {"schedule": "1f1b", "warm_up": 2.0, "loss": "per_sample"},
}
# A batch of 8, and of 5 at the end of an epoch: equal, not divisible, and named one by one.
SPLITS: dict[str, Any] = {"equal": 4, "uneven": 3, "sizes": [1, 4, 3]}
LENGTH: dict[str, Any] = {"max_epochs": 2}  # of 5 batches


def combinations() -> Iterator[tuple[str, str, str]]:
    """Every pair of a style, a schedule and a split occurs."""
    for i, style in enumerate(STYLES):
        for j, schedule in enumerate(SCHEDULES):
            yield style, schedule, list(SPLITS)[(i + j) % len(SPLITS)]


def _against_plain(stages: int) -> None:
    failures = Failures()
    wanted = {n: plain(*style, **LENGTH) for n, style in STYLES.items()}
    for style, schedule, split in combinations():
        if stages == 1 and schedule != "1f1b":  # one stage does the same under each
            continue
        strategy = {**SCHEDULES[schedule], "micro_batches": SPLITS[split], "stages": stages}
        name = f"{style}, {schedule}, {split}, {stages} stages"
        compare(failures, name, *STYLES[style], strategy, wanted[style], **LENGTH)
    failures.check()


@pytest.mark.world_size(1, deadline_s=120)
def test_one_stage() -> None:
    _against_plain(1)


@pytest.mark.world_size(2, deadline_s=120)
def test_two_stages() -> None:
    _against_plain(2)


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=150)
def test_four_stages() -> None:
    _against_plain(4)


@pytest.mark.world_size(2, deadline_s=120)
def test_a_second_run_is_bit_identical() -> None:
    failures = Failures()
    for style in STYLES:
        strategy = {"micro_batches": 3, "warm_up": 2.0, "loss": "per_sample"}
        runs = [fit(*STYLES[style], PipeSwiftStrategy(**strategy), max_epochs=1) for _ in "ab"]
        failures.add(style, differences(*runs, tolerance=0.0))
    failures.check()


# -- data parallel: plain Lightning's DDP on two processes is the reference -------------------


def _ddp(folder: Path) -> None:
    strategy = partial(DDPStrategy, process_group_backend="gloo")
    for name, style in STYLES.items():
        outcome = fit(*style, strategy(), max_epochs=DP_EPOCHS)
        torch.save(outcome, folder / f"{name}-{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ddp")
    run_ranks(_ddp, 2, {"folder": folder}, deadline_s=120)
    return folder


DP_EPOCHS = 3  # of batches of 8, 8 and 3 on each replica


def _against_ddp(folder: Path, stages: int, names: set[str]) -> None:
    failures = Failures()
    replica = dist.get_rank() // stages
    for style, schedule, split in combinations():
        if style in names:
            want: Outcome = torch.load(folder / f"{style}-{replica}.pt", weights_only=False)
            strategy = {**SCHEDULES[schedule], "micro_batches": SPLITS[split], "stages": stages}
            name = f"{style}, {schedule}, {split}, {stages} stages, replica {replica}"
            compare(failures, name, *STYLES[style], strategy, want, max_epochs=DP_EPOCHS)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_one_stage_two_replicas(ddp: Path) -> None:
    _against_ddp(ddp, 1, {"sequential", "chain"})


@pytest.mark.world_size(4, deadline_s=120)
def test_two_stages_two_replicas(ddp: Path) -> None:
    _against_ddp(ddp, 2, {*STYLES})


@pytest.mark.slow
@pytest.mark.world_size(8, deadline_s=120)
def test_four_stages_two_replicas(ddp: Path) -> None:
    _against_ddp(ddp, 4, {"blocks"})
