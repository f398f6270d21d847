"""A script that catches the error of a Trainer call goes on, on every rank."""

import os
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.watchdog import PipelineFailure
from pipeswift_lightning.strategies import environment
from pipeswift_lightning.strategies.contract import ContractError
from tests.helpers import modules
from tests.helpers.parity import differences, fit, make_trainer, plain

LOADERS = modules.loaders(modules.vectors)


class Failing(modules.Regression):
    """Fails in a hook, on some ranks, once two steps are done."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        super().__init__(modules.stack())
        self.hook, self.ranks = hook, ranks

    def _may_fail(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_step >= 2 and rank() in self.ranks:
            raise ValueError("the user's own error")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._may_fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._may_fail("validation_step")
        super().validation_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._may_fail("optimizer_step")
        super().optimizer_step(*args, **kwargs)


def rank() -> int:
    return int(os.environ["RANK"])


def make() -> modules.Regression:
    return modules.Regression(modules.stack())


def fail(hook: str, ranks: tuple[int, ...]) -> Failing:
    """Fit a module that fails; the ranks that do not fail by themselves learn who did."""
    module = Failing(hook, ranks)
    trainer = make_trainer(PipeSwiftStrategy(micro_batches=2), max_steps=8)
    begin = time.monotonic()
    with pytest.raises((ValueError, PipelineFailure)) as raised:
        trainer.fit(module, LOADERS(), LOADERS())
    assert isinstance(raised.value, ValueError) is (rank() in ranks), raised.value
    assert "the user's own error" in str(raised.value)
    # Long before the harness's watchdog would end a peer that nothing wakes.
    assert time.monotonic() - begin < 10
    return module


@pytest.mark.parametrize(
    ("hook", "ranks"),
    [
        ("training_step", (0,)),
        ("training_step", (1,)),
        ("training_step", (0, 1)),
        ("validation_step", (1,)),
        ("optimizer_step", (0,)),
    ],
)
@pytest.mark.world_size(2, deadline_s=90)
def test_the_next_fit_is_as_if_there_had_been_no_failure(hook: str, ranks: tuple[int, ...]) -> None:
    want = plain(make, LOADERS, max_steps=4)
    for _ in range(2):
        fail(hook, ranks)
        got = fit(make, LOADERS, PipeSwiftStrategy(micro_batches=2), max_steps=4)
        assert differences(got, want) == []


@pytest.mark.world_size(3, deadline_s=90)
def test_a_rank_between_others_fails() -> None:
    want = plain(make, LOADERS, max_steps=4)
    fail("training_step", (1,))
    got = fit(make, LOADERS, PipeSwiftStrategy(micro_batches=2), max_steps=4)
    assert differences(got, want) == []


@pytest.mark.parametrize("method", ["fit", "validate", "predict"])
@pytest.mark.world_size(2)
def test_a_module_that_is_left_incomplete_is_refused(method: str) -> None:
    module = fail("training_step", (1,))
    trainer = make_trainer(PipeSwiftStrategy(micro_batches=2), max_steps=8)
    with pytest.raises(ContractError, match="make a new module"):
        getattr(trainer, method)(module, LOADERS())


@pytest.mark.world_size(2, deadline_s=90)
def test_a_group_that_is_destroyed_between_two_calls_is_made_anew() -> None:
    want = plain(make, LOADERS, max_steps=4)
    fail("training_step", (0,))
    for _ in range(2):
        got = fit(make, LOADERS, PipeSwiftStrategy(micro_batches=2), max_steps=4)
        assert differences(got, want) == []
        dist.destroy_process_group()


@pytest.mark.world_size(2)
def test_a_rank_that_does_not_come_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PATIENCE_S", 2.0)
    fail("training_step", (0,))
    if rank() == 0:
        trainer = make_trainer(PipeSwiftStrategy(micro_batches=2), max_steps=8)
        with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come"):
            trainer.fit(make(), LOADERS())
    assert not dist.is_initialized()
