"""The partition with the least *simulated* step, rather than the fastest slowest stage.

With unequal micro-batches, a deep warm-up or slow links the stage that is slowest on average need
not decide; lighter first or last stages may win. If there are few partitions all are simulated,
otherwise those around the least bottleneck, evenly balanced or tapered, and their neighbours.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from pipeswift_lightning.plan.bottleneck import PartitionError, StageProblem, solve_starts
from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.evaluator import Evaluator, Floats, Ints
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.partition_search import (
    Bools,
    PartitionSearch,
    all_starts,
    bounds_of,
    without_empty_stages,
)

__all__ = ["StepShape", "simulated_partition"]

_INSTANT = Link()
_ALL_CELLS = 12_000_000  # Computations times partitions up to which all are simulated: 0.1 s.
_TAPERS = (1.0, 0.9, 1.1, 1.25, 0.8, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the step looks like, whatever the partition.

    Args:
        scales: Cost of each micro-batch in relation to the layers' costs, by position in the
            order. Shape ``[m]``.
        backward_ratio: Time of a layer's backward in relation to its forward.
        cut_bytes: Bytes that a cut before each layer sends for a micro-batch of scale 1. Shape
            ``[n]``. None: messages take no time on the wire.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on.
    """

    scales: tuple[float, ...]
    backward_ratio: float = 2.0
    cut_bytes: tuple[float, ...] | None = None
    link: Link = _INSTANT
    overlap: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(map(float, self.scales)))
        if self.cut_bytes is not None:
            object.__setattr__(self, "cut_bytes", tuple(map(float, self.cut_bytes)))


def simulated_partition(
    problem: StageProblem, evaluator: Evaluator, shape: StepShape
) -> tuple[Partition, float]:
    """Return the partition with the least simulated makespan, and that makespan in seconds.

    Never worse, simulated, than the partition of the least bottleneck.

    Args:
        problem: Layers, devices, memory. ``costs_s`` are forward times; ``cut_s`` is not used here,
            since the simulator has the transfers themselves.
        evaluator: Of the schedule; one micro-batch for each of ``shape.scales``.
        shape: Micro-batches and links.

    Raises:
        PartitionError: Nothing fits into memory, too many cuts are forbidden, or the schedule has
            other numbers of stages or micro-batches.

    Example:
        >>> from pipeswift_lightning.plan.evaluator import evaluator_for
        >>> problem = StageProblem(costs_s=(1, 1, 1, 1, 2), num_stages=2)
        >>> simulated_partition(problem, evaluator_for("1f1b", 2, 2), StepShape(scales=(1, 1)))
        (Partition(starts=(0, 4), num_layers=5), 26.0)
    """
    have = evaluator.num_stages, evaluator.num_micro_batches
    need = problem.num_stages, len(shape.scales)
    if have != need:
        message = (
            f"the schedule has {have[0]} stages and {have[1]} micro-batches. Rule: as many as the "
            f"partition, {need[0]}, and the scales, {need[1]}. Remedy: build them from one number"
        )
        raise PartitionError(message)
    simulation = _Simulation(problem, evaluator, shape)
    search = PartitionSearch(simulation.makespans_s, simulation.admissible)
    n, cuts = len(problem.costs_s), problem.num_stages - 1
    solve_starts(problem)  # Says what is wrong if nothing fits.
    if math.comb(n - 1, cuts) * evaluator.num_computes <= _ALL_CELLS:
        starts, value = search.best(all_starts(n, problem.num_stages))
    else:
        starts, value = search.around(_tapered(problem))
    return Partition(tuple(starts.tolist()), n), value


class _Simulation:
    """Simulates partitions, all of them in one array."""

    def __init__(self, problem: StageProblem, evaluator: Evaluator, shape: StepShape) -> None:
        self.num_layers = len(problem.costs_s)
        self.problem, self.evaluator, self.shape = problem, evaluator, shape
        self.prefix_s = np.concatenate([[0.0], np.cumsum(problem.costs_s)])
        self.slowdown = np.array(problem.slowdown or [1.0] * problem.num_stages)

    def admissible(self, starts: Ints) -> Bools:
        """Return which of the partitions have no empty stage or forbidden cut, and fit."""
        n, bounds = self.num_layers, bounds_of(starts, self.num_layers)
        good = without_empty_stages(starts, n)
        good &= ~np.isin(starts[:, 1:], sorted(self.problem.forbidden_cuts)).any(axis=1)
        memory = self.problem.memory
        if memory is not None:
            bounds = np.clip(bounds, 0, n)
            static = np.concatenate([[0.0], np.cumsum(memory.static_bytes)])
            each = np.concatenate([[0.0], np.cumsum(memory.activation_bytes)])
            needed = np.diff(static[bounds]) + np.array(memory.in_flight) * np.diff(each[bounds])
            good &= (needed <= np.array(memory.capacity_bytes)).all(axis=1)
        return good

    def makespans_s(self, starts: Ints) -> Floats:
        """Return the makespan of each of the partitions."""
        stages, bounds = self.problem.num_stages, bounds_of(starts, self.num_layers)
        scales = np.array(self.shape.scales)
        load = (np.diff(self.prefix_s[bounds], axis=1) * self.slowdown).T  # [stages][candidates]
        forward = (load[:, None, :] * scales[:, None]).reshape(-1, len(starts))
        wire = None
        if self.shape.cut_bytes is not None and stages > 1:
            cut_s = np.array(self.shape.cut_bytes) / self.shape.link.bandwidth_bytes_per_s
            sent = np.zeros((stages + 1, len(starts)))
            sent[1:stages] = cut_s[starts[:, 1:]].T  # Row s: the cut before stage s.
            both = np.concatenate([sent[1:], sent[:-1]])  # Forwards send on, backwards send back.
            wire = (both[:, None, :] * scales[:, None]).reshape(-1, len(starts))
        return self.evaluator.makespans_s(
            np.concatenate([forward, forward * self.shape.backward_ratio]),
            occupied_s=wire,
            latency_s=self.shape.link.latency_s,
            overlap=self.shape.overlap,
        )


def _tapered(problem: StageProblem) -> Ints:
    """Return the partitions of least bottleneck if the ends were faster or slower than they are."""
    slowdown = problem.slowdown or (1.0,) * problem.num_stages
    starts: dict[tuple[int, ...], None] = {}
    for first, last in itertools.product(_TAPERS, repeat=2):
        ramp = np.interp(np.linspace(-1, 1, problem.num_stages), (-1, 0, 1), (first, 1.0, last))
        ends = [1.0] * problem.num_stages
        ends[0], ends[-1] = first, last
        for taper in (ends, ramp):
            slow = tuple(float(s * t) for s, t in zip(slowdown, taper, strict=True))
            starts[solve_starts(replace(problem, slowdown=slow))] = None
    return np.array(list(starts), dtype=np.int64)
