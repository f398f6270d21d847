"""The recipes that need no training, run as scripts within this process."""

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.mock import transformer_costs

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys):
    def _run(name: str, *arguments: str) -> str:
        argv = [name, *arguments, f"hydra.run.dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(RECIPES / name), run_name="__main__")
        return capsys.readouterr().out

    return _run


def test_plan_from_a_file_of_costs(run, tmp_path: Path) -> None:
    model = transformer_costs(4, dim=32, vocabulary=100, flops_per_s=1e9, relative_error=0.01)
    (tmp_path / "costs.json").write_text(model.to_json())
    output = run(
        "plan.py",
        f"costs={tmp_path / 'costs.json'}",
        "lengths=[90,10,20,80,30,10,60,20]",
        "micro_batches=[2,4]",
        "workload.num_stages=2",
        "workload.layout=packed",
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert output.startswith(f"plan: {plan['name']}\n")
    assert sorted(i for part in plan["micro_batches"] for i in part) == list(range(8))
    assert "micro-batches  best predicted step" in output
    assert "first come, first served: 1f1b" in output
    assert "slower" in output
    assert "<svg" in (tmp_path / "plan.html").read_text()
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_needs_nothing_but_its_mock_costs(run, tmp_path: Path) -> None:
    output = run("plan.py", "micro_batches=8", "mock_lengths.number=16", "schedules=[1f1b]")
    assert "predicted step" in output
    assert len(json.loads((tmp_path / "plan.json").read_text())["starts"]) == 4


def test_simulate_draws_each_schedule(run, tmp_path: Path) -> None:
    output = run("simulate.py", "stages=2", "micro_batches=4")
    assert "gpipe: 15.00 s, bubble 20.0 %" in output
    assert "1f1b, warm-up 2.0: 15.00 s, bubble 20.0 %" in output
    costs = StepCosts(forward_s=[[1, 3, 1]], backward_s=[[2, 2, 2]])
    (tmp_path / "step.json").write_text(costs.to_json())
    output = run("simulate.py", f"costs={tmp_path / 'step.json'}", "schedules=[{name: gpipe}]")
    assert output.startswith("gpipe: 11.00 s, bubble 0.0 %\nrank 0 |F0")
