"""A mistake in a recipe's arguments is one line with value, rule and remedy, and no traceback."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from pipeswift_lightning.jobs.settings import SETTINGS

RECIPES = Path(__file__).parents[2] / "recipes"

MISTAKES: dict[str, list[tuple[str, str]]] = {
    "plan": [
        ("costs=missing.json", "costs='missing.json' is not allowed. Rule: costs is a file"),
        ("costs=other.json", "this is no cost model"),
        ("micro_batches=0", "micro_batches=0"),
        ("micro_batches=1000", "cannot split 64 samples into 1000 micro-batches"),
        ("lengths=5", "lengths=5"),
        ("schedules=1f1b", "schedules='1f1b'"),
        ("schedules=[1f1b,forward_only]", "schedules=['1f1b', 'forward_only']"),
        ("schedules=[]", "schedules=[]"),
        ("workload.order=shortest", "Remedy: did you mean 'shortest_first'?"),
        ("workload.layout=paded", "Remedy: did you mean 'padded'?"),
        ("workload.num_stages=400", "cannot split 26 layers into 400 stages"),
        ("workload.slowdown=[1,2]", "slowdown has 2 entries"),
        ("mock_link.latency_s=-1", "mock_link.latency_s=-1"),
        ("widht=9", "widht: there is no such key. Did you mean width?"),
    ],
    "simulate": [
        ("order=serched", "Remedy: did you mean 'searched'?"),
        ("stages=x", "stages='x'"),
        ("costs=folder", "costs='folder'"),
        ("costs=other.json", "this is no cost model"),
        ("costs=text.json", "these are no costs"),
        ("costs=torn.json", "these are no costs"),
        ("schedules=[{name: 1f1b, warm_up: 3.0}]", "warm_up=3.0"),
        ("schedules=[{name: gpipe, warm_up: 2.0}]", "the schedule is 'gpipe'"),
        ("schedules=[{nme: gpipe}]", "schedules=[{'nme': 'gpipe'}]"),
        ("schedules=[{name: 1f1b, warm_up: x}]", "'warm_up': 'x'"),
    ],
    "reshard": [
        ("target=a.ckpt", "source=None"),
        ("source=missing target=a.ckpt", "source='missing'"),
        ("source=folder target=a.ckpt", "is no checkpoint in shards"),
        ("source=folder target=a.bin", "is of no known kind"),
        ("sorce=folder", "Did you mean source?"),
    ],
    "compare": [
        ("sweep=missing", "sweep='missing'"),
        ("sweep=folder", "holds no run"),
        ("sweep=folder target=no/where.png", "target='no/where.png'"),
    ],
    "dashboard": [
        ("runs=missing", "missing holds no run"),
        ("runs=5", "runs=5"),
        ("runs=[folder]", "holds no run"),
        ("runs=folder target=no/where.html", "target='no/where.html'"),
        ("entity=me dry_run=maybe", "dry_run='maybe'"),
        ("run=folder", "Did you mean runs or dry_run?"),
    ],
    "profile": [
        ("profile.samples=[0]", "profile.samples=[0]"),
        ("profile.options.repeats=x", "profile.options.repeats='x'"),
        ("trainer.max_stps=3", "Did you mean trainer.max_steps"),
        ("experiment=gpt_tiny profile.network=nothing", "network='nothing' is no module"),
        ("experiment=gpt_tiny data.path=missing", "no text to train on: missing does not exist"),
        ("profile.path=folder", "profile.path='folder'"),
    ],
}


@pytest.mark.parametrize("recipe", SETTINGS)
def test_it_is_one_line_and_exit_code_2(recipe: str, tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "text.json").write_text("none")
    (tmp_path / "torn.json").write_text('{"forward_s": [[1]], "backward": [[1]]}')
    monkeypatch.chdir(tmp_path)
    for arguments, words in MISTAKES[recipe]:
        given = arguments.split(" ") if "{" not in arguments else [arguments]
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *given])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
        said = [line for line in capfd.readouterr().err.splitlines() if _is_ours(line)]
        assert ended.value.code == 2, arguments
        assert len(said) == 1, said
        assert said[0].startswith("error: "), said
        assert words in said[0], said
        typo = "there is no such key" in said[0]
        assert typo or (" Rule: " in said[0] and " Remedy: " in said[0]), said


def _is_ours(line: str) -> bool:
    """Whether it is neither Lightning's nor a warning."""
    known = ("Seed set", "GPU available", "TPU available", "HPU available", "💡", "INFO", "[rank")
    return bool(line.strip()) and not line.startswith(known)


def test_a_whole_traceback_can_be_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["plan.py", "micro_batches=0"])
    with pytest.raises(ValueError, match="micro_batches=0"):
        runpy.run_path(str(RECIPES / "plan.py"), run_name="__main__")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_every_recipe_with_settings_is_tried() -> None:
    assert MISTAKES.keys() == SETTINGS.keys()
