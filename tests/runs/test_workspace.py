import json
import re
import sys

import pytest

from pipeswift_lightning.callbacks.bubble_report import BubbleReport
from pipeswift_lightning.callbacks.job_account import Part
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.runs.panels import SECTIONS, TIMELINE
from pipeswift_lightning.runs.workspace import (
    WorkspaceError,
    build_workspace,
    describe_workspace,
)
from tests.callbacks.test_bubble_monitor import sums_of


def test_panels_show_what_the_callbacks_log() -> None:
    timeline = simulate(one_f_one_b(3, 4), StepCosts.uniform(3, 4, forward_s=1.0, backward_s=2.0))
    logged = set(BubbleReport.of(one_f_one_b(3, 4), sums_of(timeline)).scalars("bubble"))
    logged |= {f"job/share_{part.value}" for part in Part} | {"job/left_s", "throughput/mfu"}
    panels = [panel for section in SECTIONS for panel in section.panels]
    shown = [name for panel in panels for name in panel.metrics(logged)]
    assert len(shown) == len(set(shown))
    hidden = logged - set(shown)  # each share of each stage: in the table of metrics only
    assert all(re.fullmatch(r"bubble/(predicted_)?share_\w+_stage_\d", name) for name in hidden)


def test_the_workspace_of_wandb_is_built_without_an_account() -> None:
    pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
    text = describe_workspace(build_workspace(entity="me", project="p"))
    view = json.loads(text)
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    names = [section.title for section in SECTIONS]
    assert [s["name"] for s in sections] == [*names, "Timelines", "Plan and configuration"]
    patterns = [p["config"]["metricRegex"] for s in sections[:-2] for p in s["panels"]]
    assert patterns == [f"^{panel.pattern}$" for s in SECTIONS for panel in s.panels]
    assert sections[-2]["panels"][0]["config"]["mediaKeys"] == [TIMELINE]
    assert view["spec"]["section"]["runSets"][0]["grouping"] == [
        {"section": "run", "name": "group"}
    ]
    assert (view["entity"], view["project"]) == ("me", "p")


def test_without_the_library_the_remedy_is_told(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(
        WorkspaceError, match=r"Rule: .*pip install 'pipeswift-lightning\[dashboard"
    ):
        build_workspace(entity="me", project="p")
