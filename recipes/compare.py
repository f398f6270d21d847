"""Compare the members of a sweep: what differs, what a step and the whole job took, which is best.

Usage:
    python recipes/train.py -m strategy.micro_batches=4,8,16,32     # the sweep
    python recipes/compare.py sweep=logs/train/multiruns/<start>    # its table, and compare.png
    python recipes/compare.py sweep=FOLDER target=table.png

Members that failed are listed with their error. The picture needs the extra ``plot``.
"""

from importlib.util import find_spec
from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.refusal import refusing
from pipeswift_lightning.runs.run_folder import find_runs
from pipeswift_lightning.runs.sweep import SweepTable
from pipeswift_lightning.runs.sweep_picture import sweep_png


@hydra.main(version_base="1.3", config_path="../conf", config_name="compare")
@refusing("compare")
def main(cfg: DictConfig) -> None:
    """Print the table, and draw it."""
    table = SweepTable.of(find_runs([Path(cfg.sweep)]))
    Console().print(table.render())
    if find_spec("matplotlib") is not None:
        target = Path(cfg.target or Path(cfg.sweep) / "compare.png")
        target.write_bytes(sweep_png(table))
        print(target)


if __name__ == "__main__":
    with application("compare"):
        main()
