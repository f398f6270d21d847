"""Complete plans of a step, with the time that they predict.

Three ways to form micro-batches: equal runs of samples (what a strategy does that knows no costs),
balanced runs of samples, and samples *formed* by cost. Each as it is, with a deeper warm-up, in a
searched order, and with the layers split by simulation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import TypeAlias

import numpy as np

from pipeswift_lightning.plan.bottleneck import PartitionError
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.formation import Formation, form_in_order, form_padded
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.joint_partition import StepShape, simulated_partition
from pipeswift_lightning.plan.microbatches import MicroBatchError, split_batch_size
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.orders.sessions import session_groups
from pipeswift_lightning.plan.orders.warm_up import find_order_and_warm_up, standard_depths
from pipeswift_lightning.plan.packing import StageRates, pack
from pipeswift_lightning.plan.partition import Partition, best_partition
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s, simulate
from pipeswift_lightning.plan.timeline import Timeline
from pipeswift_lightning.plan.workload import Layout, Workload

__all__ = ["Candidate", "plans"]

_EQUAL = "equal runs of samples"
_GIVEN = "given runs of samples"
_DEEPEST = 2.0  # Depth of warm-up above which little more is gained; see one_f_one_b.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One complete plan and its prediction.

    Args:
        name: What it is, in a few words.
        partition: Layers of each stage.
        formation: Samples of each micro-batch, in the order in which they run.
        schedule_name: A key of ``SCHEDULES``.
        warm_up: Depth of each stage's warm-up; None where the schedule has none.
        costs: Costs by position in the order.
        step_s: Predicted makespan.
        reorders: Whether samples run in another order than the data's.
        order: How the micro-batches were ordered: ``"fifo"``, as they were formed, or as the
            workload asks.
        is_plain: Whether it is what runs when no costs are known: equal runs of samples, in
            order, with the standard warm-up.
    """

    name: str
    partition: Partition
    formation: Formation
    schedule_name: str
    warm_up: tuple[int, ...] | None
    costs: StepCosts
    step_s: float
    reorders: bool
    order: str = "fifo"
    is_plain: bool = False

    def summary(self) -> dict[str, object]:
        """Return the plan in numbers, as JSON can hold them."""
        return {
            "name": self.name,
            "schedule": self.schedule_name,
            "starts": list(self.partition.starts),
            "warm_up": None if self.warm_up is None else list(self.warm_up),
            "micro_batches": [list(part) for part in self.formation.samples],
            "predicted_step_s": self.step_s,
        }

    def timeline(self, workload: Workload) -> Timeline:
        """Return the predicted timeline."""
        m = len(self.formation.samples)
        schedule = _schedule(self.schedule_name, workload.num_stages, m, self.warm_up)
        return simulate(schedule, self.costs, link=workload.link, overlap=workload.overlap)


def plans(
    workload: Workload,
    schedule_name: str,
    num_micro_batches: int,
    *,
    evaluations: int | None,
    failures: dict[str, PartitionError | MicroBatchError],
    plain: bool = False,
) -> list[Candidate]:
    """Return the plans of one schedule and number of micro-batches that can run.

    Args:
        workload: What has to be planned.
        schedule_name: A key of ``SCHEDULES``.
        num_micro_batches: Number of micro-batches.
        evaluations: Budget of each search; None takes each one's own.
        failures: Gets what cannot run, and why.
        plain: Return the first of all alone: equal runs of samples in order.
    """
    ways: dict[str, _Way] = {_EQUAL: _equal_runs}
    if workload.sizes is not None:
        ways = {_GIVEN: _given_runs}
    else:
        ways["balanced runs of samples"] = _balanced_runs
    if workload.reorder and workload.sessions is None and workload.sizes is None:
        ways["formed"] = _formed
        if workload.layout is Layout.PACKED and schedule_name == "1f1b":
            ways["formed for a deep warm-up"] = _formed_deep
    found: list[Candidate] = []
    if plain:
        ways = dict(list(ways.items())[:1])
    for label, form in ways.items():
        name = f"{schedule_name}, {num_micro_batches} micro-batches, {label}"
        try:
            formation = form(workload, num_micro_batches, evaluations)
            planner = _Planner(workload, schedule_name, formation, evaluations)
            mine = planner.candidates(name, reorders=form in (_formed, _formed_deep))
            found += islice(mine, 1) if plain else mine
        except (PartitionError, MicroBatchError) as failure:
            failures[name] = failure
    return found


# Batch after batch asks for the same few.
@lru_cache(maxsize=256)
def _schedule(name: str, stages: int, m: int, warm_up: tuple[int, ...] | None) -> Schedule:
    return build_schedule(name, stages, m, warm_up=warm_up)


_Way: TypeAlias = Callable[[Workload, int, int | None], Formation]


class _Planner:
    """Plans of one formation under one schedule."""

    def __init__(
        self,
        workload: Workload,
        schedule_name: str,
        formation: Formation,
        evaluations: int | None,
    ) -> None:
        self.workload, self.schedule_name = workload, schedule_name
        self.formation, self.evaluations = formation, evaluations
        self.shapes = workload.shapes(formation)
        self.m, self.stages = len(self.shapes), workload.num_stages
        self.one_f_one_b = schedule_name == "1f1b"
        self.depths = self._depths() if self.one_f_one_b else (self.m,) * self.stages
        self.free_warm_up = self.one_f_one_b and workload.warm_up is None

    def _depths(self) -> tuple[int, ...]:
        wanted = self.workload.warm_up
        if wanted is None or isinstance(wanted, int | float):
            return standard_depths(self.stages, self.m, wanted or 1.0)
        return tuple(min(depth, self.m) for depth in wanted)

    def candidates(self, name: str, *, reorders: bool) -> Iterator[Candidate]:
        """Yield the plan as it is, with a deeper warm-up, and in a searched order."""
        partition = self.workload.partition or best_partition(
            self.workload.stage_problem(self.shapes, self.depths)
        )
        warm_up = self.depths if self.one_f_one_b else None
        plain = self._candidate(name, partition, range(self.m), warm_up, reorders=reorders)
        yield replace(plain, is_plain=name.endswith((_EQUAL, _GIVEN)))
        yield from self._refined(plain, reorders=reorders)
        deep = self.depths
        if self.free_warm_up:
            deep = self._within_memory(partition, standard_depths(self.stages, self.m, _DEEPEST))
            if deep != warm_up:
                title = f"{name}, warm-up {' '.join(map(str, deep))}"
                yield self._candidate(title, partition, range(self.m), deep, reorders=reorders)
        if self.workload.reorder and self.m > 1 and self.workload.order != "fifo":
            searched = self._searched(name, partition, self.depths)
            yield searched
            yield from self._refined(searched, reorders=True)
            if self.evaluations is not None and deep != self.depths:
                yield self._searched(name, partition, deep)

    def _searched(self, name: str, partition: Partition, depths: tuple[int, ...]) -> Candidate:
        costs, work = self.workload.step_costs(partition, self.formation), self.workload
        warm_up: tuple[int, ...] | None
        sessions = None
        if work.sessions is not None:
            parts = [[work.sessions[i] for i in part] for part in self.formation.samples]
            sessions = session_groups(parts)
        method = work.order
        if self.free_warm_up and self.evaluations is None and method == "searched":
            deepest = standard_depths(self.stages, self.m, _DEEPEST)
            limit = self._within_memory(partition, deepest)
            both = find_order_and_warm_up(
                costs, limit, link=work.link, overlap=work.overlap, sessions=sessions
            )
            order, warm_up = both.order, both.warm_up
        else:
            warm_up = depths if self.one_f_one_b else None
            evaluator = evaluator_for(self.schedule_name, self.stages, self.m, warm_up=warm_up)
            order = find_order(
                evaluator,
                costs,
                method=method,
                link=work.link,
                overlap=work.overlap,
                sessions=sessions,
                evaluations=self.evaluations,
            ).order
        title = f"{name}, ordered" if method == "searched" else f"{name}, {method}"
        if warm_up is not None and warm_up != self.depths:
            title += f", warm-up {' '.join(map(str, warm_up))}"
        found = self._candidate(title, partition, order, warm_up, reorders=True)
        return replace(found, order=method)

    def _refined(self, plan: Candidate, *, reorders: bool) -> Iterator[Candidate]:
        """Yield the plan with the partition of the least simulated step, if that is another."""
        work, shapes = self.workload, self.workload.shapes(plan.formation)
        if work.partition is not None:
            return
        forward, backward = work.whole_times()
        times = np.array([forward.seconds(x) + backward.seconds(x) for x in shapes])
        problem = work.stage_problem(shapes, plan.warm_up or self.depths)
        mean = times.mean()
        if not mean:
            return
        ratio = sum(map(backward.seconds, shapes)) / max(sum(map(forward.seconds, shapes)), 1e-300)
        sent = [0.0, *(layer.output_bytes_per_token for layer in work.model.layers[:-1])]
        tokens = float(np.mean([shape.tokens for shape in shapes]))
        shape = StepShape(
            scales=tuple((times / mean).tolist()),
            backward_ratio=ratio,
            cut_bytes=tuple(each * tokens for each in sent) if any(sent) else None,
            link=work.link,
            overlap=work.overlap,
        )
        problem = replace(
            problem, costs_s=tuple(c / (1 + ratio) for c in problem.costs_s), cut_s=None
        )
        evaluator = evaluator_for(self.schedule_name, self.stages, self.m, warm_up=plan.warm_up)
        partition, _ = simulated_partition(problem, evaluator, shape)
        if partition != plan.partition:
            formation = plan.formation
            costs = work.step_costs(partition, formation)
            name = f"{plan.name}, layers by simulation"
            step_s = self._step_s(costs, plan.warm_up)
            yield replace(
                plan, name=name, partition=partition, costs=costs, step_s=step_s, reorders=reorders
            )

    def _candidate(
        self,
        name: str,
        partition: Partition,
        order: Sequence[int],
        warm_up: tuple[int, ...] | None,
        *,
        reorders: bool,
    ) -> Candidate:
        formation = self.formation.reordered(order)
        costs = self.workload.step_costs(partition, formation)
        return Candidate(
            name=name,
            partition=partition,
            formation=formation,
            schedule_name=self.schedule_name,
            warm_up=warm_up,
            costs=costs,
            step_s=self._step_s(costs, warm_up),
            reorders=reorders,
        )

    def _step_s(self, costs: StepCosts, warm_up: tuple[int, ...] | None) -> float:
        schedule = _schedule(self.schedule_name, self.stages, self.m, warm_up)
        return makespan_s(schedule, costs, link=self.workload.link, overlap=self.workload.overlap)

    def _within_memory(self, partition: Partition, depths: Sequence[int]) -> tuple[int, ...]:
        limits = self.workload.in_flight_limit(partition, self.shapes)
        falling = accumulate(map(min, depths, limits), min)
        return tuple(falling)


def _equal_runs(workload: Workload, m: int, _: int | None) -> Formation:
    sizes = split_batch_size(len(workload.lengths), m)
    bounds = pairwise(accumulate(sizes, initial=0))
    formation = Formation(tuple(tuple(range(a, b)) for a, b in bounds))
    most = max(shape.tokens for shape in workload.shapes(formation))
    if most > workload.max_tokens:
        message = (
            f"a micro-batch has {most:g} tokens. Rule: at most {workload.max_tokens:g}. Remedy: "
            "use more micro-batches, or form them by length"
        )
        raise MicroBatchError(message)
    return formation


def _given_runs(workload: Workload, m: int, _: int | None) -> Formation:
    bounds = pairwise(accumulate((workload.sizes or ())[:m], initial=0))
    return Formation(tuple(tuple(range(a, b)) for a, b in bounds))


def _balanced_runs(workload: Workload, m: int, _: int | None) -> Formation:
    forward, backward = workload.whole_times()
    both = replace(forward.plus(backward), fixed_s=0.0)
    costs = [both.seconds(shape) for shape in workload.shapes(_alone(workload))]
    formation = form_in_order(costs, m)
    most = max(shape.tokens for shape in workload.shapes(formation))
    if most > workload.max_tokens:
        return _equal_runs(workload, m, None)
    return formation


def _formed(workload: Workload, m: int, evaluations: int | None) -> Formation:
    return _formed_for(workload, m, evaluations, 1.0)


def _formed_deep(workload: Workload, m: int, evaluations: int | None) -> Formation:
    return _formed_for(workload, m, evaluations, _DEEPEST)


def _formed_for(workload: Workload, m: int, evaluations: int | None, warm_up: float) -> Formation:
    forward, backward = workload.whole_times()
    p, n = workload.num_stages, len(workload.lengths)
    both = forward.plus(backward)
    if workload.layout is Layout.PADDED:
        return form_padded(
            workload.lengths,
            m,
            num_stages=p,
            cost=lambda counts, longest: (
                both.fixed_s + counts * (both.token_s * longest + both.square_s * longest * longest)
            ),
            max_tokens=workload.max_tokens,
        )
    alone = workload.shapes(_alone(workload))
    bare = replace(both, fixed_s=0.0)
    costs = [bare.seconds(shape) / p for shape in alone]
    total = sum(costs) * p
    share = sum(forward.seconds(x) for x in alone) - n * forward.fixed_s
    forward_rate = share / total if total else 0.5
    slow = workload.slowdown or (1.0,) * p
    rates = StageRates(
        forward=tuple(forward_rate * by for by in slow),
        backward=tuple((1 - forward_rate) * by for by in slow),
        fixed_forward_s=forward.fixed_s / p,
        fixed_backward_s=backward.fixed_s / p,
        latency_s=workload.link.latency_s,
    )
    return pack(
        costs,
        evaluator_for("1f1b", p, m, warm_up=warm_up),
        rates,
        tokens=workload.lengths,
        max_tokens=workload.max_tokens,
        evaluations=evaluations,
    ).formation


def _alone(workload: Workload) -> Formation:
    return Formation(tuple((i,) for i in range(len(workload.lengths))))
