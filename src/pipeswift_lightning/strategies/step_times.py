"""How long each stage worked in the last steps, and how long it stood idle."""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from pipeswift_lightning.plan.clocks import align
from pipeswift_lightning.plan.timeline import Event, Timeline
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.recorder import StepRecord

__all__ = ["StepTimes", "gather_timeline"]

_KEPT_STEPS = 200


class StepTimes:
    """The last steps of this rank: first start, last end and sum of its computation."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_STEPS)
        self._last: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Note one step. It is looked at when the next one is added: no step waits for a GPU."""
        self._settle()
        self._last = record

    def _settle(self) -> None:
        record, self._last = self._last, None
        computed = None if record is None else record.computed()
        if computed is not None:
            self._steps.append(computed)

    def bubbles(self, groups: MeshGroups) -> list[float] | None:
        """Return the idle share of each stage; collective over the pipeline.

        A step lasts from the first start to the last end of computation on any stage. The clocks
        of one host are one clock; between hosts they may differ by more than a step lasts.
        """
        self._settle()
        every: list[Any] = [None] * groups.mesh.num_stages
        dist.all_gather_object(every, list(self._steps), group=groups.pipeline)
        if not all(every):
            return None
        steps = list(zip(*every, strict=True))
        total_s = sum(max(s[1] for s in step) - min(s[0] for s in step) for step in steps)
        return [
            1.0 - sum(step[stage][2] for step in steps) / total_s
            for stage in range(groups.mesh.num_stages)
        ]


def gather_timeline(events: Sequence[Event], groups: MeshGroups) -> Timeline:
    """Return the timeline of the whole pipeline, a rank a stage; collective over it.

    Args:
        events: This rank's.
        groups: The mesh's groups.
    """
    every: list[Any] = [None] * groups.mesh.num_stages
    dist.all_gather_object(every, (socket.gethostname(), events), group=groups.pipeline)
    gathered = tuple(event for _, mine in every for event in mine)
    timeline = Timeline(events=gathered, num_ranks=groups.mesh.num_stages)
    return align(timeline, [host for host, _ in every])
