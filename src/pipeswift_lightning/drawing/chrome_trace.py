"""Timelines in Chrome's trace format, which https://ui.perfetto.dev opens too."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeswift_lightning.drawing.panel import NAMES, Panel, label
from pipeswift_lightning.plan.timeline import Event, Timeline
from pipeswift_lightning.plan.transfers import transfers

__all__ = ["chrome_trace", "write_chrome_trace"]

_MICROSECONDS = 1e6


def chrome_trace(panels: Sequence[Panel]) -> dict[str, Any]:
    """Return the trace: a process a panel, a thread a rank, an arrow a message.

    Times are microseconds; 0 is each panel's first computation (Perfetto shows what is before it).
    """
    records: list[dict[str, Any]] = []
    next_flow = 0
    for process, panel in enumerate(panels):
        records.append(_name("process_name", process, 0, panel.title))
        records.append(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": process,
                "args": {"sort_index": process},
            }
        )
        records += [
            _name("thread_name", process, rank, f"stage {rank}")
            for rank in range(panel.timeline.num_ranks)
        ]
        events = panel.events()
        records += [_slice(event, process, panel) for event in events]
        for transfer in transfers(Timeline(events, panel.timeline.num_ranks)):
            records += _flow(transfer.made, transfer.used, process, next_flow)
            next_flow += 1
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, panels: Sequence[Panel]) -> None:
    """Write the trace, gzipped; equal panels give equal bytes."""
    text = json.dumps(chrome_trace(panels), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(event: Event, process: int, panel: Panel) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": label(event) or NAMES[event.kind],
        "cat": event.kind.value,
        "pid": process,
        "tid": event.rank,
        "ts": round(_MICROSECONDS * event.start_s, 3),
        "dur": round(_MICROSECONDS * event.duration_s, 3),
        "args": {
            "stage": event.stage,
            "micro_batch": event.micro_batch,
            **panel.contents(event),
        },
    }


def _flow(made: Event, used: Event, process: int, number: int) -> list[dict[str, Any]]:
    """Return both ends of an arrow; each binds to the slice that it lies in."""
    inside_s = min(1e-7, made.duration_s / 2)
    kind = "activation" if made.kind.name == "FORWARD" else "gradient"
    common = {"name": kind, "cat": "message", "id": number, "pid": process}
    start = {"ph": "s", "tid": made.rank, "ts": round(_MICROSECONDS * (made.end_s - inside_s), 3)}
    end = {"ph": "f", "bp": "e", "tid": used.rank, "ts": round(_MICROSECONDS * used.start_s, 3)}
    return [{**common, **start}, {**common, **end}]
