"""The bubbles of some steps: measured, predicted, and why a stage stands idle."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from pipeswift_lightning.callbacks.step_sums import StepSums, mean_costs
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Timeline

__all__ = ["BubbleReport", "IdleCause", "IdleStage"]

SHARES = ("compute", "communication_wait", "data_wait", "gradient_reduce", "optimizer", "other")
_IMBALANCED = 1.1  # A stage this much busier than the average is the one the others wait for.


class IdleCause(StrEnum):
    """Why a stage stands idle."""

    FILLING = "filling"
    IMBALANCE = "imbalance"
    MESSAGES = "messages"
    WHOLE_STEPS = "whole_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleStage:
    """A stage that stands idle too long.

    Attributes:
        stage: The stage.
        bubble: Its measured bubble.
        cause: The greatest part of it.
        waits_for: The stage it waits for.
        waits_s: Seconds of a step that it waits for a message from its neighbour on that side.
    """

    stage: int
    bubble: float
    cause: IdleCause
    waits_for: int
    waits_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleReport:
    """Means over some steps with one schedule, by stage.

    Steps that every rank runs whole follow no schedule: nothing is predicted of them.

    Attributes:
        num_steps: How many steps.
        step_s: Length of a step in seconds, of the slowest stage.
        measured: Idle share of each stage between first and last computation of the pipeline.
        predicted: The same, simulated with the measured computation times and instant messages.
        balanced: The same, had the computation been shared out equally.
        busy_s: Seconds of computation in a step.
        activation_wait_s: Waits for the stage before.
        gradient_wait_s: Waits for the stage after.
        shares: For each stage, name to share of the step; they sum to 1.
        predicted_shares: The same of the predicted step: its computation and idle time, and the
            measured waits for data, reduction of gradients and update; nothing else.
        memory_bytes: What each stage's process has held at most.
    """

    num_steps: int
    step_s: float
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    balanced: tuple[float, ...]
    busy_s: tuple[float, ...]
    activation_wait_s: tuple[float, ...]
    gradient_wait_s: tuple[float, ...]
    shares: tuple[Mapping[str, float], ...]
    predicted_shares: tuple[Mapping[str, float], ...] = ()
    memory_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule | None, stages: Sequence[StepSums]) -> "BubbleReport":
        """Build the report from the sums of each stage.

        The makespan is the longest of the stages' own spans (in training that of stage 0, which
        begins first and ends last): so clocks that differ between hosts do not matter.
        """
        makespan_s = max(s.mean_s("span") for s in stages)
        ranks = range(len(stages))
        predicted = balanced = None
        if schedule is not None:
            costs = mean_costs(schedule, stages)
            predicted = simulate(schedule, costs)
            balanced = simulate(schedule, _balanced(costs))
        return cls(
            num_steps=stages[0].num_steps,
            step_s=max(s.mean_s("step") for s in stages),
            measured=tuple(
                1 - s.mean_s("compute") / makespan_s if makespan_s > 0 else 0.0 for s in stages
            ),
            predicted=() if predicted is None else tuple(map(predicted.bubble, ranks)),
            balanced=() if balanced is None else tuple(map(balanced.bubble, ranks)),
            busy_s=tuple(s.mean_s("compute") for s in stages),
            activation_wait_s=tuple(s.mean_s("activation_wait") for s in stages),
            gradient_wait_s=tuple(s.mean_s("gradient_wait") for s in stages),
            shares=tuple(_shares(s) for s in stages),
            predicted_shares=()
            if predicted is None
            else tuple(_predicted_shares(predicted, r, s) for r, s in enumerate(stages)),
            memory_bytes=tuple(s.memory_bytes for s in stages),
        )

    def scalars(self, prefix: str) -> dict[str, float]:
        """Return what is logged: ``bubble/stage_0``, ``bubble/share_compute``, and so on."""
        values = {
            f"{prefix}/measured": statistics.fmean(self.measured),
            f"{prefix}/step_s": self.step_s,
        }
        if self.predicted:
            values[f"{prefix}/predicted"] = statistics.fmean(self.predicted)
        by_stage: dict[str, Sequence[float]] = {
            f"{prefix}/stage_{{}}": self.measured,
            f"{prefix}/predicted_stage_{{}}": self.predicted,
            f"{prefix}/stage_{{}}_busy_s": self.busy_s,
            "memory/stage_{}_bytes": self.memory_bytes,
        }
        for kind, every in (("", self.shares), ("predicted_", self.predicted_shares)):
            for name in next(iter(every), ()):
                each = [shares[name] for shares in every]
                values[f"{prefix}/{kind}share_{name}"] = statistics.fmean(each)
                by_stage[f"{prefix}/{kind}share_{name}_stage_{{}}"] = each
        for pattern, numbers in by_stage.items():
            values |= {pattern.format(stage): number for stage, number in enumerate(numbers)}
        return values

    def idle_stages(self, above: float) -> list[IdleStage]:
        """Return the stages whose bubble is above ``above``, the most idle first."""
        order = sorted(range(len(self.measured)), key=lambda s: -self.measured[s])
        return [self._idle(stage) for stage in order if self.measured[stage] > above]

    def _idle(self, stage: int) -> IdleStage:
        parts = {IdleCause.WHOLE_STEPS: self.measured[stage]}
        if self.predicted:
            parts = {
                IdleCause.FILLING: self.balanced[stage],
                IdleCause.IMBALANCE: self.predicted[stage] - self.balanced[stage],
                IdleCause.MESSAGES: self.measured[stage] - self.predicted[stage],
            }
        before, after = self.activation_wait_s[stage], self.gradient_wait_s[stage]
        last = len(self.measured) - 1
        upstream = stage > 0 and (before >= after or stage == last)
        waits_for = stage - 1 if upstream else min(stage + 1, last)
        busiest = max(range(last + 1), key=lambda s: self.busy_s[s])
        cause = max(parts, key=lambda c: parts[c])
        if (
            cause is IdleCause.IMBALANCE
            and busiest != stage
            and self.busy_s[busiest] > _IMBALANCED * statistics.fmean(self.busy_s)
        ):
            waits_for = busiest  # the neighbour waits for it too
        return IdleStage(
            stage=stage,
            bubble=self.measured[stage],
            cause=cause,
            waits_for=waits_for,
            waits_s=before if waits_for < stage else after,
        )

    def explain(self, idle: IdleStage, num_micro_batches: int = 0) -> str:
        """Return a sentence or two for the user."""
        stages = len(self.measured)
        kind = "activations" if idle.waits_for < idle.stage else "gradients"
        start = (
            f"stage {idle.stage} stands idle {idle.bubble:.0%} of the time: it waits for stage "
            f"{idle.waits_for} ({1e3 * idle.waits_s:.1f} ms of each step, for {kind}). "
        )
        match idle.cause:
            case IdleCause.FILLING:
                why = (
                    f"Equal stages would leave {self.balanced[idle.stage]:.0%}: the pipeline fills "
                    f"and drains for {num_micro_batches} micro-batches only. Remedy: more "
                    f"micro_batches (4 a stage, {4 * stages}, is a start), or fewer stages"
                )
            case IdleCause.IMBALANCE:
                others = [b for s, b in enumerate(self.busy_s) if s != idle.waits_for]
                why = (
                    f"Stage {idle.waits_for} computes {1e3 * self.busy_s[idle.waits_for]:.1f} ms a "
                    f"step, the others {1e3 * statistics.fmean(others):.1f} ms on average. Remedy: "
                    f"partition=..., with a layer less on stage {idle.waits_for}"
                )
            case IdleCause.MESSAGES:
                why = (
                    f"Computation explains {self.predicted[idle.stage]:.0%} only; the rest is "
                    "messages and what each micro-batch costs beside its computation. Remedy: "
                    "fewer, larger micro-batches, a cut where less is sent, or a faster link"
                )
            case IdleCause.WHOLE_STEPS:
                why = (
                    "Every rank runs the whole step here, in which each call of a network fills "
                    "and drains the pipeline anew. Remedy: more micro_batches, or a step that "
                    "calls its network once"
                )
            case _:
                assert_never(idle.cause)
        return start + why


def _balanced(costs: StepCosts) -> StepCosts:
    """Return the costs with each micro-batch's work shared out equally over the stages."""

    def level(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        row = tuple(statistics.fmean(column) for column in zip(*table, strict=True))
        return (row,) * len(table)

    return StepCosts(forward_s=level(costs.forward_s), backward_s=level(costs.backward_s))


def _shares(stage: StepSums) -> dict[str, float]:
    total_s = sum(stage.mean_s(name) for name in SHARES)
    return {name: stage.mean_s(name) / total_s if total_s > 0 else 0.0 for name in SHARES}


def _predicted_shares(predicted: Timeline, rank: int, stage: StepSums) -> dict[str, float]:
    around = {name: stage.mean_s(name) for name in ("data_wait", "gradient_reduce", "optimizer")}
    step_s = predicted.makespan_s + sum(around.values())
    parts = {"compute": predicted.busy_s(rank), "communication_wait": predicted.idle_s(rank)}
    return {n: s / step_s if step_s > 0 else 0.0 for n, s in {**parts, **around}.items()}
