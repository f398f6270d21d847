"""Whether layers should move to other stages, from the stages' measured times.

A stage that is measured to be slower than its layers' costs say has costlier layers than was
thought, or a slower device: one measurement cannot tell. If the layers are to blame, a layer that
moves takes its cost along; if the device is, it leaves it behind. So each partition is simulated
under both, and counts as what the worse of the two predicts: a gain that depends on the blame is
none. Once layers have moved, the stages' times tell which prediction was right, and the next move
follows that one.

Simulated are the measured times of each micro-batch, with instant messages. What a step takes
beyond them (messages, data, the update) is taken to stay. Whether a gain came is measured later.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

import numpy as np

from pipeswift_lightning.plan.bottleneck import StageProblem, solve_starts
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.evaluator import Evaluator, Floats, Ints
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.partition_search import (
    Bools,
    PartitionSearch,
    all_starts,
    bounds_of,
    without_empty_stages,
)

__all__ = [
    "Blame",
    "Decision",
    "Measurement",
    "RebalanceError",
    "RebalancePolicy",
    "decide",
]

_ALL_CELLS = 2_000_000  # Computations times partitions up to which all are simulated: 20 ms.
_MEAN = 0.25  # What the mean of both predictions counts beside the worse one, where that is a gain.
_LEAST = 1e-9  # Of the mean cost, in place of a cost of 0, which no measurement could be scaled to.


class Blame(StrEnum):
    """What makes a stage slower than its layers' costs say."""

    LAYERS = "layers"
    DEVICES = "devices"


class RebalanceError(ValueError):
    """Measurements or a policy that nothing can be decided from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """When layers move, and when they move back.

    Args:
        threshold: Share of a step that a move must be predicted to gain.
        kept_share: Share of the predicted gain that must come, or the move is undone.
        cool_down: Steps after a move was judged in which none is made.

    Raises:
        RebalanceError: A share is not between 0 and 1, or the cool-down is negative.
    """

    threshold: float = 0.05
    kept_share: float = 0.5
    cool_down: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            _refuse("threshold", self.threshold, "a share of the step, above 0 and below 1", 0.05)
        if not 0 <= self.kept_share <= 1:
            _refuse("kept_share", self.kept_share, "a share of the gain, from 0 to 1", 0.5)
        if self.cool_down < 0:
            _refuse("cool_down", self.cool_down, "a number of steps, 0 or more", 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a window of steps took.

    Args:
        schedule: That the steps followed.
        costs: Seconds of each stage and micro-batch, medians over the steps.
        step_s: Seconds of a step, a median too.

    Raises:
        RebalanceError: The step is not longer than 0.
    """

    schedule: Schedule
    costs: StepCosts
    step_s: float

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            _refuse("step_s", self.step_s, "the length of a step in seconds, above 0", 0.1)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each stage computes in a step. Shape ``[num_stages]``."""
        pairs = zip(self.costs.forward_s, self.costs.backward_s, strict=True)
        return tuple(sum(forward) + sum(backward) for forward, backward in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The best partition for what was measured.

    Attributes:
        partition: The present one.
        best: The best one; the present one if none is better.
        busy_s: What each stage computed in a step.
        step_s: What a step took.
        predicted_s: What it would take with ``best``, by the worse of the predictions.
        predicted_busy_s: What each stage would compute with ``best``, by blame.
        moves: Whether the gain passes the threshold.
    """

    partition: Partition
    best: Partition
    busy_s: tuple[float, ...]
    step_s: float
    predicted_s: float
    predicted_busy_s: Mapping[Blame, tuple[float, ...]] = field(default_factory=dict)
    moves: bool

    @property
    def gain(self) -> float:
        """The predicted gain, as a share of the step."""
        return 1 - self.predicted_s / self.step_s

    @property
    def num_moved(self) -> int:
        """Number of layers that change their stage."""
        layers = range(self.best.num_layers)
        return sum(self.partition.stage_of(k) != self.best.stage_of(k) for k in layers)


def decide(
    measured: Measurement,
    partition: Partition,
    layer_costs: Sequence[float],
    policy: RebalancePolicy,
    rejected: Collection[Partition] = (),
    blame: Blame | None = None,
) -> Decision:
    """Return the partition of least predicted step, and whether it is worth a move.

    Few partitions are all simulated; of many, those around the present one and the likely best.

    Args:
        measured: The last window.
        partition: That it ran with.
        layer_costs: Estimated or profiled cost of each layer; only ratios count. Shape ``[n]``.
        policy: What gain is worth it.
        rejected: Partitions not to be taken: their gain did not come before.
        blame: What is to blame; None if that is not known.

    Raises:
        RebalanceError: A cost is negative or not finite, or the numbers of layers or stages differ.

    Example:
        >>> from pipeswift_lightning.plan.schedules import build_schedule
        >>> costs = StepCosts(forward_s=[[1, 1], [2, 2]], backward_s=[[2, 2], [4, 4]])
        >>> measured = Measurement(schedule=build_schedule("1f1b", 2, 2), costs=costs, step_s=15.0)
        >>> found = decide(measured, Partition((0, 3), 6), [1] * 6, RebalancePolicy())
        >>> found.best.starts, found.predicted_s, found.moves
        ((0, 4), 13.0, True)
    """
    _check(measured, partition, layer_costs)
    n, stages = partition.num_layers, partition.num_stages
    prediction = _Prediction(measured, partition, layer_costs, blame)
    present = np.array([partition.starts], dtype=np.int64)
    taboo = {p.starts for p in rejected} - {partition.starts}

    def admissible(starts: Ints) -> Bools:
        allowed = np.array([tuple(row) not in taboo for row in starts.tolist()], dtype=bool)
        allowed &= without_empty_stages(starts, n)
        return allowed

    search = PartitionSearch(prediction.values, admissible)
    if math.comb(n - 1, stages - 1) * prediction.evaluator.num_computes <= _ALL_CELLS:
        starts, value = search.best(_nearest_first(all_starts(n, stages), present))
    else:
        starts, value = search.around(np.vstack([present, prediction.seeds()]))
    if not value < prediction.values(present)[0]:
        starts = present[0]
    best = Partition(tuple(starts.tolist()), n)
    gained_s = prediction.gained_s(starts)
    return Decision(
        partition=partition,
        best=best,
        busy_s=measured.busy_s,
        step_s=measured.step_s,
        predicted_s=measured.step_s - gained_s,
        predicted_busy_s=prediction.busy_s(starts),
        moves=best != partition and gained_s >= policy.threshold * measured.step_s,
    )


class _Prediction:
    """Simulates partitions under one blame or both, many at once."""

    def __init__(
        self,
        measured: Measurement,
        partition: Partition,
        layer_costs: Sequence[float],
        blame: Blame | None,
    ) -> None:
        self._blames = tuple(Blame) if blame is None else (blame,)
        self.evaluator = Evaluator.of(measured.schedule)
        self._partition = partition
        costs = np.array(layer_costs, dtype=float)
        costs = np.maximum(costs, _LEAST * costs.mean() if costs.any() else 1.0)
        m = measured.schedule.num_micro_batches
        forward, backward = (
            np.array(table, dtype=float)[:, :m]
            for table in (measured.costs.forward_s, measured.costs.backward_s)
        )
        self._times_s = np.stack([forward, backward])  # [2][stages][m]
        self._costs = costs
        self._sums = np.concatenate([[0.0], np.cumsum(costs)])
        stage_of = np.array([partition.stage_of(k) for k in range(len(costs))])
        self._stage_sums = np.diff(self._sums[[*partition.starts, len(costs)]])
        shares = costs / self._stage_sums[stage_of]
        layers_s = self._times_s[:, stage_of] * shares[:, None]  # [2][n][m]
        self._prefix_s = np.concatenate([np.zeros((2, 1, m)), np.cumsum(layers_s, axis=1)], axis=1)
        self._shares_s = layers_s.sum(axis=(0, 2))
        self._present_s = self._makespans_s(np.array([partition.starts], dtype=np.int64))[:, 0]

    def values(self, starts: Ints) -> Floats:
        """Return by how much a step gets longer, by the worse prediction and a little by the mean.

        Measured times are never exact: of two whose worse predictions are nearly equal, the one
        that may bring more is better.
        """
        changes = self._makespans_s(starts) - self._present_s[:, None]
        worse: Floats = changes.max(axis=0)
        values: Floats = np.where(worse < 0, worse + _MEAN * changes.mean(axis=0), worse)
        return values

    def gained_s(self, starts: Ints) -> float:
        """Return by how much a step is shorter, by the worse prediction."""
        changes = self._makespans_s(starts[None])[:, 0] - self._present_s
        return -float(changes.max())

    def seeds(self) -> Ints:
        """Return the partitions of least bottleneck under either blame."""
        stages = self._partition.num_stages
        busy_s = self._times_s.sum(axis=(0, 2))
        speeds = np.maximum(busy_s, _LEAST * max(busy_s.mean(), _LEAST)) / self._stage_sums
        problems = (
            StageProblem(costs_s=tuple(self._shares_s), num_stages=stages),
            StageProblem(costs_s=tuple(self._costs), num_stages=stages, slowdown=tuple(speeds)),
        )
        return np.array([solve_starts(problem) for problem in problems], dtype=np.int64)

    def busy_s(self, starts: Ints) -> dict[Blame, tuple[float, ...]]:
        """Return what each stage computes in a step, by every blame."""
        return {
            blame: tuple(self._durations_s(starts[None], blame).sum(axis=(0, 2, 3)).tolist())
            for blame in Blame
        }

    def _makespans_s(self, starts: Ints) -> Floats:
        """Return the makespans. Shape ``[blames][candidates]``."""
        every = (self._durations_s(starts, blame) for blame in self._blames)
        return np.stack(
            [self.evaluator.makespans_s(table.reshape(-1, len(starts))) for table in every]
        )

    def _durations_s(self, starts: Ints, blame: Blame) -> Floats:
        """Return the computations' seconds. Shape ``[2][stages][m][candidates]``."""
        bounds = bounds_of(starts, len(self._costs))
        match blame:
            case Blame.LAYERS:
                seconds = np.diff(self._prefix_s[:, bounds], axis=2)  # [2][candidates][stages][m]
            case Blame.DEVICES:
                factors = np.diff(self._sums[bounds], axis=1) / self._stage_sums
                seconds = self._times_s[:, None] * factors[None, :, :, None]
            case _:
                assert_never(blame)
        return seconds.transpose(0, 2, 3, 1)


def _nearest_first(starts: Ints, present: Ints) -> Ints:
    """Order partitions by how many layers move: of equal ones, the first is taken."""
    order: Ints = np.argsort(np.abs(starts - present).sum(axis=1), kind="stable")
    return starts[order]


def _check(measured: Measurement, partition: Partition, layer_costs: Sequence[float]) -> None:
    stages, measured_stages = partition.num_stages, measured.costs.num_stages
    if len(layer_costs) != partition.num_layers or stages != measured_stages:
        message = (
            f"{len(layer_costs)} layer costs and measurements of {measured_stages} stages for "
            f"{partition.num_layers} layers in {stages} stages. Rule: one of each. Remedy: measure "
            "and estimate the same network"
        )
        raise RebalanceError(message)
    wrong = next((k for k, c in enumerate(layer_costs) if not 0 <= c < math.inf), None)
    if wrong is not None:
        _refuse(f"layer_costs[{wrong}]", layer_costs[wrong], "finite and 0 or more", 1.0)


def _refuse(name: str, value: object, rule: str, example: float) -> None:
    message = f"{name}={value!r} is not allowed. Rule: {rule}. Remedy: {name}={example}, say"
    raise RebalanceError(message)
