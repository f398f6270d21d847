"""A profile as tables in the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeswift_lightning.plan.cost_model import LayerModel
from pipeswift_lightning.plan.profile import CostProfile

__all__ = ["profile_tables"]


_COLUMNS = (
    "forward\nms",
    "backward\nms",
    "to inputs\nms",
    "fixed\nms",
    "kept\nMB",
    "sent\nMB",
    "weights\nMB",
    "+ state\nMB",
)


def profile_tables(profile: CostProfile) -> Group:
    """Return what each layer costs at the largest shape, and the error for unseen shapes."""
    return Group(_layers(profile), _errors(profile), Text(_origin(profile)))


def _layers(profile: CostProfile) -> Table:
    b, n = profile.shapes[_largest(profile)]
    table = Table(title=f"{len(profile.layers)} layers, {b} samples of {n} tokens", box=SIMPLE_HEAD)
    table.add_column("layer")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    models = profile.model().layers
    rows = [_row(profile, k, model) for k, model in enumerate(models)]
    for layer, row in zip(profile.layers, rows, strict=True):
        table.add_row(".".join(layer.name.split(".")[-2:]), *map(_number, row))
    table.add_section()
    table.add_row("all", *(_number(sum(column)) for column in zip(*rows, strict=True)))
    return table


def _row(profile: CostProfile, position: int, model: LayerModel) -> Sequence[float]:
    layer = profile.layers[position]
    sample = layer.samples[_largest(profile)]
    return (
        1e3 * sample.forward_s,
        1e3 * sample.backward_s,
        1e3 * sample.input_gradient_s,
        1e3 * (model.forward.fixed_s + model.backward.fixed_s),
        sample.saved_bytes / 1e6,
        sample.output_bytes / 1e6,
        layer.parameter_bytes / 1e6,
        layer.static_bytes / 1e6,
    )


def _errors(profile: CostProfile) -> Table:
    held_out = profile.held_out()
    error = f"{100 * profile.relative_error:.1f} %"
    if not held_out.shapes:
        return Table(title=f"error of the fit itself: {error} (4 shapes or more could be held out)")
    table = Table(
        title=f"shapes that the fit had not seen: error {error} (root mean square)", box=SIMPLE_HEAD
    )
    for name in ("samples", "tokens of each", "measured, ms", "predicted, ms", "error"):
        table.add_column(name, justify="right")
    rows = (held_out.shapes, held_out.measured_s, held_out.predicted_s, held_out.errors)
    for (b, n), measured_s, predicted_s, off in zip(*rows, strict=True):
        times = _number(1e3 * measured_s), _number(1e3 * predicted_s)
        table.add_row(str(b), str(n), *times, f"{100 * off:+.1f} %")
    return table


def _origin(profile: CostProfile) -> str:
    origin = profile.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    text = f"{origin.device or 'unknown device'}; {origin.dtype}; {versions}"
    if profile.link is None:
        return text
    rate = profile.link.bandwidth_bytes_per_s / 1e9
    return f"{text}; link {1e6 * profile.link.latency_s:.0f} us, {rate:.2f} GB/s"


def _largest(profile: CostProfile) -> int:
    return max(
        range(len(profile.shapes)), key=lambda i: profile.shapes[i][0] * profile.shapes[i][1]
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
