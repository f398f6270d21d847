import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if path.name != "__init__.py")


def test_recipes_cannot_be_imported() -> None:
    with pytest.raises(ModuleNotFoundError, match="recipes cannot be imported: run one"):
        import_module("recipes")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_short_and_say_how_they_are_used(path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 60
    assert "Usage:" in text


@pytest.mark.slow
def test_training_writes_a_checkpoint_and_a_report(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {i} of a text" for i in range(40)))
    command = [
        *(sys.executable, str(ROOT / "recipes" / "train.py")),
        *("experiment=gpt_tiny", "strategy=auto", "trainer.devices=1", "trainer.max_steps=5"),
        *(f"data.path={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "job completion time" in done.stdout
    assert "val/loss" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
    assert (tmp_path / "run" / "job.json").is_file()
    assert (tmp_path / "run" / "csv" / "metrics.csv").is_file()
