"""The recipes that read runs back, in this process: they start in a moment."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.runs.folders import write_sweep

RECIPES = Path(__file__).parents[2] / "recipes"


def run(monkeypatch, capsys, recipe: str, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [recipe, *arguments])
    runpy.run_path(str(RECIPES / recipe), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Run in a folder of its own, in which the recipes leave nothing but what they say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write_sweep(tmp_path / "sweep")
    return tmp_path


def test_compare(monkeypatch, capsys, elsewhere) -> None:
    out = run(monkeypatch, capsys, "compare.py", "sweep=sweep")
    assert "least 11.0" in out
    assert "OptionError: 64 > <8>" in out
    assert (elsewhere / "sweep" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["sweep"]


def test_dashboard(monkeypatch, capsys, elsewhere) -> None:
    out = run(monkeypatch, capsys, "dashboard.py", "runs=[sweep/0,sweep/2]", "title=two")
    assert "dashboard.html: 2 runs" in out
    assert "<title>two</title>" in (elsewhere / "dashboard.html").read_text()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["dashboard.html", "sweep"]


def test_workspace_is_printed(monkeypatch, capsys, elsewhere) -> None:
    pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
    out = run(monkeypatch, capsys, "dashboard.py", "entity=me", "project=p", "dry_run=true")
    assert json.loads(out)["displayName"] == "pipeline"
    assert sorted(path.name for path in elsewhere.iterdir()) == ["sweep"]
