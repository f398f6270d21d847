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


@pytest.mark.slow
def test_a_sweep_over_devices_gives_each_job_its_own_ranks(tmp_path: Path) -> None:
    """The second job once took itself for a rank of the first, and waited for ever."""
    _train("-m", "experiment=gpt_tiny", "trainer.devices=1,2,1", f"hydra.sweep.dir={tmp_path}")
    jobs = [tmp_path / str(number) for number in range(3)]
    losses = [_last_loss(job) for job in jobs]
    assert losses[0] == losses[2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    logs = [sorted(path.name for path in job.glob("*.log")) for job in jobs]
    assert logs == [["train.log"], ["train.log", "train_rank1.log"], ["train.log"]]


def _last_loss(job: Path) -> float:
    header, *rows = (job / "csv" / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("val/loss")
    return float([row.split(",")[column] for row in rows if row.split(",")[column]][-1])
