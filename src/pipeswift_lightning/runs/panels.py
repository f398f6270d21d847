"""The panels of a dashboard, as data: W&B's workspace and the local page are made of the same."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SECTIONS", "TIMELINE", "Panel", "Section"]

TIMELINE = "timeline"  # the key of the pictures that `TimelineTrace` gives to loggers


@dataclass(frozen=True, slots=True)
class Panel:
    r"""One diagram of curves over steps.

    Args:
        title: Stands above it.
        pattern: Matches the whole names of the metrics it shows.

    Example:
        >>> names = ["bubble/stage_0", "bubble/stage_0_busy_s"]
        >>> Panel("bubble", r"bubble/stage_\d+").metrics(names)
        ['bubble/stage_0']
    """

    title: str
    pattern: str

    def metrics(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are shown."""
        return [name for name in names if re.fullmatch(self.pattern, name)]


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that belong together.

    Args:
        title: Stands above them.
        panels: From left to right.
    """

    title: str
    panels: tuple[Panel, ...]


_SHARES = r"share_(compute|communication_wait|data_wait|gradient_reduce|optimizer|other)"

SECTIONS = (
    Section(
        "Training",
        (Panel("loss", r"(train|val)/loss.*"),),
    ),
    Section(
        "Job completion time",
        (
            Panel("shares of the time so far", r"job/share_.*"),
            Panel("elapsed and left, s", r"job/(elapsed|left)_s"),
        ),
    ),
    Section(
        "Bubble",
        (
            Panel("measured and predicted", r"bubble/(measured|predicted)"),
            Panel("by stage", r"bubble/stage_\d+"),
            Panel("predicted by stage", r"bubble/predicted_stage_\d+"),
            Panel("by replica", r"bubble/replica_\d+"),
            Panel("shares of a step", rf"bubble/{_SHARES}"),
            Panel("shares of the predicted step", rf"bubble/predicted_{_SHARES}"),
        ),
    ),
    Section(
        "Stages",
        (
            Panel("computation in a step, s", r"bubble/stage_\d+_busy_s"),
            Panel("memory, bytes", r"memory/stage_\d+_bytes"),
            Panel("transit on each link, s", r"variance/link_\d+_to_\d+_s"),
        ),
    ),
    Section(
        "Variance",
        (
            Panel("step, s", r"(bubble/step_s|variance/step_mean_s)"),
            Panel("variation of the step", r"variance/step_variation"),
            Panel("variation by stage", r"variance/stage_\d+_variation"),
            Panel(
                "cost of each cause, s",
                r"variance/(slow_stage|slow_link|data_loading|garbage_collection|jitter)_s",
            ),
        ),
    ),
    Section(
        "Throughput",
        (
            Panel("tokens a second", r"throughput/tokens_per_s"),
            Panel("samples a second", r"throughput/samples_per_s"),
            Panel("model FLOPs utilisation", r"throughput/mfu"),
        ),
    ),
)
