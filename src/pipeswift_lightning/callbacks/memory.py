"""How much memory a process holds."""

import os
from pathlib import Path

import torch

__all__ = ["peak_bytes"]


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes a GPU has held since the last call; on a CPU, what the process holds.

    Or since layers were profiled, or moved: what that took is left out. 0 where it cannot be known.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
