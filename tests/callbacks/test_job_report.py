import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from pipeswift_lightning.callbacks import JobReport
from pipeswift_lightning.callbacks.job_report import count_batch
from pipeswift_lightning.callbacks.job_times import process_age_s, slurm_queue_s

PARTS = ("assembly_s", "training_s", "validation_s", "clean_up_s")
STEP_S, VALIDATION_S, SANITY_CHECK_S = 0.02, 0.05, 0.5


class Sleeper(LightningModule):
    """A step and a validation of known length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.validations = 0

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_S)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        time.sleep(SANITY_CHECK_S if self.trainer.sanity_checking else VALIDATION_S)
        self.validations += 1
        self.log("val/loss", float(self.validations))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StagedStrategy(SingleDeviceStrategy):
    """Stands in for a pipeline: it has measured its bubbles."""

    def measured_bubbles(self) -> list[float] | None:
        return [0.25, 0.125]


def fit(report: JobReport, folder: Path, module: LightningModule | None = None, **kwargs) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        callbacks=[report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )
    data = DataLoader(torch.ones(8, 3), batch_size=2)
    trainer.fit(module or Sleeper(), data, DataLoader(torch.ones(2, 3)))


def test_parts_sum_to_the_job_completion_time(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    fit(JobReport(), tmp_path)
    report = json.loads((tmp_path / "job_report.json").read_text())
    assert report["queue_s"] is None
    assert report["job_completion_s"] == pytest.approx(sum(report[part] for part in PARTS))
    assert report["job_completion_s"] == pytest.approx(process_age_s(), abs=3.0)
    assert "no scheduler" in capsys.readouterr().out


def test_times_are_those_of_the_steps(tmp_path) -> None:
    callback = JobReport()
    fit(callback, tmp_path)
    report = callback.report
    assert report["steps"] == 8
    assert STEP_S <= report["step_s"]["quartile_1"] <= report["step_s"]["median"]
    assert report["training_s"] >= 8 * report["step_s"]["quartile_1"] / 2
    # two validations of two batches; the sanity check before training counts as assembly
    assert 4 * VALIDATION_S <= report["validation_s"] < 2 * SANITY_CHECK_S
    assert report["samples_per_s"] == pytest.approx(16 / report["training_s"])


def test_first_and_last_value_of_the_monitored_metric(tmp_path, capsys) -> None:
    callback = JobReport(monitor="val/loss")
    fit(callback, tmp_path)
    assert callback.report["monitor"] == {
        "name": "val/loss",
        "by_step": [[0, 1.5], [4, 3.5], [8, 5.5]],
    }
    printed = capsys.readouterr().out
    assert "val/loss, step 0" in printed
    assert "val/loss, step 8" in printed
    assert "bubble" not in printed


def test_measured_bubbles_are_shown_where_the_strategy_has_them(tmp_path, capsys) -> None:
    callback = JobReport()
    fit(callback, tmp_path, strategy=StagedStrategy(device=torch.device("cpu")))
    assert callback.report["bubble_by_stage"] == [0.25, 0.125]
    assert "12.5%" in capsys.readouterr().out


def test_one_step_has_quartiles_and_one_validation_is_shown_once(tmp_path, capsys) -> None:
    callback = JobReport(monitor="val/loss")
    fit(callback, tmp_path, fast_dev_run=True)
    assert len(set(callback.report["step_s"].values())) == 1
    assert capsys.readouterr().out.count("val/loss, step") == 1


def test_folder_can_be_chosen(tmp_path) -> None:
    fit(JobReport(dirpath=tmp_path / "here"), tmp_path / "elsewhere")
    assert (tmp_path / "here" / "job_report.json").is_file()


def test_a_run_that_fails_writes_no_report(tmp_path) -> None:
    class Failing(Sleeper):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(JobReport(), tmp_path, Failing())
    assert not (tmp_path / "job_report.json").exists()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.ones(2, 5), "mask": torch.tensor([[1, 1], [1, 0]]) > 0}, ("tokens", 3)),
        ({"x": torch.ones(2, 5), "attention_mask": torch.tensor([[1, 1]])}, ("tokens", 2)),
        ({"x": torch.ones(2, 5), "mask": torch.ones(2, 5)}, ("samples", 2)),  # weights, not a mask
        (torch.ones(4, 5), ("samples", 4)),
        (None, ("samples", 0)),
    ],
)
def test_unit_of_a_batch(batch, expected) -> None:
    unit, count = count_batch(Sleeper(), batch)
    assert (unit, int(count)) == expected


def test_modules_own_count_comes_first() -> None:
    class Counting(Sleeper):
        def tokens_per_batch(self, batch) -> int:
            return 7

    assert count_batch(Counting(), {"mask": torch.ones(2, 2) > 0}) == ("tokens", 7)


def test_process_age_counts_from_before_the_imports() -> None:
    code = (
        "import time; time.sleep(0.5);"
        "from pipeswift_lightning.callbacks.job_times import process_age_s; print(process_age_s())"
    )
    started = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 0.5 <= float(answer.stdout) <= time.monotonic() - started + 0.1


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a ``scontrol`` on PATH that gives a chosen answer."""

    def install(answer: str) -> None:
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\n[ "$4" = 17 ] || exit 1\n{answer}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "17")

    return install


@pytest.mark.parametrize(
    ("answer", "queue_s"),
    [
        (
            "echo JobId=17 SubmitTime=2030-01-01T09:59:00 Eligible=x StartTime=2030-01-01T10:01:05",
            125,
        ),
        ("echo JobId=17 SubmitTime=2030-01-01T09:59:00 StartTime=Unknown", None),
        ("echo JobId=17", None),
        ("exit 1", None),
    ],
)
def test_queue_is_asked_of_slurm(scontrol, answer, queue_s) -> None:
    scontrol(answer)
    assert slurm_queue_s() == queue_s


def test_queue_is_part_of_the_job(scontrol, tmp_path, capsys) -> None:
    scontrol("echo SubmitTime=2030-01-01T10:00:00 StartTime=2030-01-01T10:10:00")
    callback = JobReport()
    fit(callback, tmp_path)
    others_s = sum(callback.report[part] for part in PARTS)
    assert callback.report["job_completion_s"] == pytest.approx(600 + others_s)
    assert "600.0 s" in capsys.readouterr().out
