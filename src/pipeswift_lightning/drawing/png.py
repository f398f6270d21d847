"""Timelines as a PNG, by matplotlib (extra ``plot``)."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from pipeswift_lightning.drawing.panel import COLORS, COMPUTE, NAMES, Panel, label
from pipeswift_lightning.plan.timeline import Event, EventKind

__all__ = ["DrawingError", "png", "require_matplotlib"]

_WIDTH_INCHES = 14.0
_POINTS_PER_INCH = 72
_MIN_BOX_POINTS = 12.0
_NARROWEST_POINTS = 5.0  # Smaller labels cannot be read.


class DrawingError(RuntimeError):
    """A picture that cannot be drawn here."""


def require_matplotlib() -> None:
    """Raise now rather than at the first picture.

    Raises:
        DrawingError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 -- only a look
    except ImportError as error:
        message = (
            "a PNG of the timeline needs matplotlib, which is not installed. "
            "Rule: pictures are an extra. Remedy: pip install 'pipeswift-lightning[plot]', or "
            "TimelineTrace(png=False): page and trace need nothing"
        )
        raise DrawingError(message) from error


def png(panels: Sequence[Panel], *, dpi: int = 130) -> bytes:
    """Return a picture of the panels, one above the other, over one axis of time.

    Each row is a rank. Computations carry ``F`` or ``B`` and their micro-batch where there is room;
    at the right is each rank's bubble.

    Raises:
        DrawingError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = max(p.timeline.num_ranks for p in panels)
    row_inches = min(0.36, max(0.11, 7.0 / num_rows))
    height = 0.9 + len(panels) * (num_rows * row_inches + 0.55)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    every = [panel.events() for panel in panels]
    first_s = min((e.start_s for events in every for e in events), default=0.0)
    last_s = max((e.end_s for events in every for e in events), default=0.0)
    for ax, panel, events in zip(axes, panels, every, strict=True):
        ax.set_xlim(1e3 * first_s, 1e3 * max(last_s, first_s + 1e-9))
        _draw(ax, panel, events, row_inches, last_s - first_s)
    axes[-1].set_xlabel("ms since the first computation")
    _add_legend(figure, [e for events in every for e in events])
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _draw(
    ax: Any, panel: Panel, events: Sequence[Event], row_inches: float, length_s: float
) -> None:
    num_ranks = panel.timeline.num_ranks
    kinds = dict.fromkeys(e.kind for e in events)  # waits come first, below computation
    for kind in kinds:
        for rank in range(num_ranks):
            spans = [
                (1e3 * e.start_s, 1e3 * e.duration_s)
                for e in events
                if e.rank == rank and e.kind is kind
            ]
            # Lines between boxes of a pixel or two would be all that is seen.
            wide = len(spans) * _MIN_BOX_POINTS < 0.85 * _WIDTH_INCHES * _POINTS_PER_INCH
            edge = "white" if wide and kind in COMPUTE else "none"
            ax.broken_barh(
                spans, (rank - 0.45, 0.9), color=COLORS[kind], edgecolor=edge, linewidth=0.3
            )
    size = min(9.0, 0.62 * row_inches * _POINTS_PER_INCH)
    _write_labels(ax, events, size, length_s)
    ax.set_ylim(num_ranks - 0.5, -0.5)
    shown = range(0, num_ranks, max(1, num_ranks // 16) if size < _NARROWEST_POINTS else 1)
    ax.set_yticks(list(shown), [f"stage {rank}" for rank in shown], fontsize=max(size, 6.0))
    other = ax.secondary_yaxis("right")
    other.set_yticks(
        list(shown),
        [f"{panel.timeline.bubble(r):.1%}" for r in shown],
        fontsize=max(size, 6.0),
    )
    other.tick_params(length=0)
    other.spines["right"].set_visible(False)
    ax.set_title(panel.title, loc="left", fontsize=10)
    ax.set_title("bubble", loc="right", fontsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _write_labels(ax: Any, events: Sequence[Event], size: float, length_s: float) -> None:
    if length_s <= 0 or size < _NARROWEST_POINTS:
        return
    points_per_s = 0.85 * _WIDTH_INCHES * _POINTS_PER_INCH / length_s
    for event in events:
        text = label(event)
        if text and event.duration_s * points_per_s > 0.62 * size * len(text) + 1:
            middle_ms = 500 * (event.start_s + event.end_s)
            ax.text(
                middle_ms, event.rank, text, ha="center", va="center", fontsize=size, clip_on=True
            )


def _add_legend(figure: Any, events: Sequence[Event]) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in EventKind if any(e.kind is kind for e in events)]
    patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    if patches:
        figure.legend(
            handles=patches, loc="outside upper center", ncols=len(patches), frameon=False
        )
