"""What has to be planned: a batch, a network's costs, devices and links."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeswift_lightning.plan.bottleneck import LayerMemory, StageProblem
from pipeswift_lightning.plan.cost_model import CostModel, Shape, TimeModel
from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.formation import Formation
from pipeswift_lightning.plan.partition import Partition

__all__ = ["Layout", "Workload"]


class Layout(StrEnum):
    """How the samples of a micro-batch lie in memory."""

    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch to run, and what it runs on.

    Args:
        model: What the layers cost.
        lengths: Tokens of each sample of the batch. Shape ``[N]``.
        num_stages: Number of stages, one a rank.
        layout: Whether the samples of a micro-batch are padded to the longest, or packed; a name
            will do.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on.
        slowdown: By how much each stage's device is slower. None: all are equal.
        capacity_bytes: Memory of each stage's device. None: it does not matter.
        forbidden_cuts: Layers before which no cut may lie.
        max_tokens: Most tokens of a micro-batch, padding included.
        sessions: Session of each sample; the samples of one session keep their order. None in
            place of a session: the sample has none.
        reorder: Whether samples may run in another order than that of the data.
        order: How the micro-batches are ordered: one of ``orders.ORDERS``.
        partition: Layers of each stage, if they are fixed already.
        warm_up: Depth of 1F1B's warm-up, if it is fixed; see ``one_f_one_b``.
        sizes: Samples of each micro-batch, in the data's order, if they are fixed.

    Raises:
        CostError: The batch is empty, a sequence does not have one entry a stage or sample, or the
            layout is unknown.
    """

    model: CostModel
    lengths: tuple[int, ...]
    num_stages: int
    layout: Layout = Layout.PADDED
    link: Link = field(default_factory=Link)
    overlap: bool = True
    slowdown: tuple[float, ...] | None = None
    capacity_bytes: tuple[float, ...] | None = None
    forbidden_cuts: frozenset[int] = field(default_factory=frozenset)
    max_tokens: float = math.inf
    sessions: tuple[Hashable, ...] | None = None
    reorder: bool = True
    order: str = "searched"
    partition: Partition | None = None
    warm_up: tuple[int, ...] | float | None = None
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layout not in tuple(Layout):
            message = (
                f"layout={self.layout!r} is not known. Rule: one of {', '.join(Layout)}. Remedy: "
                "'padded' if the samples of a micro-batch are one tensor with a dim of samples"
            )
            raise CostError(message)
        object.__setattr__(self, "layout", Layout(self.layout))
        object.__setattr__(self, "forbidden_cuts", frozenset(self.forbidden_cuts))
        for name in ("lengths", "slowdown", "capacity_bytes", "sessions", "warm_up", "sizes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                object.__setattr__(self, name, tuple(value))
        for name, number in (
            ("slowdown", self.num_stages),
            ("capacity_bytes", self.num_stages),
            ("sessions", len(self.lengths)),
        ):
            value = getattr(self, name)
            if value is not None and len(value) != number:
                message = (
                    f"{name} has {len(value)} entries. Rule: one for each of the {number} "
                    f"{'samples' if name == 'sessions' else 'stages'}. Remedy: give all of them"
                )
                raise CostError(message)
        if self.partition is not None:
            have = self.partition.num_stages, self.partition.num_layers
            if have != (self.num_stages, len(self.model.layers)):
                message = (
                    f"partition={self.partition} does not fit {self.num_stages} stages and the "
                    f"{len(self.model.layers)} layers of the cost model. Rule: both are of the "
                    "same network. Remedy: measure the costs of this network again"
                )
                raise CostError(message)
        if not self.lengths or min(self.lengths) < 1:
            message = (
                f"lengths={list(self.lengths)} make no batch. Rule: one sample or more, each of 1 "
                "token or more. Remedy: leave empty samples out"
            )
            raise CostError(message)

    def shapes(self, formation: Formation) -> tuple[Shape, ...]:
        """Return the shape of each micro-batch."""
        make = Shape.packed if self.layout is Layout.PACKED else Shape.padded
        return tuple(make([self.lengths[i] for i in part]) for part in formation.samples)

    def step_costs(self, partition: Partition, formation: Formation) -> StepCosts:
        """Return the costs of a step, by position of the micro-batches."""
        return self.model.step_costs(partition, self.shapes(formation), slowdown=self.slowdown)

    def whole_times(self) -> tuple[TimeModel, TimeModel]:
        """Return the forward and the backward of the whole network."""
        whole = Partition((0,), len(self.model.layers))
        return self.model.stage_times(whole)[0]

    def stage_problem(self, shapes: Sequence[Shape], in_flight: Sequence[int]) -> StageProblem:
        """Return what decides on the partition, for the mean micro-batch.

        Args:
            shapes: Of the micro-batches; memory is for the largest.
            in_flight: Micro-batches in flight on each stage.
        """
        layers = self.model.layers
        mean = Shape(
            sum(shape.tokens for shape in shapes) / len(shapes),
            sum(shape.squares for shape in shapes) / len(shapes),
        )
        cut_s = None
        if not self.overlap:  # Otherwise transfers run beside the computation.
            sent = [0.0, *(layer.output_bytes_per_token for layer in layers[:-1])]
            rate, latency_s = self.link.bandwidth_bytes_per_s, self.link.latency_s
            cut_s = tuple(each * mean.tokens / rate + latency_s for each in sent)
        memory = None
        if self.capacity_bytes is not None:
            most = max(shape.tokens for shape in shapes)
            memory = LayerMemory(
                static_bytes=tuple(layer.static_bytes for layer in layers),
                activation_bytes=tuple(most * x.activation_bytes_per_token for x in layers),
                in_flight=tuple(in_flight),
                capacity_bytes=self.capacity_bytes,
                recomputed_bytes=tuple(most * x.recomputed_bytes_per_token for x in layers),
            )
        return StageProblem(
            costs_s=tuple(x.forward.seconds(mean) + x.backward.seconds(mean) for x in layers),
            num_stages=self.num_stages,
            slowdown=self.slowdown,
            cut_s=cut_s,
            forbidden_cuts=self.forbidden_cuts,
            memory=memory,
        )

    def in_flight_limit(self, partition: Partition, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Return how many micro-batches each stage can hold; at least one, at most all."""
        m = len(shapes)
        if self.capacity_bytes is None:
            return (m,) * self.num_stages
        most = max(shape.tokens for shape in shapes)
        limits = []
        for layers, capacity in zip(partition.ranges, self.capacity_bytes, strict=True):
            room = capacity - sum(self.model.layers[k].static_bytes for k in layers)
            each = most * sum(self.model.layers[k].activation_bytes_per_token for k in layers)
            limits.append(max(1, min(m, int(room // each) if each else m)))
        return tuple(limits)
