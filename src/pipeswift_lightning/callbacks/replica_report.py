"""Replicas of a pipeline beside each other: which one the others wait for."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeswift_lightning.callbacks.step_sums import StepSums

__all__ = ["ReplicaReport"]

_SLOW = 1.1  # A replica this much busier than the others' median is the one they wait for.


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Means over some steps, by replica.

    Attributes:
        measured: Mean bubble of each replica's stages.
        busy_s: Seconds of computation in a step, of each replica's busiest stage.

    Example:
        >>> report = ReplicaReport((0.2, 0.2, 0.1), (1.0, 1.0, 1.5))
        >>> report.slow_replica, report.explain(2)[:43]
        (2, 'replica 2 computes 1500.0 ms a step, the ot')
    """

    measured: tuple[float, ...]
    busy_s: tuple[float, ...]

    @classmethod
    def of(cls, replicas: Sequence[Sequence[StepSums]]) -> "ReplicaReport":
        """Build the report from the sums of each replica's stages."""
        measured = []
        for stages in replicas:
            makespan_s = max(s.mean_s("span") for s in stages)
            busy = [s.mean_s("compute") / makespan_s if makespan_s > 0 else 1.0 for s in stages]
            measured.append(1 - statistics.fmean(busy))
        busiest = tuple(max(s.mean_s("compute") for s in stages) for stages in replicas)
        return cls(tuple(measured), busiest)

    @property
    def slow_replica(self) -> int | None:
        """The replica that the others wait for, where gradients are reduced; None if none is."""
        slowest = max(range(len(self.busy_s)), key=lambda r: self.busy_s[r])
        others = [s for r, s in enumerate(self.busy_s) if r != slowest]
        slow = bool(others) and self.busy_s[slowest] > _SLOW * statistics.median(others)
        return slowest if slow else None

    def scalars(self, prefix: str) -> dict[str, float]:
        """Return what is logged; nothing for a single replica."""
        if len(self.busy_s) == 1:
            return {}
        return {
            f"{prefix}/replica_{replica}{name}": value
            for name, values in (("", self.measured), ("_busy_s", self.busy_s))
            for replica, value in enumerate(values)
        }

    def explain(self, replica: int) -> str:
        """Return a sentence for the user."""
        others = statistics.median(s for r, s in enumerate(self.busy_s) if r != replica)
        return (
            f"replica {replica} computes {1e3 * self.busy_s[replica]:.1f} ms a step, the others "
            f"{1e3 * others:.1f} ms: they wait for it where gradients are reduced. Remedy: samples "
            "of similar cost on each replica, or look what else runs on its host"
        )
