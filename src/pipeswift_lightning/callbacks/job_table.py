"""A job's report as the table that is printed."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["job_table"]

Report = Mapping[str, Any]
_PARTS = ("assembly", "training", "repeated", "checkpoint", "evaluation", "clean_up")
_WORDS = {
    "repeated": "work done again",
    "checkpoint": "checkpoint stalls",
    "clean_up": "clean-up",
    "process_start": "process start",
    "groups": "process groups",
    "first_batch": "first batch, sanity check",
}


def job_table(report: Report) -> Table:
    """Lay ``report`` out, with the stages' bubbles if they were measured."""
    table = Table(title="Job report", show_header=False, title_justify="left")
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    whole_s = report["job_completion_s"]
    table.add_row("job completion time", f"{whole_s:.1f} s", "")
    queue_s = report["queue_s"]
    known = queue_s is not None
    table.add_row("  queue", f"{queue_s:.1f} s" if known else "no scheduler", "")
    for part in _PARTS:
        seconds = report[f"{part}_s"]
        share = f"{seconds / whole_s:.1%}" if whole_s else ""
        table.add_row(f"  {_WORDS.get(part, part)}", f"{seconds:.1f} s", share)
        if part == "assembly":
            for name, value in report["assembly"].items():
                table.add_row(f"    {_WORDS.get(name, name)}", f"{value:.1f} s", "")
    _add_attempts(table, report)
    table.add_section()
    _add_speed(table, report)
    return table


def _add_attempts(table: Table, report: Report) -> None:
    if report["attempt"] == 1 and report["from_step"] == 0:
        return
    table.add_section()
    table.add_row("attempt", str(report["attempt"]), "")
    lost = report["lost_steps"]
    table.add_row("resumed at step", str(report["from_step"]), "")
    table.add_row("steps done again", "not known" if lost is None else str(lost), "")
    table.add_row("since the first attempt's start", f"{report['since_first_start_s']:.1f} s", "")


def _add_speed(table: Table, report: Report) -> None:
    table.add_row("steps", str(report["steps"]), "")
    step_ms = [f"{1e3 * s:.1f}" for s in report["step_s"].values()]
    if step_ms:
        table.add_row("step time, median", f"{step_ms[1]} ms", "")
        table.add_row("step time, quartiles", f"{step_ms[0]} to {step_ms[2]} ms", "")
    for unit in ("tokens", "samples"):
        if f"{unit}_per_s" in report:
            table.add_row(f"{unit} per second", f"{report[f'{unit}_per_s']:,.0f}", "")
    if "mfu" in report:
        table.add_row("model FLOPs utilisation", f"{report['mfu']:.1%}", "")
    for stage, bubble in enumerate(report.get("bubble_by_stage", ())):
        table.add_row(f"stage {stage}, measured bubble", f"{bubble:.1%}", "")
    if "monitor" in report:
        name, by_step = report["monitor"]["name"], report["monitor"]["by_step"]
        for step, value in by_step[:1] + by_step[1:][-1:]:
            table.add_row(f"{name}, step {step}", f"{value:.4f}", "")
