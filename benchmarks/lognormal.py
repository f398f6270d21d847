"""Race steps planned from profiled costs against torch.distributed.pipelining's 1F1B.

    python -m benchmarks.lognormal                     # sleeping stages on 2 and 4 ranks, real on 2
    python -m benchmarks.lognormal --cases sleep --ranks 2 --rounds 9
    python -m benchmarks.lognormal --ablation          # what each choice gives, on uneven layers

A batch is 32 sequences of lognormal lengths (median 128, sigma 0.7, at most 512), 8 micro-batches;
there are three batches, that take turns. Both sides have the same layers on each stage, and the
same loss, a mean over tokens. The peer runs equal runs of samples padded to the cap, or to the
batch's longest, or packed: samples balanced over 8 rows (the longest first, each to the emptiest)
and padded to the longest row. Ours is planned by ``choose_plan`` from costs that the profiler
measures in the same run, on the first rank, while the others measure too.

A round is one step of each side, in rotating order, from a common start to the end of the last
rank. Before that, gradients are compared. Columns are medians with quartiles; ``error`` is
measured / predicted - 1 of our steps: as predicted from the profile alone, and (``scaled``) as a
run with ``costs="measure"`` predicts from its 9th step on, with each stage's costs scaled to what
it was busy in the steps before. ``plan`` is how long planning one batch takes within training.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lognormal_sides import (
    CASES,
    Case,
    Data,
    OurSide,
    PeerSide,
    packed_runs,
    padded_runs,
    tell,
)
from benchmarks.racing import Step, compare_gradients, gathered, slowest, table, timed
from benchmarks.ranks import run_ranks, spread
from pipeswift_lightning.plan.calibration import counts, slowdown_of
from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.formation import Formation, form_to_targets
from pipeswift_lightning.plan.microbatches import MicroBatches, split_batch_size
from pipeswift_lightning.plan.mock import sample_lengths
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.orders.warm_up import standard_depths
from pipeswift_lightning.plan.partition import Partition, uniform_partition
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.search import choose_plan
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.plan.workload import Layout, Workload
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.profiler import (
    ProfileOptions,
    Subject,
    measure_overhead,
    profile_network,
    shared_link,
)
from pipeswift_lightning.runtime.transport import C10dTransport

SAMPLES, MICRO_BATCHES, CAP, BATCHES = 32, 8, 512, 3
RUNS = (("sleep", 2), ("sleep", 4), ("real", 2))
_TOLERANCE = 1e-6
# Rows of so many samples of so many tokens: what micro-batches of these batches look like.
_SHAPES = ((1, 96), (1, 256), (1, 512), (2, 128), (2, 256), (4, 64), (4, 128), (4, 224), (8, 96))
_REPEATS = 9
_STEPS = 8  # before the strategy scales its costs


@dataclass(slots=True)
class Race:
    """Seconds of each side's steps, by round, and what was predicted of ours."""

    case: str
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, list[float]] = field(default_factory=dict)
    scaled: dict[float, float] = field(default_factory=dict)
    plan_s: list[float] = field(default_factory=list)
    difference: float = 0.0

    def rows(self) -> list[tuple[str, ...]]:
        """Return the lines of the table of sides."""
        ours = self.seconds["ours"]
        predicted = self.predicted["ours"]
        errors = [
            statistics.median(s / p - 1 for s, p in zip(ours, each, strict=True))
            for each in (predicted, [self.scaled[p] for p in predicted])
        ]
        cells = [self.case, str(self.ranks), spread([1e3 * s for s in ours], 0)]
        for peer in ("cap", "longest", "packed"):
            ratios = [a / b for a, b in zip(ours, self.seconds[peer], strict=True)]
            cells.append(spread(ratios, 3))
        plan = f"{1e3 * statistics.median(self.plan_s):.0f}"
        said = (f"{100 * error:+.1f} %" for error in errors)
        return [(*cells, *said, plan, f"{self.difference:.0e}")]

    def ablation(self) -> list[tuple[str, ...]]:
        """Return the lines of the table of choices."""
        first, lines = next(iter(self.seconds)), []
        for name, seconds in self.seconds.items():
            predicted = self.predicted[name]
            pairs = [
                [a / b for a, b in zip(x[name], x[first], strict=True)]
                for x in (self.seconds, self.predicted)
            ]
            error = statistics.median(s / p - 1 for s, p in zip(seconds, predicted, strict=True))
            lines.append(
                (
                    str(self.ranks),
                    name,
                    spread([1e3 * s for s in seconds], 0),
                    spread(pairs[0], 3),
                    f"{statistics.median(pairs[1]):.3f}",
                    f"{100 * error:+.1f} %",
                )
            )
        return lines


_SIDES = (
    "case", "ranks", "ours ms", "/ cap", "/ longest", "/ packed", "error", "scaled", "plan ms",
    "grad",
)  # fmt: skip
_CHOICES = ("ranks", "choices", "ms", "/ first, measured", "predicted", "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--ablation", action="store_true")
    options = parser.parse_args()
    if options.ablation:
        runs = [("uneven", ranks) for ranks in options.ranks or (2, 4)]
    else:
        runs = [
            (case, ranks)
            for case, ranks in RUNS
            if case in (options.cases or CASES) and ranks in (options.ranks or (2, 4))
        ]
    races: list[Race] = [
        race for case, ranks in runs for race in run_ranks(_race, ranks, case, options)
    ]
    if options.ablation:
        print(table([_CHOICES, *(line for race in races for line in race.ablation())]))
    else:
        print(table([_SIDES, *(line for race in races for line in race.rows())]))


def _race(
    groups: MeshGroups, report: Callable[[Race], None], name: str, options: argparse.Namespace
) -> None:
    ranks = groups.mesh.num_stages
    transport = C10dTransport(groups, torch.device("cpu"))
    link = shared_link(transport, ranks, groups.pipeline)
    overhead_s = measure_overhead(transport, ranks, link, groups.pipeline)
    dist.barrier()
    # The first rank's counts.
    model = replace(_profiled(CASES[name]), overhead_s=overhead_s)
    race = Race(name, ranks)
    sides = []
    for seed, lengths in enumerate(_lengths(seed) for seed in range(BATCHES)):
        workload = _from_first(
            lambda lengths=lengths: Workload(
                model=model,
                lengths=lengths,
                num_stages=ranks,
                layout=Layout.PACKED,
                link=link or Link(),
            )
        )
        data = Data.of(lengths, CASES[name].width, seed)
        make = _choices if options.ablation else _sides
        sides.append(make(CASES[name], workload, data, groups, race))
    _run(sides, options.rounds, race)
    if groups.coordinate.stage == 0:
        report(race)


def _lengths(seed: int) -> tuple[int, ...]:
    return sample_lengths(SAMPLES, median=128, spread=0.7, longest=CAP, seed=seed)


def _from_first(make: Any) -> Any:
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def _profiled(case: Case) -> CostModel:
    """Measure the layers, while the other ranks do too: as in a step, all use the machine."""
    network = case.stage(range(len(case.layers)))

    def run(packed: tuple[torch.Tensor, tuple[int, ...]]) -> torch.Tensor:
        tell(network, packed[1])
        return network(packed[0]).pow(2).mean()

    rows = [(torch.randn(1, k * n, case.width), (n,) * k) for k, n in _SHAPES]
    subject = Subject(network, list(network), run, torch.device("cpu"))
    profile = profile_network(
        subject, rows, shapes=_SHAPES, options=ProfileOptions(repeats=_REPEATS)
    )
    return profile.model()


_Built = list[tuple[str, Step, float]]


def _sides(case: Case, workload: Workload, data: Data, groups: MeshGroups, race: Race) -> _Built:
    """Build ours and the peer's, all with the same layers on each stage."""
    partition = uniform_partition(len(case.layers), groups.mesh.num_stages)
    workload = replace(workload, partition=partition)
    plan = _from_first(
        lambda: choose_plan(workload, num_micro_batches=MICRO_BATCHES, schedules=["1f1b"]).chosen
    )
    start_s = time.process_time()
    choose_plan(workload, num_micro_batches=MICRO_BATCHES, evaluations=50)
    race.plan_s.append(time.process_time() - start_s)
    layers = partition.ranges[groups.coordinate.stage]
    lengths = workload.lengths
    balanced = form_to_targets(lengths, [sum(lengths) / MICRO_BATCHES] * MICRO_BATCHES)
    peers = {
        "cap": padded_runs(data, MICRO_BATCHES, CAP),
        "longest": padded_runs(data, MICRO_BATCHES, max(lengths)),
        "packed": packed_runs(data, balanced.samples, max(balanced.loads(lengths))),
    }
    ours = OurSide(case, plan, data, groups)
    race.scaled[plan.step_s] = _scaled_s(ours, plan, workload)
    built: _Built = [("ours", ours, plan.step_s)]
    for name, parts in peers.items():
        peer = PeerSide(case, layers, parts, data, groups)
        for _ in range(2):
            timed(peer)
        difference = compare_gradients(ours.module, peer.module, _TOLERANCE)
        race.difference = max(race.difference, *gathered(difference))
        built.append((name, peer, 0.0))
    return built


def _scaled_s(ours: OurSide, plan: Candidate, workload: Workload) -> float:
    """Predict the plan's step with the factors that the strategy would plan with from now on."""
    stage, factors = ours.stage, []
    for step in range(1, _STEPS + 1):
        timed(ours)
        if counts(step):
            more_s = workload.model.overhead_s
            factors.append(slowdown_of(ours.busy_s(), plan.costs, stage, overhead_s=more_s))
    slowdown = tuple(gathered(statistics.median(factors)))
    costs = replace(workload, slowdown=slowdown).step_costs(plan.partition, plan.formation)
    number = len(plan.formation.samples)
    schedule = build_schedule(plan.schedule_name, len(slowdown), number, warm_up=plan.warm_up)
    return makespan_s(schedule, costs, link=workload.link)


def _choices(case: Case, workload: Workload, data: Data, groups: MeshGroups, _: Race) -> _Built:
    """Build our step with one choice more from plan to plan."""
    plans = _from_first(lambda: _ablated(workload))
    built: _Built = []
    for name, plan in plans.items():
        side = OurSide(case, plan, data, groups)
        timed(side)
        built.append((name, side, plan.step_s))
    return built


def _ablated(workload: Workload) -> dict[str, Candidate]:
    p, m, lengths = workload.num_stages, MICRO_BATCHES, workload.lengths
    runs = MicroBatches(split_batch_size(len(lengths), m)).ranges
    random = Formation(tuple(tuple(part) for part in runs))
    formed = form_to_targets(lengths, [sum(lengths) / m] * m)
    exact = choose_plan(workload, num_micro_batches=m, schedules=["1f1b"], evaluations=0)
    uniform, split = uniform_partition(len(workload.model.layers), p), exact.plain.partition
    once, deep = standard_depths(p, m), standard_depths(p, m, 2.0)

    def plan(partition: Partition, formation: Formation, order: str, depths: Any) -> Candidate:
        costs = workload.step_costs(partition, formation)
        evaluator = evaluator_for("1f1b", p, m, warm_up=depths)
        found = find_order(evaluator, costs, method=order, link=workload.link).order
        ordered = formation.reordered(found)
        costs = workload.step_costs(partition, ordered)
        step_s = makespan_s(build_schedule("1f1b", p, m, warm_up=depths), costs, link=workload.link)
        return replace(
            exact.chosen, partition=partition, formation=ordered, schedule_name="1f1b",
            warm_up=depths, costs=costs, step_s=step_s,
        )  # fmt: skip

    chosen = choose_plan(workload, num_micro_batches=m, schedules=["1f1b"]).chosen
    return {
        "uniform split, random, fifo, 1x": plan(uniform, random, "fifo", once),
        "exact split": plan(split, random, "fifo", once),
        "exact, balanced": plan(split, formed, "fifo", once),
        "exact, random, heaviest first": plan(split, random, "heaviest_first", once),
        "exact, random, hill": plan(split, random, "hill", once),
        "exact, random, searched": plan(split, random, "searched", once),
        "exact, random, fifo, 2x": plan(split, random, "fifo", deep),
        "exact, random, searched, 2x": plan(split, random, "searched", deep),
        "exact, balanced, searched, 2x": plan(split, formed, "searched", deep),
        "all together": chosen,
    }


def _run(sides: list[_Built], rounds: int, race: Race) -> None:
    gc.collect()
    gc.freeze()  # What is left from set-up is no garbage of any side.
    spans: dict[str, list[Any]] = {name: [] for name, _, _ in sides[0]}
    race.predicted = {name: [] for name in spans}
    for index in range(rounds):
        built = sides[index % len(sides)]
        turn = index % len(built)
        for name, step, predicted_s in built[turn:] + built[:turn]:
            spans[name].append(timed(step))
            race.predicted[name].append(predicted_s)
    for name, mine in spans.items():
        race.seconds[name] = slowest(mine)[0]


if __name__ == "__main__":
    main()
