"""Time steps that all ranks begin together, and show what came of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Span", "Step", "compare_gradients", "gathered", "slowest", "table", "timed"]

_LEAD_S = 0.002  # From announcing the common start to the start: more than a broadcast takes.


class Step(Protocol):
    """One side of a race."""

    module: nn.Module

    def prepare(self) -> None:
        """Forget the gradients; not timed."""
        ...

    def run(self) -> None:
        """Run one step; timed."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """One step on one rank; all ranks share the clock, since they share the machine."""

    start_s: float
    end_s: float
    cpu_s: float


def timed(step: Step) -> Span:
    """Run one step from a common start."""
    step.prepare()
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    start_s = float(start.item())
    while (left_s := start_s - time.perf_counter()) > 0:
        time.sleep(left_s)
    cpu_s = time.process_time()
    step.run()
    return Span(start_s, time.perf_counter(), time.process_time() - cpu_s)


def slowest(spans: Sequence[Span]) -> tuple[list[float], list[float]]:
    """Return, for each step, the seconds until the last rank's end and the most processor time."""
    steps = list(zip(*gathered(list(spans)), strict=True))
    return (
        [max(span.end_s for span in step) - step[0].start_s for step in steps],
        [max(span.cpu_s for span in step) for step in steps],
    )


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def compare_gradients(ours: nn.Module, peer: nn.Module, tolerance: float) -> float:
    """Return the largest difference of gradients, relative to their size where that is above 1.

    Raises:
        AssertionError: It is above ``tolerance``, or a gradient is missing or zero.
    """
    found = 0.0
    for (name, a), b in zip(ours.named_parameters(), peer.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert a.grad.abs().sum() > 0, f"{name} has no gradient"
        scale = float(b.grad.abs().max())
        worst = float((a.grad - b.grad).abs().max()) / max(1.0, scale)
        assert worst <= tolerance, f"gradients of {name} differ by {worst}"
        found = max(found, worst)
    return found


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with their columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
