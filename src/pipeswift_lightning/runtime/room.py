"""Whether a stage's device holds what is about to come to it."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pipeswift_lightning.runtime.ownership import LocalShare
from pipeswift_lightning.runtime.relocation import Parcel

__all__ = ["StepPeak", "forget_peak", "needed_bytes", "room_bytes"]


class StepPeak:
    """Remembers what steps have taken at most, beside what a device holds between them.

    It is read when a step ends: between steps, anyone may reset the device's own peak, as
    `BubbleMonitor` does.

    Attributes:
        num_bytes: The most so far; 0 on the host, whose memory is not looked at.

    Example:
        >>> peak = StepPeak()
        >>> peak.note(torch.device("cpu"))
        >>> peak.num_bytes
        0
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def note(self, device: torch.device) -> None:
        """Note that a step has ended."""
        if device.type == "cuda":
            most = torch.cuda.max_memory_allocated(device)
            self.num_bytes = max(self.num_bytes, most - torch.cuda.memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """Reset a device's peak after what is no step: profiling, or a move of layers."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def room_bytes(device: torch.device, step_bytes: int) -> float:
    """Return what a device can take beside what a step takes; the host's memory is not looked at.

    Args:
        device: The device, between two steps.
        step_bytes: What a step takes, by `StepPeak`.

    Example:
        >>> room_bytes(torch.device("cpu"), 0)
        inf
    """
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + kept_bytes - step_bytes


def needed_bytes(
    share: LocalShare, parcels: Iterable[Parcel], optimizers: Sequence[Optimizer]
) -> float:
    """Estimate what the parameters that come to this stage need, gradient and state included.

    Of these they have as much as the parameters that are here: for each byte as many.

    Args:
        share: What this rank holds.
        parcels: What travels.
        optimizers: The optimizers, with their state.
    """
    parameters = dict(share.module.named_parameters())
    coming = [n for p in parcels if p.destination == share.stage for n in p.parameters]
    held = sum(p.nbytes for p in share.local().values())
    beside = sum(p.grad.nbytes for p in share.local().values() if p.grad is not None)
    for optimizer in optimizers:
        leaves = tree_leaves(list(optimizer.state.values()))
        beside += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
    return sum(parameters[n].nbytes for n in coming) * (1 + beside / max(held, 1))
