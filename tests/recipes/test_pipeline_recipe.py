"""The main job over several processes, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _train(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "recipes/train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def _report(folder: Path) -> dict[str, object]:
    report: dict[str, object] = json.loads((folder / "job.json").read_text())
    return report


@pytest.mark.slow
def test_two_stages_learn_and_report_their_bubbles(tmp_path: Path) -> None:
    output = _train("experiment=gpt_tiny", f"hydra.run.dir={tmp_path}")
    assert "stage 1, measured bubble" in output
    report = json.dumps(_report(tmp_path))
    assert "bubble" in report
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
