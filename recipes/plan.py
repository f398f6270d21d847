"""Plan a step from a cost model, without a GPU: what would run, how fast, and what was rejected.

Usage:
    python recipes/plan.py                                     # a mock transformer on four stages
    python recipes/plan.py costs=profile.json                  # as recipes/profile.py wrote it
    python recipes/plan.py lengths=[9,4,7,2] micro_batches=[2,4]
    python recipes/plan.py workload.layout=packed workload.num_stages=8
    python recipes/plan.py schedules=[forward_only] workload.order=shortest_first  # prediction
    python recipes/plan.py --cfg job                           # show the configuration, run nothing

Prints the plan and its predicted timeline beside that of first come, first served; writes both to
the run's folder: ``plan.json``, ``plan.html`` and, if matplotlib is installed, ``plan.png``.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipeswift_lightning.drawing.choice_panels import choice_panels
from pipeswift_lightning.drawing.page import page
from pipeswift_lightning.drawing.png import png
from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.refusal import refusing
from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.report import choice_timelines, describe_choice, draw_together
from pipeswift_lightning.plan.search import choose_plan


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
@refusing("plan")
def main(cfg: DictConfig) -> float:
    """Plan, and return the predicted seconds a step, which a sweep compares."""
    settings = instantiate(cfg, _convert_="all")
    model = settings["mock_costs"]
    if settings["costs"] is not None:
        model = CostModel.from_json(Path(settings["costs"]).read_text())
    lengths = settings["mock_lengths"] if settings["lengths"] is None else settings["lengths"]
    link = settings["link"] or model.link or settings["mock_link"]
    workload = settings["workload"](model=model, lengths=lengths, link=link)
    numbers, schedules = settings["micro_batches"], settings["schedules"]
    choice = choose_plan(workload, num_micro_batches=numbers, schedules=schedules)
    timelines = choice_timelines(choice, workload)
    print(describe_choice(choice, workload))
    print(f"\n{draw_together(timelines, width=settings['width'])}")
    folder = Path(settings["paths"]["output_dir"])
    (folder / "plan.json").write_text(json.dumps(choice.chosen.summary(), indent=2) + "\n")
    panels = choice_panels(choice, workload)
    (folder / "plan.html").write_text(page(panels, title="predicted step"))
    if find_spec("matplotlib") is not None:
        (folder / "plan.png").write_bytes(png(panels))
    return choice.chosen.step_s


if __name__ == "__main__":
    with application("plan"):
        main()
