"""A profile as a PNG, by matplotlib (extra ``plot``)."""

from io import BytesIO
from typing import Any

from pipeswift_lightning.drawing.png import require_matplotlib
from pipeswift_lightning.plan.cost_model import Shape
from pipeswift_lightning.plan.profile import CostProfile

__all__ = ["profile_png"]

# The colours of the timelines: forward is blue, backward orange; its second half is paler.
_PARTS = (
    ("forward", "#56b4e9"),
    ("backward to inputs", "#e69f00"),
    ("backward to weights", "#f6d698"),
)
_MOST_NAMES = 40


def profile_png(profile: CostProfile, *, dpi: int = 130) -> bytes:
    """Return a picture: each layer's time at the largest shape, and measured against predicted.

    Raises:
        DrawingError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_layers = len(profile.layers)
    figure = Figure(
        figsize=(12, max(4.0, min(12.0, 1.5 + 0.22 * num_layers))), layout="constrained"
    )
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_layers(left, profile)
    _draw_shapes(right, profile)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _draw_layers(ax: Any, profile: CostProfile) -> None:
    tokens = [b * n for b, n in profile.shapes]
    at = tokens.index(max(tokens))
    samples = [layer.samples[at] for layer in profile.layers]
    times = (
        [s.forward_s for s in samples],
        [min(s.input_gradient_s, s.backward_s) for s in samples],
        [s.weight_gradient_s for s in samples],
    )
    rows = list(range(len(samples)))
    start = [0.0] * len(samples)
    for (name, color), seconds in zip(_PARTS, times, strict=True):
        widths = [1e3 * s for s in seconds]
        ax.barh(rows, widths, left=start, color=color, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    step = max(1, len(rows) // _MOST_NAMES)
    ax.set_yticks(rows[::step], [layer.name for layer in profile.layers[::step]], fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    b, n = profile.shapes[at]
    ax.set_xlabel(f"ms, for {b} samples of {n} tokens")
    ax.legend(frameon=False, fontsize=8)


def _draw_shapes(ax: Any, profile: CostProfile) -> None:
    model = profile.model()
    tokens = [b * n for b, n in profile.shapes]
    measured = [
        1e3 * sum(x.samples[i].forward_s + x.samples[i].backward_s for x in profile.layers)
        for i in range(len(tokens))
    ]
    fitted = []
    for b, n in profile.shapes:
        shape = Shape.padded([n] * b)
        both = [x.forward.plus(x.backward).seconds(shape) for x in model.layers]
        fitted.append(1e3 * sum(both))
    ax.plot(tokens, measured, "o", color="#0072b2", label="measured")
    ax.plot(tokens, fitted, "+", color="#d55e00", markersize=10, label="fitted to all shapes")
    held_out = profile.held_out()
    if held_out.shapes:
        ax.plot(
            [b * n for b, n in held_out.shapes],
            [1e3 * s for s in held_out.predicted_s],
            "x",
            color="#009e73",
            label=f"predicted unseen, error {100 * held_out.relative_error:.1f} %",
        )
    ax.set_xlabel("tokens of a micro-batch")
    ax.set_ylabel("forward and backward of all layers, ms")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)
