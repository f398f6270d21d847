"""Scale measured costs to what the stages' steps really take, while a run goes on."""

import statistics
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.calibration import FIRST, WINDOW, counts, differ, is_due, slowdown_of
from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recorder import StepRecord
from pipeswift_lightning.strategies.planning import StepPlanner

__all__ = ["CostCalibration"]

_COMPILED = 64  # steps before the first factors where layers are compiled anew for each shape


class CostCalibration:
    """Compares this stage's steps with their plans, and tells the planner what all stages found.

    Only where the run measures its costs: with a file of costs, plans follow from the file alone.
    Steps are counted from the beginning of each run and each partition: the first ones warm up.

    Args:
        planner: Has the costs.
        groups: The mesh's.
        progress: Read by the watchdog.
        compiles: Whether layers are compiled: then many of the first steps take longer.
    """

    def __init__(
        self,
        planner: StepPlanner,
        groups: MeshGroups,
        progress: Progress,
        *,
        compiles: bool = False,
    ) -> None:
        self._planner, self._groups, self._progress = planner, groups, progress
        self._first = _COMPILED if compiles else FIRST
        self._steps = 0
        self._partition: Partition | None = None
        self._found: list[float] = []
        self._last: tuple[Candidate, tuple[float, ...] | None, StepRecord] | None = None

    def note(self, chosen: Candidate, record: StepRecord) -> None:
        """Note a training step that has run.

        It is looked at when the next one is noted, or at the next `apply`: no step waits for a GPU.

        Args:
            chosen: Its plan.
            record: What this rank did in it.
        """
        if not self._planner.measures:
            return
        self._settle()
        if chosen.partition != self._partition:  # other layers on a stage, another factor
            self._partition, self._steps = chosen.partition, 0
        self._steps += 1
        if counts(self._steps, self._first):
            self._last = chosen, self._planner.slowdown, record
        else:
            self._found.clear()

    def _settle(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        chosen, planned_with, record = last
        computed = record.computed()
        found = slowdown_of(
            0.0 if computed is None else computed[-1],
            chosen.costs,
            self._groups.coordinate.stage,
            planned_with=planned_with,
            overhead_s=self._planner.overhead_s,
        )
        self._found.append(found)

    def apply(self) -> None:
        """Between steps, if it is time, plan with what the stages found; then a collective."""
        if not is_due(self._steps, self._first):
            return
        self._settle()
        found, self._found = self._found, []
        if len(found) < WINDOW:  # it was done before this step, a validation's say
            return
        every: list[Any] = [statistics.median(found)]
        if self._groups.mesh.num_stages > 1:
            every *= self._groups.mesh.num_stages
            with in_collective("comparing the stages' times with their costs", self._progress):
                dist.all_gather_object(every, every[0], group=self._groups.control)
        if differ(self._planner.slowdown, every):
            self._planner.slow_down(tuple(every))
            whose = "" if self._groups.mesh.num_replicas == 1 else " of the first replica"
            rank_zero_info(
                f"pipeswift: stages{whose} compute "
                + ", ".join(f"{factor:.2f}" for factor in every)
                + " times as long as their layers' costs say; steps are planned with that."
            )
