"""Run folders as `recipes/train.py` leaves them, without the training."""

import json
from pathlib import Path
from typing import Any

from pipeswift_lightning.drawing import Panel, page
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import simulate

STEPS = range(0, 100, 10)


def report(completion_s: float, micro_batches: int, stages: int = 2) -> dict[str, Any]:
    parts = {"assembly": 5.0, "training": completion_s - 6.0, "repeated": 0.0, "checkpoint": 0.5}
    parts |= {"evaluation": 0.25, "clean_up": 0.25}
    return {
        "status": "finished",
        "job_completion_s": completion_s,
        "queue_s": None,
        **{f"{name}_s": seconds for name, seconds in parts.items()},
        "assembly": {"process_start": 3.0, "groups": 2.0},
        "steps": 100,
        "step_s": {"quartile_1": 0.09, "median": completion_s / 100, "quartile_3": 0.2},
        "tokens_per_s": 1234.5,
        "bubble_by_stage": [0.25] * stages,
        "plan": {"schedule": "1f1b", "stages": stages, "micro_batches": micro_batches},
        "stages": stages,
        "replicas": 1,
    }


def write_run(
    folder: Path,
    overrides: list[str],
    content: dict[str, Any] | None,
    stages: int = 2,
    *,
    pruned: str | None = None,
) -> None:
    """Write a run's folder; without a report it is one that failed, or that was pruned."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {o}\n" for o in overrides))
    if content is None:
        result = {"state": "failed", "value": None, "error": "OptionError: 64 > <8>"}
        if pruned is not None:
            result |= {"state": "pruned", "error": pruned}
        (folder / "job_result.json").write_text(json.dumps(result))
        return
    (folder / "job.json").write_text(json.dumps(content))
    names = ["train/loss", "bubble/measured", *(f"bubble/stage_{s}" for s in range(stages))]
    lines = [",".join(["epoch", *names, "step"])]
    for step in STEPS:
        values = [
            "" if name == "train/loss" and step == 0 else f"{1 / (step + 1)}" for name in names
        ]
        lines.append(",".join(["0", *values, str(step)]))
    (folder / "csv").mkdir()
    (folder / "csv" / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "timelines").mkdir()
    costs = StepCosts.uniform(stages, 4, forward_s=0.01, backward_s=0.02)
    timeline = simulate(one_f_one_b(stages, 4), costs)
    text = page([Panel("measured", timeline)], title="step 90")
    (folder / "timelines" / "step_000090.html").write_text(text)


def write_sweep(folder: Path, stages: int = 2) -> None:
    """Write four members; the third is the fastest, the last has failed."""
    for number, (micro_batches, completion_s) in enumerate(((4, 16.0), (8, 12.0), (16, 11.0))):
        overrides = ["experiment=gpt_tiny", f"strategy.micro_batches={micro_batches}"]
        content = report(completion_s, micro_batches, stages)
        write_run(folder / str(number), overrides, content, stages)
    write_run(folder / "3", ["experiment=gpt_tiny", "strategy.micro_batches=64"], None)
