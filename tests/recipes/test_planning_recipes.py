"""The recipes that need no training, run as scripts within this process."""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.mock import transformer_costs
from pipeswift_lightning.plan.profile import CostProfile

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
    drawn = (tmp_path / "plan.html").read_text()
    lengths = [90, 10, 20, 80, 30, 10, 60, 20]
    for number, part in enumerate(plan["micro_batches"]):
        tokens = sum(lengths[i] for i in part)
        assert f'data-m="{number}" data-samples="{len(part)}" data-tokens="{tokens}"' in drawn
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_needs_nothing_but_its_mock_costs(run, tmp_path: Path) -> None:
    output = run("plan.py", "micro_batches=8", "mock_lengths.number=16", "schedules=[1f1b]")
    assert "predicted step" in output
    assert len(json.loads((tmp_path / "plan.json").read_text())["starts"]) == 4


def test_prediction_is_planned_by_the_mean_completion(run, tmp_path: Path) -> None:
    settings = ["micro_batches=8", "mock_lengths.number=16", "schedules=[forward_only]"]
    means = {}
    for order in ("shortest_first", "heaviest_first"):
        output = run("plan.py", *settings, f"workload.order={order}")
        means[order] = re.search(r"is done after ([\d.]+) ms, on average", output)
        assert means[order] is not None, output
    shortest, heaviest = (float(found[1]) for found in means.values() if found)
    assert shortest < heaviest
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"] == "forward_only"


def test_simulate_draws_each_schedule(run, tmp_path: Path) -> None:
    output = run("simulate.py", "stages=2", "micro_batches=4")
    assert "gpipe: 15.00 s, bubble 20.0 %" in output
    assert "1f1b, warm-up 2.0: 15.00 s, bubble 20.0 %" in output
    costs = StepCosts(forward_s=[[1, 3, 1]], backward_s=[[2, 2, 2]])
    (tmp_path / "step.json").write_text(costs.to_json())
    output = run("simulate.py", f"costs={tmp_path / 'step.json'}", "schedules=[{name: gpipe}]")
    assert output.startswith("gpipe: 11.00 s, bubble 0.0 %\nrank 0 |F0")


@pytest.mark.slow
def test_a_profile_is_measured_drawn_planned_and_simulated(run, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "profile.json"
    arguments = (
        "experiment=gpt_tiny",
        f"profile.path={path}",
        "profile.samples=[1,2]",
        "profile.lengths=[8,32]",
        "profile.options.repeats=1",
    )
    output = run("profile.py", *arguments)
    assert "4 layers, 2 samples of 32 tokens" in output
    assert "shapes that the fit had not seen" in output
    profile = CostProfile.from_json((tmp_path / "profile.json").read_text())
    assert profile.shapes == ((1, 8), (1, 32), (2, 8), (2, 32))
    assert profile.layers[0].samples[-1].output_bytes == 2 * 32 * 32 * 4
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    run("profile.py", *arguments)  # not measured again
    assert CostProfile.from_json(path.read_text()) == profile
    lengths = "lengths=[8,8,16,32]"
    output = run("plan.py", f"costs={path}", lengths, "micro_batches=2", "workload.num_stages=2")
    assert "layers of each stage: 0-" in output
    output = run("simulate.py", f"costs={path}", "stages=2", "micro_batches=3", "length=16")
    assert output.count("rank 1 |") == 3


def test_the_profiling_recipe_does_not_hide_the_standard_library() -> None:
    """A script's folder is first on the path, so `import profile` finds the recipe of that name."""
    code = "import cProfile, profile; print(profile.Profile.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=RECIPES, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Profile\n"
