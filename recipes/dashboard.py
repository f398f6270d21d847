"""Show run folders as one page that needs no account and no network, or a workspace in W&B.

Usage:
    python recipes/dashboard.py                              # all runs in logs/: dashboard.html
    python recipes/dashboard.py runs=RUN target=run.html     # one run, or the folder of a sweep
    python recipes/dashboard.py 'runs=[RUN, OTHER_RUN]'      # beside each other
    python recipes/dashboard.py entity=ME dry_run=true       # print W&B's workspace; no account
    python recipes/dashboard.py entity=ME project=P          # save it; needs an account

The page reads ``job.json``, ``metrics.csv`` (``logger=csv``) and the timelines of each run.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.refusal import refusing
from pipeswift_lightning.runs.dashboard import dashboard
from pipeswift_lightning.runs.run_folder import find_runs
from pipeswift_lightning.runs.workspace import build_workspace, describe_workspace


@hydra.main(version_base="1.3", config_path="../conf", config_name="dashboard")
@refusing("dashboard")
def main(cfg: DictConfig) -> None:
    """Write the page, or build the workspace."""
    if cfg.entity is not None:
        workspace = build_workspace(entity=cfg.entity, project=cfg.project)
        if cfg.dry_run:
            print(describe_workspace(workspace))
        else:
            workspace.save()
        return
    paths = [cfg.runs] if isinstance(cfg.runs, str) else list(cfg.runs)
    runs = find_runs(map(Path, paths))
    Path(cfg.target).write_text(dashboard(runs, title=cfg.title), encoding="utf-8")
    print(f"{cfg.target}: {len(runs)} runs")


if __name__ == "__main__":
    with application("dashboard"):
        main()
