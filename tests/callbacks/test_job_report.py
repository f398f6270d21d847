import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from pipeswift_lightning.callbacks import JobReport, job_times
from pipeswift_lightning.callbacks.job_account import JobAccount, Part
from pipeswift_lightning.callbacks.job_progress import Attempt, Progress, ProgressFile
from pipeswift_lightning.callbacks.job_times import process_age_s, slurm_queue_s
from pipeswift_lightning.callbacks.rates import count_batch
from pipeswift_lightning.strategies.action_listener import ActionListener
from tests.helpers.parity import RecordingLogger

PARTS = tuple(f"{part.value}_s" for part in Part)
STEP_S, VALIDATION_S, SANITY_CHECK_S, SAVE_S = 0.02, 0.02, 0.1, 0.05


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


def fit(
    report: JobReport,
    folder: Path,
    module: LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    **kwargs,
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[report, *callbacks],
        **{"max_epochs": 2, "enable_checkpointing": False, "logger": False, **kwargs},
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = DataLoader(torch.ones(8, 3), batch_size=2)
    trainer.fit(module or Sleeper(), data, DataLoader(torch.ones(2, 3)), ckpt_path=ckpt_path)


def test_parts_sum_to_the_job_completion_time(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(job_times, "_ended_s", [])  # no job has ended in this process
    age_before_s = process_age_s()
    fit(JobReport(), tmp_path)
    report = json.loads((tmp_path / "job.json").read_text())
    assert report["queue_s"] is None
    assert report["job_completion_s"] == pytest.approx(sum(report[part] for part in PARTS))
    assert age_before_s < report["job_completion_s"] < process_age_s()
    assert sum(report["assembly"].values()) == pytest.approx(report["assembly_s"])
    assert list(report["assembly"]) == ["process_start", "groups", "build", "load", "first_batch"]
    assert report["status"] == "finished"
    assert "no scheduler" in capsys.readouterr().out


def test_times_are_those_of_the_steps(tmp_path) -> None:
    callback = JobReport()
    fit(callback, tmp_path)
    report = callback.report
    assert report["steps"] == 8
    assert STEP_S <= report["step_s"]["quartile_1"] <= report["step_s"]["median"]
    assert report["training_s"] >= 8 * report["step_s"]["quartile_1"] / 2
    # two validations of two batches; the sanity check before training counts as assembly
    assert report["evaluation_s"] >= 4 * VALIDATION_S
    assert report["assembly"]["first_batch"] >= SANITY_CHECK_S
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
    assert (tmp_path / "here" / "job.json").is_file()


def test_a_run_that_fails_says_why(tmp_path) -> None:
    class Failing(Sleeper):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(JobReport(), tmp_path, Failing())
    report = json.loads((tmp_path / "job.json").read_text())
    assert (report["status"], report["error"], report["steps"]) == ("failed", "RuntimeError: no", 0)
    assert report["job_completion_s"] == pytest.approx(sum(report[part] for part in PARTS))


def test_a_test_that_fails_after_the_fit_is_the_status_too(tmp_path) -> None:
    """The report once said `finished`, with an error."""

    class Untested(Sleeper):
        is_broken = False

        def on_fit_start(self):
            if self.is_broken:
                raise RuntimeError("broken")

        def test_step(self, batch, batch_idx):
            raise RuntimeError("boom")

    report, module = JobReport(), Untested()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[report],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = DataLoader(torch.ones(2, 3), batch_size=2)
    trainer.fit(module, data)
    finished = json.loads((tmp_path / "job.json").read_text())
    assert finished["status"] == "finished"
    with pytest.raises(RuntimeError, match="boom"):
        trainer.test(module, data)
    failed = json.loads((tmp_path / "job.json").read_text())
    assert failed == {**finished, "status": "failed", "error": "RuntimeError: boom"}
    module.is_broken = True  # a second fit of the same callback, which fails as it begins
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, data)
    again = json.loads((tmp_path / "job.json").read_text())
    assert (again["status"], again["steps"]) == ("failed", 0)


class Slow(ModelCheckpoint):
    """Saves every other step, and takes its time."""

    def _save_checkpoint(self, trainer, filepath) -> None:
        time.sleep(SAVE_S)
        super()._save_checkpoint(trainer, filepath)


class Preempted(Sleeper):
    """Stops in its sixth step, when the last checkpoint is of the fourth."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def test_work_done_again_after_a_preemption(tmp_path, capsys) -> None:
    """The second attempt writes elsewhere: the checkpoint knows where the first one wrote."""
    saves = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    options = {"max_epochs": 3, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    first = JobReport()
    callbacks = [Slow(tmp_path / "saved", **saves)]
    with pytest.raises(SystemExit):
        fit(first, tmp_path / "first", Preempted(), callbacks=callbacks, **options)
    assert (first.report["status"], first.report["steps"]) == ("interrupted", 5)
    assert first.report["checkpoint_s"] >= 2 * SAVE_S
    logger = RecordingLogger()
    second = JobReport(every_n_steps=2)
    fit(
        second,
        tmp_path / "second",
        callbacks=[Slow(tmp_path / "saved", **saves)],
        ckpt_path=tmp_path / "saved" / "step=4.ckpt",
        logger=logger,
        **options,
    )
    report = second.report
    assert (report["attempt"], report["from_step"], report["lost_steps"]) == (2, 4, 1)
    assert report["steps"] == 8  # of 12 in three epochs
    assert report["repeated_s"] >= STEP_S
    assert report["training_s"] >= 7 * STEP_S
    assert report["checkpoint_s"] >= 4 * SAVE_S
    assert report["since_first_start_s"] >= report["job_completion_s"] - report["assembly_s"]
    assert report["job_completion_s"] == pytest.approx(sum(report[part] for part in PARTS))
    assert "steps done again" in capsys.readouterr().out
    live = [row for _, row in logger.history if "job/elapsed_s" in row]
    assert len(live) == 5  # every other step, and the end
    for row in live:
        assert row["job/elapsed_s"] == pytest.approx(sum(row[f"job/{part}"] for part in PARTS))
        shares = [value for name, value in row.items() if name.startswith("job/share_")]
        assert sum(shares) == pytest.approx(1.0)
    left = [row["job/left_s"] for row in live]
    work_s = sum(
        live[1][f"job/{p.value}_s"] for p in Part if p not in (Part.ASSEMBLY, Part.CLEAN_UP)
    )
    assert left[1] == pytest.approx(work_s / 4 * (12 - 8))
    assert left[-2:] == [0.0, 0.0]


def test_rates_of_the_replica_and_of_all(tmp_path) -> None:
    class Counted(Sleeper):
        flops_per_batch = 4_000

        def tokens_per_batch(self, batch):
            return torch.tensor(10)

    callback, logger = JobReport(every_n_steps=4, peak_flops=1e6), RecordingLogger()
    fit(callback, tmp_path, Counted(), logger=logger)
    rows = [row for _, row in logger.history if "throughput/mfu" in row]
    assert len(rows) == 2
    for row in rows:
        steps_per_s = row["throughput/batches_per_s"]
        assert row["throughput/samples_per_s"] == pytest.approx(2 * steps_per_s)
        assert row["throughput/tokens_per_s"] == pytest.approx(10 * steps_per_s)
        assert row["throughput/mfu"] == pytest.approx(4_000 * steps_per_s / 1e6)
        assert 0 < steps_per_s <= 1 / STEP_S
    report = callback.report
    assert report["tokens_per_s"] == pytest.approx(80 / report["training_s"])
    assert report["mfu"] == pytest.approx(8 * 4_000 / 1e6 / report["training_s"])


def test_progress_is_written_now_and_then_and_read_back(tmp_path) -> None:
    attempt = Attempt(started=1.0, ended=2.0, from_step=0, to_step=7, parts_s={"training": 1.0})
    progress, file = Progress(attempts=[attempt]), ProgressFile(tmp_path / "a" / "progress.json")
    file.write(progress)
    attempt.to_step = 8
    file.write(progress)  # too early
    assert Progress.read(file.path).attempts[0].to_step == 7
    file.write(progress, now=True)
    assert Progress.read(file.path) == progress
    file.path.write_text("{torn")
    assert Progress.read(file.path) is None
    assert Progress.read(tmp_path / "none") is None


def test_an_inner_part_counts_and_the_sum_stays() -> None:
    account = JobAccount(0.0)
    account.switch(Part.TRAINING, 1.0)
    account.enter(Part.EVALUATION, 2.0)
    account.enter(Part.CHECKPOINT, 4.0)
    account.leave(7.0)
    account.leave(8.0)
    account.leave(9.0)  # of nothing
    account.move(Part.TRAINING, Part.ASSEMBLY, 0.25)
    assert list(account.seconds.values()) == [1.25, 1.75, 0.0, 3.0, 3.0, 0.0]
    assert account.elapsed_s == 9.0


def test_a_listener_leaves_the_profiler_as_it_was_in_any_order() -> None:
    heard, profiler = [], PassThroughProfiler()
    first = ActionListener(lambda a: heard.append(f"1 {a}"), lambda a: None)
    second = ActionListener(lambda a: None, lambda a: heard.append(f"2 {a}"))
    first.install(profiler)
    second.install(profiler)
    with profiler.profile("x"):
        pass
    assert heard == ["1 x", "2 x"]
    second.remove()
    with profiler.profile("y"):
        pass
    first.remove()
    assert (heard[2:], vars(profiler).get("start")) == (["1 y"], None)
    first.install(profiler)
    second.install(profiler)
    first.remove()  # the second one listens through it
    with profiler.profile("z"):
        pass
    assert heard[3:] == ["2 z"]


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
        "import runpy, sys, time; time.sleep(0.5);"
        "print(runpy.run_path(sys.argv[1])['process_age_s']())"
    )
    started = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", code, job_times.__file__], capture_output=True, text=True, check=True
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
