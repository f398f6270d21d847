"""Draw the predicted timelines of schedules, one below the other, from costs or none.

Usage:
    python recipes/simulate.py                                # equal micro-batches
    python recipes/simulate.py stages=8 micro_batches=12 backward_s=3
    python recipes/simulate.py costs=step.json                # StepCosts.to_json() wrote it
    python recipes/simulate.py costs=profile.json length=512  # recipes/profile.py wrote it
    python recipes/simulate.py order=searched link.latency_s=0.5
    python recipes/simulate.py 'schedules=[{name: 1f1b, warm_up: 2.0}, {name: gpipe}]'

Writes ``simulate.html``, and ``simulate.png`` if matplotlib is installed, to the run's folder.
"""

from importlib.util import find_spec
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipeswift_lightning.drawing.page import page
from pipeswift_lightning.drawing.panel import Panel
from pipeswift_lightning.drawing.png import png
from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.refusal import refusing
from pipeswift_lightning.plan.report import (
    draw_together,
    equal_costs,
    read_step_costs,
    schedule_timelines,
)


@hydra.main(version_base="1.3", config_path="../conf", config_name="simulate")
@refusing("simulate")
def main(cfg: DictConfig) -> float:
    """Draw, and return the shortest predicted makespan, which a sweep compares."""
    settings = instantiate(cfg, _convert_="all")
    size = settings["stages"], settings["micro_batches"]
    costs = equal_costs(*size, forward_s=settings["forward_s"], backward_s=settings["backward_s"])
    if settings["costs"] is not None:
        text, shape = Path(settings["costs"]).read_text(), (settings["samples"], settings["length"])
        costs = read_step_costs(text, *size, shape=shape)
    how = {name: settings[name] for name in ("order", "link", "overlap")}
    timelines = schedule_timelines(costs, settings["schedules"], **how)
    print(draw_together(timelines, width=settings["width"]))
    folder = Path(settings["paths"]["output_dir"])
    panels = [Panel(name, timeline) for name, timeline in timelines.items()]
    (folder / "simulate.html").write_text(page(panels, title="predicted steps"))
    if find_spec("matplotlib") is not None:
        (folder / "simulate.png").write_bytes(png(panels))
    return float(min(timeline.makespan_s for timeline in timelines.values()))


if __name__ == "__main__":
    with application("simulate"):
        main()
