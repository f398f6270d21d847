"""Layers that run in another way, recomputed or compiled: the same results."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.contract import ContractError
from tests.helpers.modules import (
    WIDTH,
    Block,
    Language,
    Regression,
    Transformer,
    loader,
    loaders,
    stack,
    tokens,
    vectors,
)
from tests.helpers.parity import Failures, differences, fit, make_trainer, plain

CALLS: dict[int, int] = {}


class CountingBlock(Block):
    """Counts its runs on data."""

    index = 0

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if not x.is_meta and self.training:
            CALLS[self.index] = CALLS.get(self.index, 0) + 1
        return super().forward(x, *args)


def module(tied: str = "module") -> Language:
    network = Transformer(dropout=0.3, tied=tied)
    for i in range(len(network.blocks)):
        network.blocks[i] = block = CountingBlock(0.3)
        block.index = i
    return Language(network)


def counted(**options: Any) -> tuple[Any, list[int]]:
    """Fit, and return how often each block ran, on whichever stage it is."""
    CALLS.clear()
    strategy = PipeSwiftStrategy(micro_batches=2, partition=[2, 2], **options)
    outcome = fit(module, loaders(tokens), strategy, max_epochs=1, limit_train_batches=4)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(CALLS))
    return outcome, [sum(calls.get(i, 0) for calls in every) for i in range(4)]


@pytest.mark.world_size(2, deadline_s=120)
def test_recomputing_changes_nothing_but_the_work() -> None:
    """The stages hold two blocks each."""
    failures = Failures()
    variants: dict[str, tuple[Any, list[int]]] = {
        "all": (True, [16, 16, 16, 16]),
        "one a stage": (1, [16, 8, 16, 8]),
        "listed": ([0, 2], [8, 8, 16, 16]),
    }
    for loss in ("per_sample", "whole_batch"):
        want, calls = counted(loss=loss)
        assert calls == [8, 8, 8, 8]
        for name, (recompute, expected) in variants.items():
            got, calls = counted(loss=loss, recompute=recompute)
            failures.add(f"{name}, {loss}", differences(got, want, tolerance=0.0))
            assert calls == expected, (name, loss)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_recomputing_counts_no_sample_twice_in_running_statistics() -> None:
    def normed() -> Regression:
        linear, norm = partial(nn.Linear, WIDTH, WIDTH), partial(nn.BatchNorm1d, WIDTH)
        return Regression(nn.Sequential(linear(), norm(), linear(), norm()))

    options: dict[str, Any] = {"micro_batches": 2, "partition": [2, 2], "loss": "per_sample"}
    want, got = (
        fit(normed, loaders(vectors), PipeSwiftStrategy(recompute=r, **options), max_epochs=1)
        for r in (False, True)
    )
    assert got.parameters["net.1.num_batches_tracked"] > 0
    assert not differences(got, want, tolerance=0.0)


@pytest.mark.world_size(2, deadline_s=120)
def test_compiled_layers_compute_the_same() -> None:
    failures = Failures()
    # Dropout is left out: a compiled one draws other numbers.
    fit_stack = partial(fit, lambda: Regression(stack()), loaders(vectors), max_epochs=1)
    want = plain(lambda: Regression(stack()), loaders(vectors), max_epochs=1)
    for compiled in ("aot_eager", {"backend": "aot_eager", "dynamic": True}):
        strategy = PipeSwiftStrategy(micro_batches=3, compile=compiled)
        failures.add(f"{compiled}", differences(fit_stack(strategy), want))
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
@pytest.mark.parametrize("whole", [True, False])
def test_a_network_that_is_compiled_already_is_refused(whole: bool) -> None:
    module = Regression(stack())
    if whole:
        module.net = torch.compile(module.net, backend="eager")
    else:
        module.net[2].compile(backend="eager")
    trainer = make_trainer(PipeSwiftStrategy(), max_epochs=1)
    with pytest.raises(ContractError, match=r"has been compiled.*compile=True"):
        trainer.fit(module, loader(vectors))
