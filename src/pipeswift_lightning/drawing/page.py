"""Timelines as one self-contained page: inline SVG, hover and zoom, nothing loaded."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from pipeswift_lightning.drawing.panel import COLORS, NAMES, Panel
from pipeswift_lightning.plan.timeline import Event, EventKind

__all__ = ["page"]

_TALLEST_ROW_PX, _LOWEST_ROW_PX, _PANEL_PX = 28, 11, 700


def page(panels: Sequence[Panel], *, title: str) -> str:
    """Return the HTML page.

    A rank is a row. Pointing at a box shows stage, micro-batch, its samples and tokens, and times;
    the wheel zooms around the pointer (all panels alike), dragging moves, a double click shows
    everything again; the keys +, -, 0 and the arrows do the same.

    Args:
        panels: Drawn one above the other over one axis of time.
        title: Of the page.
    """
    every = [panel.events() for panel in panels]
    first_s = min((e.start_s for events in every for e in events), default=0.0)
    last_s = max((e.end_s for events in every for e in events), default=first_s)
    kinds = [k for k in EventKind if any(e.kind is k for events in every for e in events)]
    template = Template((files(__package__) / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        colors="\n".join(
            f".{k.value} {{ fill: {COLORS[k]}; background: {COLORS[k]} }}" for k in kinds
        ),
        legend="".join(f'<span><i class="{k.value}"></i>{NAMES[k]}</span>' for k in kinds),
        panels="\n".join(_panel(panel, first_s, last_s) for panel in panels),
        first_us=_us(first_s),
        length_us=_us(max(last_s - first_s, 1e-9)),
    )


def _panel(panel: Panel, first_s: float, last_s: float) -> str:
    """Return a panel. In its SVG, x is microseconds and y the rank, so zoom changes one box."""
    num_ranks = panel.timeline.num_ranks
    row_px = min(_TALLEST_ROW_PX, max(_LOWEST_ROW_PX, _PANEL_PX // num_ranks))
    ranks = range(num_ranks)
    rects = "".join(
        f'<rect class="{e.kind.value}" x="{_us(e.start_s)}" y="{e.rank + 0.05:g}" '
        f'width="{_us(e.duration_s)}" height="0.9"' + _micro_batch(e, panel) + "/>"
        for e in panel.events()
    )
    stages = "".join(f"<div>stage {rank}</div>" for rank in ranks)
    bubbles = "".join(f"<div>{panel.timeline.bubble(rank):.1%}</div>" for rank in ranks)
    box = f"{_us(first_s)} 0 {_us(max(last_s - first_s, 1e-9))} {num_ranks}"
    return (
        f'<h2>{escape(panel.title)}</h2><div class="panel" style="--row:{row_px}px">'
        f'<div class="names">{stages}</div><div class="plot">'
        f'<svg class="time" style="height:{row_px * num_ranks}px" viewBox="{box}" '
        f'preserveAspectRatio="none">{rects}</svg>'
        f'<div class="labels"></div></div><div class="names">{bubbles}</div></div>'
    )


def _micro_batch(event: Event, panel: Panel) -> str:
    """Return the attributes that tell an event's micro-batch, and what it holds."""
    number = event.micro_batch
    if number is None:
        return ""
    told = "".join(f' data-{name}="{value}"' for name, value in panel.contents(event).items())
    return f' data-m="{number}"{told}'


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"
