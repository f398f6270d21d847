"""What reaches each kind of logger, read back by that logger's own reader."""

import csv
import json
import posixpath
import re
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from pipeswift_lightning.callbacks import (
    BubbleMonitor,
    JobReport,
    Rebalance,
    TimelineTrace,
    VarianceMonitor,
)
from pipeswift_lightning.strategies.logged_facts import log_facts
from tests.callbacks.sleepers import Sleeps, train
from tests.callbacks.test_job_report import Sleeper
from tests.callbacks.test_job_report import fit as fit_alone
from tests.helpers.parity import RecordingLogger

STEPS = 4
SCALARS = ("job/elapsed_s", "job/share_training", "throughput/samples_per_s")
OF_STAGES = ("bubble/stage_1", "bubble/predicted", "bubble/stage_1_busy_s", "memory/stage_0_bytes")


def observers(folder: Path) -> list:
    return [
        JobReport(dirpath=folder, every_n_steps=2, peak_flops=1e12),
        BubbleMonitor(every_n_steps=2, warn_above=1.0),
        VarianceMonitor(window=STEPS),
        TimelineTrace(every_n_steps=STEPS, dirpath=folder),
        Rebalance(every_n_steps=STEPS, window=STEPS),
    ]


class StrictLogger(RecordingLogger):
    """As strict as Lightning's MLFlowLogger on MLflow 3.17, which need not be installed."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[str, str] = {}

    @property
    def experiment(self) -> SimpleNamespace:
        return SimpleNamespace(log_image=self._log_image)  # MlflowClient's asks for a run, too

    def _log_image(self, run_id: str, image: object, artifact_file: str) -> None:
        raise AssertionError("nothing knows the run")

    def log_metrics(self, metrics, step=None) -> None:
        for name in metrics:
            check_name(name)
        super().log_metrics(metrics, step)

    def log_hyperparams(self, params) -> None:
        for name, value in _flatten_dict(params).items():
            check_name(name)
            if self.parameters.setdefault(name, str(value)[:250]) != str(value)[:250]:
                raise RuntimeError(f"Changing param values is not allowed. Param with key={name!r}")


def check_name(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_/. -]+", name), name
    assert posixpath.normpath(name) == name  # as MLflow keeps it: a file in folders


def check_strict(logger: StrictLogger) -> None:
    """All names reached it, and none is the folder of another."""
    names = {name for _, row in logger.history for name in row}
    assert names >= {*SCALARS, *OF_STAGES, "variance/step_mean_s", "rebalance/step_s"}
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    assert not names & folders
    assert logger.parameters["job/plan/stages"] == "2"


def records(run: Path) -> list[dict]:
    """Read an offline run by W&B's own reader, as JSON lines."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def ended_records(run: Path) -> list[dict]:
    """Read a run once its end is on disk: W&B's own process may write it after ``finish()``."""
    for _ in range(20):
        every = records(run)
        if of_kind(every, "exit"):
            return every
        time.sleep(1)
    return every


def of_kind(every: list[dict], kind: str) -> list[dict]:
    return [record[kind] for record in every if record["type"] == kind]


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=280)
def test_offline_runs_of_a_sweep_read_back_from_wandb(tmp_path) -> None:
    """Two processes, two jobs: one run a job, in one group, with images, plan and all numbers."""
    pytest.importorskip("wandb")
    for job in range(2):
        folder = tmp_path / str(job)
        folder.mkdir(exist_ok=True)
        logger = WandbLogger(project="p", group="sweep-7", save_dir=folder, offline=True)
        strict = StrictLogger()
        loggers = [logger, strict]
        train(Sleeps(factors=(0.2, 0.2)), observers(folder), steps=STEPS, logger=loggers)
        if dist.get_rank() == 0:
            logger.experiment.finish()
            check_strict(strict)
        dist.barrier()
    if dist.get_rank() != 0:
        return
    runs = [list((tmp_path / str(job)).glob("wandb/offline-run-*")) for job in range(2)]
    assert [len(found) for found in runs] == [1, 1]
    for (run,) in runs:
        every = ended_records(run)
        told = of_kind(every, "run")[0]
        assert (told["project"], told["run_group"]) == ("p", "sweep-7")
        assert [told.get("exit_code") for told in of_kind(every, "exit")] == [0], every[-3:]
        history = [record["item"] for record in of_kind(every, "history")]
        names = {name for row in history for name in row}
        assert names >= {"train/loss", "variance/step_mean_s", *SCALARS, *OF_STAGES}
        steps = [row["trainer/global_step"] for row in history if "bubble/stage_1" in row]
        assert steps == [1, 3]
        check_picture(run, history)
        assert plan_told(every) == {"schedule": "1f1b", "stages": 2, "micro_batches": 4}


def check_picture(run: Path, history: list[dict]) -> None:
    (row,) = [row for row in history if row.get("timeline._type") == "images/separated"]
    (name,) = row["timeline.filenames"]
    assert (run / "files" / name).read_bytes().startswith(b"\x89PNG")
    assert row["timeline.width"] > 1000


def plan_told(every: list[dict]) -> dict:
    updates = [told.get("update", {}) for told in of_kind(every, "config")]
    (plan,) = [update["job"]["plan"] for update in updates if "job" in update]
    return {name: plan[name] for name in ("schedule", "stages", "micro_batches")}


def test_scalars_reach_csv_tensorboard_and_mlflow(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow 3 wants a database
    loggers = [
        CSVLogger(tmp_path, name="csv", version=""),
        TensorBoardLogger(tmp_path, name="board", version=""),
    ]
    if have_mlflow():
        loggers.append(MLFlowLogger("e", tracking_uri=f"file:{tmp_path}/mlruns"))
    fit_alone(JobReport(every_n_steps=4), tmp_path, Sleeper(), logger=loggers)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["job/elapsed_s"]]
    assert [row["step"] for row in rows] == ["3", "7", "8"]  # two reports, and the end
    expected = [float(row["job/share_training"]) for row in rows]
    assert read_board(tmp_path / "board") == pytest.approx(expected)
    if have_mlflow():
        client, run = loggers[2].experiment, loggers[2].run_id
        history = client.get_metric_history(run, "job/share_training")
        assert [m.value for m in history] == pytest.approx(expected)
        assert client.get_run(run).data.params["job/strategy"] == "SingleDeviceStrategy"


def test_a_logger_that_takes_no_other_plan_does_not_end_a_training() -> None:
    strict, after = StrictLogger(), StrictLogger()
    log_facts([strict], {"job": {"plan": {"stages": 1}}})
    with pytest.warns(UserWarning, match=r"StrictLogger does not take .*'stages': 2.*Remedy: "):
        log_facts([strict, after], {"job": {"plan": {"stages": 2}}})
    assert strict.parameters == {"job/plan/stages": "1"}
    assert after.parameters == {"job/plan/stages": "2"}


def have_mlflow() -> bool:
    try:
        import mlflow  # noqa: F401 -- only a look
    except ImportError:
        return False
    return True


def read_board(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    assert set(SCALARS) - {"throughput/samples_per_s"} <= set(board.Tags()["scalars"])
    return [event.value for event in board.Scalars("job/share_training")]
