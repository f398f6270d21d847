"""Mistakes on the command line end in one line that names the likely right word."""

import os
import signal
import sys
from pathlib import Path

import hydra
import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from pipeswift_lightning.jobs.application import _wait_for_the_end_of, application

CONF = str(Path(__file__).parents[2] / "conf")


def started(monkeypatch, tmp_path, *arguments: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])

    @hydra.main(version_base="1.3", config_path=CONF, config_name="train")
    def main(cfg) -> None:
        raise AssertionError("composed")

    with application("train"):
        main()


MISTAKES = {
    "trainer.max_step=5": "trainer.max_step: there is no such key. Did you mean trainer.max_steps",
    "experimnt=gpt_tiny": "experimnt: there is no such key. Did you mean experiment?",
    "strategy=pipswift": "strategy=pipswift: there is no such option. Did you mean "
    "strategy=pipeswift or strategy=pipeswift_planned? There are: auto, ddp, pipeswift, ",
    "experiment=gpt_tinny": "Did you mean experiment=gpt_tiny",
    "hydra.swep.dir=x": "hydra.swep: there is no such key. Did you mean hydra.sweep",
    "zzzz=1": "zzzz: there is no such key. To add a new one, write +zzzz=1",
    "trainer.devices=[1,": "trainer.devices=[1,",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy(mistake, monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        started(monkeypatch, tmp_path, mistake)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert MISTAKES[mistake] in said
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_a_key_of_the_chosen_option_is_known(monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        started(monkeypatch, tmp_path, "model=hf_causal", "model.auto_clas=X")
    assert "Did you mean model.auto_class" in capsys.readouterr().err


def test_in_a_sweep_nothing_starts(monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        started(monkeypatch, tmp_path, "-m", "strategy=auto,dpp")
    assert "Did you mean strategy=ddp" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.log"))


def test_a_job_ends_with_its_sweep(monkeypatch, capsys) -> None:
    """A sweep that was killed once left its job running."""
    parents = iter([7, 7, 1])
    sent = []
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    _wait_for_the_end_of(7, poll_s=0.0)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert "the sweep (pid 7) is gone" in capsys.readouterr().err


def test_the_jobs_own_errors_keep_their_traceback(monkeypatch, tmp_path) -> None:
    with pytest.raises(AssertionError, match="composed"):
        started(monkeypatch, tmp_path, "hydra.run.dir=run")
    assert '"failed"' in (tmp_path / "run" / "job_result.json").read_text()


def test_an_error_of_a_constructor_is_raised_with_its_cause(capsys) -> None:
    """Hydra's error about it is one of those that are shown as one line."""
    with pytest.raises(InstantiationException) as raised, application("train"):
        instantiate({"_target_": "fractions.Fraction", "_args_": [1, 0]})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("full", [False, True])
def test_a_value_that_is_refused_is_one_line_too(full, monkeypatch, tmp_path, capsys) -> None:
    if full:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "strategy.micro_batches=-1"])
    monkeypatch.chdir(tmp_path)

    @hydra.main(version_base="1.3", config_path=CONF, config_name="train")
    def main(cfg) -> None:
        instantiate(cfg.strategy)

    with pytest.raises(InstantiationException if full else SystemExit) as ended, application():
        main()
    if full:
        return
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "error: PipeSwiftStrategy(micro_batches=-1) is not allowed. Rule: " in said
    assert len(said.splitlines()) <= 2, "Hydra may name the overrides before"
