"""What steps take of a GPU's memory, whoever else looks at it."""

import pytest
import torch

from pipeswift_lightning.callbacks.memory import peak_bytes
from pipeswift_lightning.runtime.room import StepPeak, forget_peak, room_bytes

GPU = torch.device("cuda", 0)
FREE_BYTES = 1000


class Memory:
    """A GPU's allocator, as `torch.cuda` tells of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.peak = 0
        for name, answer in {
            "memory_allocated": lambda device: self.held,
            "memory_reserved": lambda device: self.held + 50,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self.reset(),
            "mem_get_info": lambda device: (FREE_BYTES, 2 * FREE_BYTES),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def reset(self) -> None:
        self.peak = self.held

    def use(self, num_bytes: int) -> None:
        """Allocate, and free again."""
        self.peak = max(self.peak, self.held + num_bytes)


def test_a_monitor_and_a_profile_leave_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset between steps let a step take nothing; a profile's peak was taken for a step's."""
    memory, peak = Memory(monkeypatch), StepPeak()
    memory.held = 100
    memory.use(700)  # costs="measure"
    forget_peak(GPU)
    for taken in (200, 300, 250):
        memory.use(taken)
        peak.note(GPU)
        assert peak_bytes(GPU) == 100 + taken  # `BubbleMonitor`, which resets it
    assert peak.num_bytes == 300
    assert room_bytes(GPU, peak.num_bytes) == FREE_BYTES + 50 - 300
    memory.use(600)  # both shares at once, while layers move
    forget_peak(GPU)
    memory.use(280)
    peak.note(GPU)
    assert peak.num_bytes == 300
