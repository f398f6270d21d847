"""One run or many as one self-contained page: inline SVG, hover and zoom, nothing loaded."""

import base64
import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from pipeswift_lightning.runs.panels import SECTIONS
from pipeswift_lightning.runs.run_folder import RunFolder, differing_keys

__all__ = ["dashboard"]

_MOST_POINTS = 400
# Okabe and Ito's colours, which most colour-blind people tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d00", "#555555")
_PARTS = {
    "queue": "#bbbbbb",
    "assembly": "#56b4e9",
    "training": "#009e73",
    "repeated": "#d55e00",
    "checkpoint": "#f0e442",
    "evaluation": "#cc79a7",
    "clean_up": "#555555",
}


def dashboard(runs: Sequence[RunFolder], *, title: str) -> str:
    """Return the HTML page.

    A table of the runs, each one's job completion time by parts, the panels of `SECTIONS` with a
    curve a run and metric, and the last timeline of each run. Pointing at a curve's diagram shows
    the values of a step; the wheel zooms (all diagrams alike), dragging moves, a double click shows
    everything again; ticks in the table choose the runs.

    Args:
        runs: The runs, in the table's order.
        title: Of the page.
    """
    sections = [
        {"title": s.title, "panels": [{"title": p.title, "pattern": p.pattern} for p in s.panels]}
        for s in SECTIONS
    ]
    keys = differing_keys(runs)
    content = {
        "parts": _PARTS,
        "sections": sections,
        "runs": [
            {"color": _COLORS[i % len(_COLORS)], "choices": _choices(run, keys), **_content(run)}
            for i, run in enumerate(runs)
        ],
    }
    # "</script>" within a string would end the script.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    template = Template((files(__package__) / "dashboard.html").read_text("utf-8"))
    return template.substitute(title=escape(title), data=data)


def _content(run: RunFolder) -> dict[str, Any]:
    return {
        "name": run.name,
        "status": run.status,
        "error": run.error,
        "facts": _facts(run.report),
        "parts": {p: run.report[f"{p}_s"] for p in _PARTS if run.report.get(f"{p}_s") is not None},
        "assembly": run.report.get("assembly", {}),
        "series": {name: _thinned(points) for name, points in run.series.items()},
        "timeline": _timeline(run),
    }


def _choices(run: RunFolder, keys: Sequence[str]) -> str:
    """Return what sets the run apart; of a single run, all that its command line changed."""
    return " ".join(f"{k}={v}" for k, v in run.choices.items() if k in keys or not keys)


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the table that are known."""
    plan, step_s = report.get("plan", {}), report.get("step_s", {})
    bubbles = report.get("bubble_by_stage")
    facts = {
        "stages": report.get("stages"),
        "replicas": report.get("replicas"),
        "micro-batches": plan.get("micro_batches"),
        "schedule": plan.get("schedule"),
        "steps": report.get("steps"),
        "step, ms": f"{1e3 * step_s['median']:.1f}" if step_s else None,
        "bubble": f"{statistics.fmean(bubbles):.1%}" if bubbles else None,
        "tokens/s": f"{report['tokens_per_s']:,.0f}" if "tokens_per_s" in report else None,
        "MFU": f"{report['mfu']:.1%}" if "mfu" in report else None,
        "job completion, s": f"{report['job_completion_s']:.1f}" if report else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return at most so many points, among them the first and the last."""
    if len(points) > _MOST_POINTS:
        last = len(points) - 1
        kept = sorted({round(i * last / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})
        points = [points[i] for i in kept]
    return [[step, float(f"{value:.6g}")] for step, value in points]


def _timeline(run: RunFolder) -> dict[str, str] | None:
    """Return the last timeline: its page, with hover and zoom of its own, or its picture."""
    pages, pictures = run.timelines(".html"), run.timelines(".png")
    if pages:
        return {"name": pages[-1].stem, "page": pages[-1].read_text("utf-8")}
    if pictures:
        data = base64.b64encode(pictures[-1].read_bytes()).decode()
        return {"name": pictures[-1].stem, "picture": f"data:image/png;base64,{data}"}
    return None
