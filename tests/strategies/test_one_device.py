"""What is configured for several stages trains on one device as plain Lightning would."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.modules import Language, Transformer, loader, tokens
from tests.helpers.parity import lone_trainer, quiet
from tests.helpers.planned import costs


def _fit(strategy: Any) -> dict[str, torch.Tensor]:
    quiet()
    torch.manual_seed(3)
    module = Language(Transformer()).double()
    trainer = lone_trainer(strategy, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, loader(tokens, shuffle=False))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def want() -> dict[str, torch.Tensor]:
    return _fit("auto")


@pytest.mark.parametrize(
    "options",
    [
        {"partition": [1, 1, 1, 1], "warm_up": [4, 3, 2, 1], "recompute": [1, 0, 1, 0]},
        {"partition": [9, 9], "schedule": "1f1b", "warm_up": [4, 1], "receive_window": 1},
        {"partition": "uniform", "schedule": "gpipe", "micro_batches": [5, 2, 1]},
        {"warm_up": 2.0, "process_group_backend": "nccl", "silence_s": 0.5, "compile": "eager"},
        {"dynamic_shapes": True, "micro_batches": 3, "loss": "whole_batch", "warm_up": 1.5},
        {"loss": "transparent", "partition": [2, 2], "recompute": [0, 2], "receive_window": 2},
        {"costs": True, "memory_limit": [1e12, 1e12], "warm_up": [2, 1], "partition": [2, 2]},
        {"costs": True, "memory_limit": 1e12, "partition": "uniform", "schedule": "gpipe"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_for_several_stages_do_no_harm(
    options: dict[str, Any], want: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Once, lists with a number for each stage were refused there, or ended in other errors."""
    if "costs" in options:
        file = tmp_path / "costs.json"
        file.write_text(costs(4).to_json())
        options = {**options, "costs": file}
    got = _fit(PipeSwiftStrategy(**{"loss": "per_sample", **options}))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-10, msg=name)
