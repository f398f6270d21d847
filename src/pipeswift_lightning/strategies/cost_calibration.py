"""Scale measured costs to what the stages' steps really take, while a run goes on."""

import statistics
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.calibration import WINDOW, counts, differ, is_due, slowdown_of
from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recorder import StepRecord
from pipeswift_lightning.strategies.planning import StepPlanner

__all__ = ["CostCalibration"]


class CostCalibration:
    """Compares this stage's steps with their plans, and tells the planner what all stages found.

    Only where the run measures its costs: with a file of costs, plans follow from the file alone.

    Args:
        planner: Has the costs.
        groups: The mesh's.
        progress: Read by the watchdog.
    """

    def __init__(self, planner: StepPlanner, groups: MeshGroups, progress: Progress) -> None:
        self._planner, self._groups, self._progress = planner, groups, progress
        self._steps = 0
        self._found: list[float] = []
        self._last: tuple[Candidate, tuple[float, ...] | None, StepRecord] | None = None

    def state(self) -> int:
        """Return what a resumed run needs to count on."""
        return self._steps

    def load_state(self, state: int) -> None:
        """Go on from what `state` has returned."""
        self._steps = state

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
        self._steps += 1
        if counts(self._steps):
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
        if not is_due(self._steps):
            return
        self._settle()
        found, self._found = self._found, []
        if len(found) < WINDOW:  # done already, or the run was resumed in between
            return
        every: list[Any] = [statistics.median(found)]
        if self._groups.mesh.num_stages > 1:
            every *= self._groups.mesh.num_stages
            with in_collective("comparing the stages' times with their costs", self._progress):
                dist.all_gather_object(every, every[0], group=self._groups.control)
        if differ(self._planner.slowdown, every):
            self._planner.slow_down(tuple(every))
            rank_zero_info(
                "pipeswift: stages compute "
                + ", ".join(f"{factor:.2f}" for factor in every)
                + " times as long as their layers' costs say; steps are planned with that."
            )
