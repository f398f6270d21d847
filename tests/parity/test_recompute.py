"""Layers whose activations are computed once more: the same gradients, from less memory."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.options import OptionError
from tests.helpers.modules import Block, Language, Transformer, loader, loaders, tokens
from tests.helpers.parity import Failures, differences, fit, make_trainer

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


@pytest.mark.world_size(2, deadline_s=60)
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


@pytest.mark.world_size(2, deadline_s=40)
def test_a_list_of_the_wrong_length_is_refused() -> None:
    strategy = PipeSwiftStrategy(recompute=[1, 2, 3])
    trainer = make_trainer(strategy, max_epochs=1)
    with pytest.raises(OptionError, match="one number a stage, and there are 2"):
        trainer.fit(module(), loader(tokens))
