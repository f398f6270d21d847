"""What is drawn does not depend on the number of stages, nor on the order of the micro-batches."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import Dataset

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Regression, Transformer, loaders, stack, tokens, vectors
from tests.helpers.networks import Noisy, NoisyBetween
from tests.helpers.parity import Failures, Outcome, compare, differences, fit, plain

TEXT, NUMBERS = loaders(partial(tokens, 21)), loaders(partial(vectors, 21))  # 8, 8 and 5 samples
DRAWING: dict[str, Any] = {
    "dropout": (lambda: Language(Transformer(dropout=0.3)), TEXT),
    "noise": (lambda: Noisy(stack()), NUMBERS),
    "noise between layers": (lambda: Regression(NoisyBetween()), NUMBERS),
    "both, tied": (lambda: Language(Transformer(dropout=0.3, tied="module")), TEXT),
}
ORDERS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "loss": "per_sample"},
    "deep": {"schedule": "1f1b", "warm_up": 2.0, "loss": "per_sample"},
    "whole": {"loss": "whole_batch"},
}
COMPARED = {1: ["gpipe", "whole"], 2: ["deep", "whole"], 4: ["deep"]}
LENGTH: dict[str, Any] = {"max_epochs": 2, "max_steps": 4}


def _draw(folder: Path, stages: int) -> None:
    for name, case in DRAWING.items():
        for i in COMPARED[stages]:
            strategy = PipeSwiftStrategy(stages=stages, micro_batches=3, **ORDERS[i])
            outcome = fit(*case, strategy, **LENGTH)
            if dist.get_rank() == 0:
                torch.save(outcome, folder / f"{name}-{stages}-{i}.pt")


def _read(path: Path) -> Outcome:
    outcome: Outcome = torch.load(path, weights_only=False)
    return outcome


def test_the_same_draws_at_any_number_of_stages(tmp_path: Path) -> None:
    failures = Failures()
    for stages in COMPARED:
        run_ranks(_draw, stages, {"folder": tmp_path, "stages": stages}, deadline_s=120)
    for name in DRAWING:
        for stages, orders in COMPARED.items():
            for order in orders:
                # The loss of a whole batch draws once for it; otherwise the order is all the same.
                reference = "whole" if order == "whole" else "gpipe"
                want = _read(tmp_path / f"{name}-1-{reference}.pt")
                got = _read(tmp_path / f"{name}-{stages}-{order}.pt")
                assert want.losses[0] != want.losses[3]
                label = f"{name}, {stages} stages, {order}"
                failures.add(label, differences(got, want, logged=True))
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_masks_differ_from_step_to_step_and_between_micro_batches() -> None:
    torch.manual_seed(0)
    data = torch.ones(4, 6, dtype=torch.float64)
    seen: list[Tensor] = []

    class Watched(Regression):
        def per_sample(self, batch: Any) -> Tensor:
            noise = torch.rand(len(batch), 1)
            seen.append(noise.flatten())
            return self.net(batch).sum(1) + noise.sum() * 0

    fit(
        lambda: Watched(stack()),
        partial(torch.utils.data.DataLoader, data, batch_size=4),
        PipeSwiftStrategy(micro_batches=[2, 2], loss="per_sample"),
        max_epochs=2,
    )
    draws = torch.cat([noise for noise in seen if not noise.is_meta]).tolist()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, draws[-8:])
    assert every[0] == every[1]  # both stages draw the same
    assert len(set(every[0])) == 8


class Augmented(Dataset[Any]):
    """Draws from the global generator for each sample, in a worker or not."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((6,), index / 10, dtype=torch.float64)
        return x + torch.rand(6, dtype=torch.float64), x.sin()


def _different_on_each_rank() -> None:
    torch.manual_seed(100 + dist.get_rank())


# Ranks of the tests would start workers by a server of their own, which imports all anew.
PERSISTENT: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
SHUFFLED = partial(loaders, vectors, shuffle=True)
SEEDS: dict[str, Any] = {
    "seeded": (SHUFFLED(), partial(seed_everything, 5, verbose=False)),
    "not seeded": (SHUFFLED(), _different_on_each_rank),
    "augmented": (loaders(Augmented, shuffle=True), _different_on_each_rank),
    "augmented in workers": (
        loaders(Augmented, shuffle=True, num_workers=2, **PERSISTENT),
        partial(seed_everything, 5, workers=True, verbose=False),
    ),
}


def _shuffle(stages: int, names: list[str]) -> None:
    failures = Failures()
    for name in names:
        data, seed = SEEDS[name]
        want = plain(lambda: Regression(stack()), data, max_epochs=2, seed=seed)
        strategy = {"stages": stages, "micro_batches": 3}
        compare(
            failures,
            f"{name}, {stages} stages",
            lambda: Regression(stack()),
            data,
            strategy,
            want,
            max_epochs=2,
            seed=seed,
        )
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_shuffling_equals_one_device() -> None:
    _shuffle(2, list(SEEDS))


@pytest.mark.world_size(4, deadline_s=120)
def test_shuffling_equals_one_device_on_four_stages() -> None:
    _shuffle(4, ["not seeded"])
