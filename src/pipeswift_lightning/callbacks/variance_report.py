"""Why steps are slow or uneven: one window of steps, taken apart."""

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from pipeswift_lightning.callbacks.step_sums import StepSums, mean_costs
from pipeswift_lightning.plan.clocks import align
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.plan.timeline import Event, Timeline
from pipeswift_lightning.plan.transfers import transfers

__all__ = ["Cause", "CauseKind", "Spread", "StageWindow", "VarianceReport"]

_RAISED, _NEGLIGIBLE = 1.25, 0.01
_QUIET = 0.1  # The share of steps that counts as undisturbed.


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and variance of some times.

    Example:
        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(mean_s=2.0, variance_s2=1.0)
    """

    mean_s: float
    variance_s2: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> "Spread":
        """Return the mean and the sample variance (0 for one value)."""
        variance_s2 = statistics.variance(values_s) if values_s[1:] else 0.0
        return cls(statistics.fmean(values_s), variance_s2)

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        return self.variance_s2**0.5 / self.mean_s if self.mean_s > 0 else 0.0


@dataclass(slots=True)
class StageWindow:
    """What one stage noted in a window of steps; what is gathered.

    Attributes:
        steps_s: Length of each step.
        compute_s: Its computation, without garbage collection.
        data_wait_s: Its wait for the batch, likewise.
        garbage_s: Its garbage collection, wherever that fell.
        sums: Computation by kind and micro-batch, without garbage collection.
        host: Whose clock its events are on.
        samples: Events of some of the steps, by the step's place in the window.
    """

    steps_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    garbage_s: list[float] = field(default_factory=list)
    sums: StepSums = field(default_factory=StepSums)
    host: str = field(default_factory=socket.gethostname)
    samples: dict[int, tuple[Event, ...]] = field(default_factory=dict)


class CauseKind(StrEnum):
    """What makes steps longer than they need be."""

    SLOW_STAGE = "slow_stage"
    SLOW_LINK = "slow_link"
    DATA_LOADING = "data_loading"
    GARBAGE_COLLECTION = "garbage_collection"
    JITTER = "jitter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause.

    Attributes:
        kind: Which.
        stage: Where: the stage; of a link, its sender.
        target: Of a link, its receiver.
        cost_s: How much longer the mean step is for it.
        excess_s: Of a slow stage, its computation in a step beyond the others' median; of a link,
            a message's transit beyond the other links'; of the others, seconds of a mean step.
    """

    kind: CauseKind
    stage: int
    target: int | None = None
    cost_s: float
    excess_s: float

    def explain(self, step_s: float) -> str:
        """Return a sentence for the user."""
        size = f"makes a step {1e3 * self.cost_s:.1f} ms longer ({self.cost_s / step_s:.0%})"
        excess = f"{1e3 * self.excess_s:.1f} ms"
        match self.kind:
            case CauseKind.SLOW_STAGE:
                return (
                    f"stage {self.stage} computes {excess} a step more than the others, in every "
                    f"step, which {size}. Remedy: a layer less on it (partition=...), or look "
                    "whether its device is slower or shared"
                )
            case CauseKind.SLOW_LINK:
                return (
                    f"messages from stage {self.stage} to stage {self.target} take {excess} longer "
                    f"than on the other links, which {size}. Remedy: place both stages on one "
                    "host, a cut where less is sent, or look at the link"
                )
            case CauseKind.DATA_LOADING:
                return (
                    f"the wait for the next batch, longest on stage {self.stage}, {size}. Remedy: "
                    "more num_workers in the DataLoader, or cheaper samples"
                )
            case CauseKind.GARBAGE_COLLECTION:
                return (
                    f"Python's garbage collection, most on stage {self.stage}, {size}. Remedy: "
                    "gc.freeze() after set-up, or gc.disable() and a gc.collect() now and then"
                )
            case CauseKind.JITTER:
                return (
                    f"stage {self.stage} computes now fast, now slowly ({excess} a step on "
                    f"average above its fast steps), which {size}. Remedy: look what else runs on "
                    "its host, and whether its device changes its clock"
                )
            case _:
                assert_never(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceReport:
    """One window of steps that followed one schedule.

    Attributes:
        num_steps: Length of the window.
        step: Length of a step, the longest of the stages'.
        stages: Computation of each stage.
        links_s: Median transit of a message by ``(sender, receiver)``, of those waited for.
        causes: The most expensive first.
        before: The report before, if it was of another plan.
    """

    num_steps: int
    step: Spread
    stages: tuple[Spread, ...]
    links_s: dict[tuple[int, int], float]
    causes: tuple[Cause, ...]
    before: "VarianceReport | None" = None

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        windows: Sequence[StageWindow],
        *,
        least_share: float,
        before: "VarianceReport | None" = None,
    ) -> "VarianceReport":
        """Take a window apart.

        Args:
            schedule: That all its steps followed.
            windows: Of each stage.
            least_share: Causes that cost less than this share of a step are left out.
            before: The report of the plan before.
        """
        steps_s = [max(column) for column in zip(*(w.steps_s for w in windows), strict=True)]
        step = Spread.of(steps_s)
        links_s = _links(windows)
        model = _Model(schedule, mean_costs(schedule, [w.sums for w in windows]), links_s)
        found = [
            *_slow_stages(windows, model),
            *_jitter(windows, steps_s),
            *_slow_links(model),
            *_shared(CauseKind.DATA_LOADING, [w.data_wait_s for w in windows]),
            *_shared(CauseKind.GARBAGE_COLLECTION, [w.garbage_s for w in windows]),
        ]
        causes = sorted(
            (c for c in found if c.cost_s > least_share * step.mean_s), key=lambda c: -c.cost_s
        )
        return cls(
            num_steps=len(steps_s),
            step=step,
            stages=tuple(Spread.of(w.compute_s) for w in windows),
            links_s=links_s,
            causes=tuple(causes),
            before=before,
        )

    def scalars(self, prefix: str) -> dict[str, float]:
        """Return what is logged; costs of a kind of cause are added up, 0 if there is none."""
        values: dict[str, float] = {}
        spreads = {"step": self.step, **{f"stage_{i}": s for i, s in enumerate(self.stages)}}
        for name, spread in spreads.items():
            values[f"{prefix}/{name}_mean_s"] = spread.mean_s
            values[f"{prefix}/{name}_variance_s2"] = spread.variance_s2
            values[f"{prefix}/{name}_variation"] = spread.variation
        for (source, target), transit_s in self.links_s.items():
            values[f"{prefix}/link_{source}_to_{target}_s"] = transit_s
        for kind in CauseKind:
            costs = [c.cost_s for c in self.causes if c.kind is kind]
            values[f"{prefix}/{kind.value}_s"] = sum(costs)
        return values

    @property
    def varies_more(self) -> bool:
        """Whether the change of plan has raised the variation by a quarter and more."""
        if self.before is None:
            return False
        return self.step.variation > _RAISED * self.before.step.variation + _NEGLIGIBLE

    def explain_change(self) -> str | None:
        """Say what the change of plan brought; None without one."""
        if self.before is None:
            return None
        old, new = self.before.step, self.step
        raised = ". Remedy: the plan before, if steps need to be even" if self.varies_more else ""
        return (
            f"the plan has changed: a step took {1e3 * old.mean_s:.1f} ms (variation "
            f"{old.variation:.1%}) and takes {1e3 * new.mean_s:.1f} ms ({new.variation:.1%}), "
            f"{new.mean_s / old.mean_s - 1:+.1%}{raised}"
        )


@dataclass(frozen=True, slots=True)
class _Model:
    """The schedule with measured costs: what a step would take if something were otherwise."""

    schedule: Schedule
    costs: StepCosts
    links_s: dict[tuple[int, int], float]

    def step_s(
        self,
        factors: dict[int, float] | None = None,
        links_s: dict[tuple[int, int], float] | None = None,
    ) -> float:
        """Return the makespan, with stages' computation scaled, or other transits."""
        scale = factors or {}
        transit_s = self.links_s if links_s is None else links_s
        inner, ids = range(self.costs.num_stages - 1), range(self.costs.num_micro_batches)

        def scaled(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(scale.get(s, 1.0) * value for value in row) for s, row in enumerate(table)
            )

        # At one byte a second, a message of so many bytes is so many seconds on its way.
        costs = StepCosts(
            forward_s=scaled(self.costs.forward_s),
            backward_s=scaled(self.costs.backward_s),
            activation_bytes=tuple(
                tuple(transit_s.get((s, s + 1), 0.0) for _ in ids) for s in inner
            ),
            gradient_bytes=tuple(tuple(transit_s.get((s + 1, s), 0.0) for _ in ids) for s in inner),
        )
        return makespan_s(self.schedule, costs, link=Link(bandwidth_bytes_per_s=1.0))


def _links(windows: Sequence[StageWindow]) -> dict[tuple[int, int], float]:
    """Return the median transit of each link over the sampled steps."""
    every: dict[tuple[int, int], list[float]] = {}
    for sample in windows[0].samples:
        events = tuple(event for w in windows for event in w.samples[sample])
        timeline = align(Timeline(events, len(windows)), [w.host for w in windows])
        for transfer in transfers(timeline):
            if transfer.transit_s is not None:
                link = transfer.made.stage, transfer.used.stage
                every.setdefault(link, []).append(transfer.transit_s)
    return {link: statistics.median(values) for link, values in sorted(every.items())}


def _quiet(values_s: Sequence[float]) -> float:
    return sorted(values_s)[int(_QUIET * len(values_s))]


def _beyond_others(values: Sequence[float]) -> list[float]:
    """Return each value minus the median of the others; 0 if there are none."""
    return [
        value - statistics.median([*values[:i], *values[i + 1 :]]) if len(values) > 1 else 0.0
        for i, value in enumerate(values)
    ]


def _slow_stages(windows: Sequence[StageWindow], model: _Model) -> list[Cause]:
    """A stage is slow if it computes longer than the others in its fast steps too."""
    quiet = [_quiet(w.compute_s) for w in windows]
    whole_s = model.step_s()
    causes = []
    for stage, excess_s in enumerate(_beyond_others(quiet)):
        if excess_s > 0:
            factor = 1 - excess_s / statistics.fmean(windows[stage].compute_s)
            cost_s = whole_s - model.step_s(factors={stage: max(0.0, factor)})
            causes.append(
                Cause(kind=CauseKind.SLOW_STAGE, stage=stage, cost_s=cost_s, excess_s=excess_s)
            )
    return causes


def _jitter(windows: Sequence[StageWindow], steps_s: Sequence[float]) -> list[Cause]:
    """A stage jitters if its mean is further above its fast steps than the others' are.

    How much of that reaches the step is the slope of the step over the stage's computation.
    """
    above = [statistics.fmean(w.compute_s) - _quiet(w.compute_s) for w in windows]
    causes = []
    for stage, excess_s in enumerate(_beyond_others(above)):
        own_s = windows[stage].compute_s
        if excess_s > 0 and len(set(own_s)) > 1:
            slope = statistics.linear_regression(own_s, steps_s).slope
            cost_s = min(max(slope, 0.0), 1.0) * excess_s
            causes.append(
                Cause(kind=CauseKind.JITTER, stage=stage, cost_s=cost_s, excess_s=excess_s)
            )
    return causes


def _slow_links(model: _Model) -> list[Cause]:
    links = list(model.links_s)
    whole_s = model.step_s()
    causes = []
    for link, excess_s in zip(links, _beyond_others(list(model.links_s.values())), strict=True):
        if excess_s > 0:
            fast = {**model.links_s, link: model.links_s[link] - excess_s}
            cost_s = whole_s - model.step_s(links_s=fast)
            source, target = link
            causes.append(
                Cause(
                    kind=CauseKind.SLOW_LINK,
                    stage=source,
                    target=target,
                    cost_s=cost_s,
                    excess_s=excess_s,
                )
            )
    return causes


def _shared(kind: CauseKind, by_stage: Sequence[Sequence[float]]) -> list[Cause]:
    """All stages wait for the one that takes longest, so each step counts its longest."""
    mean_s = statistics.fmean(max(column) for column in zip(*by_stage, strict=True))
    stage = max(range(len(by_stage)), key=lambda s: sum(by_stage[s]))
    return [Cause(kind=kind, stage=stage, cost_s=mean_s, excess_s=mean_s)]
