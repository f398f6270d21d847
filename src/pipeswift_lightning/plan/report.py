"""A choice in text: the plan, its prediction, what was rejected and why."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel, Shape
from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.partition import solve_partition
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.search import Choice
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import EventKind, Timeline
from pipeswift_lightning.plan.workload import Workload

__all__ = [
    "choice_timelines",
    "describe_choice",
    "draw_together",
    "equal_costs",
    "read_step_costs",
    "schedule_timelines",
]


_INSTANT = Link()


def describe_choice(choice: Choice, workload: Workload, *, most_rejected: int = 12) -> str:
    """Return the plan, the numbers of micro-batches, and the rejected plans.

    Args:
        choice: What was chosen.
        workload: What it was chosen for.
        most_rejected: How many rejected plans to list.
    """
    chosen = choice.chosen
    shapes = workload.shapes(chosen.formation)
    layers = " ".join(f"{r.start}-{r.stop - 1}" for r in chosen.partition.ranges)
    bubble = chosen.timeline(workload).bubble_ratio
    lines = [
        f"plan: {chosen.name}",
        f"predicted step {_time(chosen.step_s)}, predicted bubble {bubble:.1%}",
        f"layers of each stage: {layers}",
        f"samples of each micro-batch, as they run: {' '.join(map(str, chosen.formation.sizes))}",
        f"tokens of each micro-batch: {' '.join(f'{shape.tokens:g}' for shape in shapes)}",
    ]
    if chosen.schedule_name == "forward_only":
        lines.append(
            f"a micro-batch is done after {_time(_mean_completion_s(chosen, workload))}, on average"
        )
    if chosen.warm_up is not None:
        lines.append(f"warm-up of each stage: {' '.join(map(str, chosen.warm_up))}")
    if len(choice.sweep) > 1:
        lines += ["", "micro-batches  best predicted step"]
        lines += [f"{m:13d}  {_time(step_s):>19s}" for m, step_s in choice.sweep]
    lines += ["", "rejected"]
    for other in choice.rejected[:most_rejected]:
        step = "-" if other.step_s is None else _time(other.step_s)
        lines.append(f"{step:>10s}  {other.name}: {other.reason}")
    if len(choice.rejected) > most_rejected:
        lines.append(f"{'':10s}  and {len(choice.rejected) - most_rejected} more")
    unfit = [r for r in choice.rejected[most_rejected:] if r.step_s is None]
    lines += [f"{'-':>10s}  {other.name}: {other.reason}" for other in unfit]
    return "\n".join(lines)


def _mean_completion_s(chosen: Candidate, workload: Workload) -> float:
    last = workload.num_stages - 1
    ends = [
        event.end_s
        for event in chosen.timeline(workload).events
        if event.stage == last and event.kind is EventKind.FORWARD
    ]
    return sum(ends) / len(ends)


def choice_timelines(choice: Choice, workload: Workload) -> dict[str, Timeline]:
    """Return the predicted timelines of 1F1B without cost-awareness and of the plan, by name."""
    return {
        f"first come, first served: {choice.plain.name}": choice.plain.timeline(workload),
        f"plan: {choice.chosen.name}": choice.chosen.timeline(workload),
    }


def schedule_timelines(
    costs: StepCosts,
    schedules: Sequence[Mapping[str, Any]],
    *,
    order: str = "fifo",
    link: Link = _INSTANT,
    overlap: bool = True,
) -> dict[str, Timeline]:
    """Return the predicted timeline of each schedule, by name.

    Args:
        costs: Of the step.
        schedules: ``name`` and, for 1F1B, ``warm_up`` of each; see ``build_schedule``.
        order: How the micro-batches are ordered; see ``find_order``.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on.

    Raises:
        ScheduleError: There is no such schedule.
        OrderError: There is no such order.

    Example:
        >>> list(schedule_timelines(equal_costs(2, 2), [{"name": "1f1b", "warm_up": 2.0}]))
        ['1f1b, warm-up 2.0']
    """
    timelines: dict[str, Timeline] = {}
    for wanted in schedules:
        name, warm_up = wanted["name"], wanted.get("warm_up")
        shape = name, costs.num_stages, costs.num_micro_batches
        evaluator = evaluator_for(*shape, warm_up=warm_up)
        found = find_order(evaluator, costs, method=order, link=link, overlap=overlap)
        schedule = build_schedule(*shape, warm_up=warm_up, order=found.order)
        title = name if warm_up is None else f"{name}, warm-up {warm_up}"
        timelines[title] = simulate(schedule, costs, link=link, overlap=overlap)
    return timelines


def draw_together(timelines: Mapping[str, Timeline], *, width: int = 100) -> str:
    """Return the timelines one below the other, on one scale; the longest is ``width`` wide.

    Example:
        >>> from pipeswift_lightning.plan.schedules import gpipe
        >>> from pipeswift_lightning.plan.simulator import simulate
        >>> short, long = equal_costs(1, 2), equal_costs(1, 2, backward_s=3.0)
        >>> both = {"a": simulate(gpipe(1, 2), short), "b": simulate(gpipe(1, 2), long)}
        >>> print(draw_together(both, width=16))
        a: 6.00 s, bubble 0.0 %
        rank 0 |F0F1B0##B1##| bubble   0.0 %
        b: 8.00 s, bubble 0.0 %
        rank 0 |F0F1B0####B1####| bubble   0.0 %
    """
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    lines: list[str] = []
    for name, timeline in timelines.items():
        share = timeline.makespan_s / longest_s if longest_s else 1.0
        bubble = 100 * timeline.bubble_ratio
        lines.append(f"{name}: {_time(timeline.makespan_s)}, bubble {bubble:.1f} %")
        lines.append(timeline.draw(width=max(1, round(width * share))))
    return "\n".join(lines)


def equal_costs(
    num_stages: int, num_micro_batches: int, *, forward_s: float = 1.0, backward_s: float = 2.0
) -> StepCosts:
    """Return costs with which to look at a schedule alone.

    Example:
        >>> equal_costs(1, 2).backward_s
        ((2.0, 2.0),)
    """
    return StepCosts.uniform(
        num_stages, num_micro_batches, forward_s=forward_s, backward_s=backward_s
    )


def read_step_costs(
    text: str, num_stages: int, num_micro_batches: int, *, shape: tuple[int, int] = (1, 1)
) -> StepCosts:
    """Return the costs of a step from the JSON of step costs, of a cost model or of a profile.

    Args:
        text: The JSON.
        num_stages: Stages into which a model's layers are divided, the slowest as fast as can be.
        num_micro_batches: Micro-batches of a model's step, all alike.
        shape: Samples of each of them, and tokens of each sample.

    Raises:
        CostError: The text is none of these.
        PartitionError: The model has fewer layers than there are to be stages.

    Example:
        >>> from pipeswift_lightning.plan.partition import Partition
        >>> model = CostModel.analytic([1, 1], dim=1, flops_per_s=1.0)
        >>> costs = read_step_costs(model.to_json(), 2, 1, shape=(3, 2))
        >>> costs == model.step_costs(Partition((0, 1), 2), [Shape.padded([2, 2, 2])])
        True
    """
    try:
        data = json.loads(text)
        if "forward_s" in data:
            return StepCosts(**data)
    except CostError:
        raise
    except (ValueError, TypeError) as error:
        message = (
            f"these are no costs: {error}. Rule: the JSON that StepCosts.to_json() or a profile "
            "writes. Remedy: profile the network again"
        )
        raise CostError(message) from error
    model = CostModel.from_json(text)
    each = Shape.padded([shape[1]] * shape[0])
    costs_s = [x.forward.plus(x.backward).seconds(each) for x in model.layers]
    partition = solve_partition(costs_s, num_stages)
    return model.step_costs(partition, [each] * num_micro_batches)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds:.2e} s"
