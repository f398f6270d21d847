"""The command that starts a job's ranks, from any process that runs the job."""

import sys
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pipeswift_lightning.strategies.hydra_job import application_command, recorded_application

LOKY = [sys.executable, "-m", "joblib.externals.loky.backend.popen_loky_posix", "--pipe", "3"]
SUBMITIT = [sys.executable, "-u", "-m", "submitit.core._submit", "folder"]


def test_a_script_is_started_again_with_its_flags_alone(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "app.py", "-m", "a=1"])
    monkeypatch.setattr(sys, "argv", ["app.py", "-m", "a=1", "-cn", "other", "--config-dir=conf"])
    monkeypatch.setattr("__main__.__spec__", None)
    path = str(Path(tmp_path, "app.py").resolve())
    assert application_command()[1:] == [path, "-cn", "other", "--config-dir=conf"]


@pytest.mark.parametrize(("started", "whose"), [(LOKY, "joblib"), (SUBMITIT, "submitit")])
def test_a_launchers_worker_needs_a_record_of_the_script(started, whose, monkeypatch) -> None:
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/app.py", "-cn", "other"])
    with recorded_application():
        monkeypatch.setattr(sys, "orig_argv", started)
        monkeypatch.setattr(sys, "argv", ["nothing"])
        assert application_command()[1:] == ["/somewhere/app.py", "-cn", "other"]
    with pytest.raises(MisconfigurationException, match=f"process of {whose}'s.*Remedy") as error:
        application_command()
    assert "\n" not in str(error.value)
