"""One file from shards, by the recipe, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from tests.helpers.modules import Language, Transformer, loaders, tokens

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_writes_one_file_and_nothing_else(tmp_path: Path) -> None:
    module = Language(Transformer(tied="module"))
    Trainer(
        strategy=PipeSwiftStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[TopologyCheckpoint(tmp_path / "sharded", every_n_steps=1)],
    ).fit(module, loaders(tokens)())
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "recipes" / "reshard.py",
            "source=sharded",
            "target=one/whole.ckpt",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "whole.ckpt: from" in done.stdout
    assert "step2" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "sharded"]
    whole = torch.load(tmp_path / "one" / "whole.ckpt", weights_only=True)
    torch.testing.assert_close(whole["state_dict"], dict(module.state_dict()), rtol=0, atol=0)
    assert whole["optimizer_states"][0]["state"].keys() == set(range(24))
    assert whole["global_step"] == 2
