"""Timelines as a picture, if matplotlib is there (``pip install "pipeswift-lightning[plot]"``)."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pipeswift_lightning.plan.timeline import EventKind, Timeline

__all__ = ["save_figure"]

_COLOURS = {EventKind.FORWARD: "tab:blue", EventKind.BACKWARD: "tab:green"}
_WAIT = "lightgrey"


def save_figure(timelines: Mapping[str, Timeline], path: str | Path) -> Path | None:
    """Draw the timelines one below the other, on one scale.

    Args:
        timelines: By name; at least one.
        path: File to write; its ending is the format.

    Returns:
        The path, or None where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    ranks = sum(timeline.num_ranks for timeline in timelines.values())
    figure = Figure(figsize=(14, 0.5 * ranks + 1.2 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, timeline) in zip(axes, timelines.items(), strict=True):
        for event in timeline.events:
            axis.barh(
                event.rank,
                event.duration_s,
                left=event.start_s - timeline.start_s,
                color=_COLOURS.get(event.kind, _WAIT),
                edgecolor="white",
                linewidth=0.4,
            )
        axis.set_title(f"{name}: bubble {timeline.bubble_ratio:.1%}", loc="left", fontsize=9)
        axis.set_yticks(range(timeline.num_ranks))
        axis.set_ylabel("rank")
        axis.invert_yaxis()
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)
    return Path(path)
