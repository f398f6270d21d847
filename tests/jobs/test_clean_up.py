"""A job ends with all that it has made."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pipeswift_lightning.jobs.clean_up import leaving_nothing_behind
from pipeswift_lightning.strategies.launcher import reap


def test_environment_children_and_runs_end_with_a_job_that_fails(monkeypatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    finished = []
    wandb = SimpleNamespace(run=object(), finish=lambda exit_code: finished.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    child = subprocess.Popen([sys.executable, "-c", "pass"])

    def job() -> None:
        with leaving_nothing_behind() as running:
            strategy = SimpleNamespace(launcher=SimpleNamespace(procs=[child]))
            running.trainer = SimpleNamespace(strategy=strategy)
            os.environ["LOCAL_RANK"] = "0"
            os.environ["KEPT"] = "changed"
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="own"):
        job()
    assert child.returncode == 0
    assert (os.environ["KEPT"], "LOCAL_RANK" in os.environ) == ("before", False)
    assert finished == [1]


def test_a_child_that_stays_is_killed_and_told(capfd) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reap([child], limit_s=0.1)
    assert child.returncode == -9
    assert f"pid {child.pid} has not ended" in capfd.readouterr().err
