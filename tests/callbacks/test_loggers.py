"""What reaches each kind of logger, read back by that logger's own reader."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from pipeswift_lightning.callbacks import JobReport
from pipeswift_lightning.strategies.logged_facts import log_facts
from tests.callbacks.test_job_report import Sleeper
from tests.callbacks.test_job_report import fit as fit_alone
from tests.helpers.strict_logger import StrictLogger

SCALARS = ("job/elapsed_s", "job/share_training")


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
    assert set(SCALARS) <= set(board.Tags()["scalars"])
    return [event.value for event in board.Scalars("job/share_training")]
