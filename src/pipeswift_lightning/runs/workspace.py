"""W&B's workspace of these panels, as code (extra ``dashboard``)."""

import json
from typing import Any

from pipeswift_lightning.runs.panels import SECTIONS, TIMELINE

__all__ = ["WorkspaceError", "build_workspace", "describe_workspace"]

_COLUMNS = ("job/elapsed_s", "bubble/measured", "bubble/step_s", "throughput/tokens_per_s")


class WorkspaceError(RuntimeError):
    """A workspace that cannot be built here."""


def build_workspace(
    *, entity: str, project: str, name: str = "pipeline", grouped: bool = True
) -> Any:
    """Return a `wandb_workspaces.workspaces.Workspace`; to save it needs an account.

    Args:
        entity: The user or team that it is for.
        project: The project of the runs.
        name: Of the workspace.
        grouped: Whether runs are grouped by sweep.

    Raises:
        WorkspaceError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2.interface as wr
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        message = (
            "a W&B workspace needs wandb-workspaces, which is not installed. Rule: dashboards in "
            "W&B are an extra. Remedy: pip install 'pipeswift-lightning[dashboard]', or the local "
            "page, which needs nothing: python recipes/dashboard.py runs=logs"
        )
        raise WorkspaceError(message) from error
    sections = [
        ws.Section(
            name=section.title,
            panels=[
                wr.LinePlot(title=p.title, x="trainer/global_step", metric_regex=f"^{p.pattern}$")
                for p in section.panels
            ],
            is_open=True,
        )
        for section in SECTIONS
    ]
    pictures: list[Any] = [wr.MediaBrowser(title="timelines", media_keys=[TIMELINE])]
    sections.append(ws.Section(name="Timelines", panels=pictures, is_open=True))
    comparison: list[Any] = [wr.RunComparer(diff_only="split")]
    sections.append(ws.Section(name="Plan and configuration", panels=comparison, is_open=True))
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="trainer/global_step"),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")] if grouped else [],
            pinned_columns=["run:displayName", *(f"summary:{name}" for name in _COLUMNS)],
        ),
    )


def describe_workspace(workspace: Any) -> str:
    """Return what would be sent to W&B, as JSON."""
    content = workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(content, indent=2)
