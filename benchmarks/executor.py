"""Race our executor against torch.distributed.pipelining, step by step, on gloo ranks.

    python -m benchmarks.executor                  # all cases on 2 and 4 ranks
    python -m benchmarks.executor --quick          # 5 rounds; a smoke test
    python -m benchmarks.executor --cases zero --ranks 2 --rounds 200

Cases: ``sleep`` (forward 20 ms, backward 40 ms: known times, and sleeping ranks do not compete
for cores), ``real`` (transformer layers; with more ranks than cores both sides wait for cores),
``zero`` (a stage that does nothing: the step is all overhead).

Both sides get the same stages, batch, loss and number of micro-batches, split the batch within the
step, and are measured in turn in one run: a round is one step of each, in alternating order, from a
common start to the end of the last rank. Before that, gradients are compared.

Columns: medians with quartiles. ``ratio`` is ours / peer of the same round. ``ideal`` is what
``simulate`` predicts: from the known times (sleep), or from the computations' durations as our
recorder measured them in that step (real). ``us/instr`` is (step - ideal) / the 2 (m + p - 1)
computations of the longest chain. ``cpu us/instr`` is processor time (gloo's threads included)
of the busiest rank over its 2 m computations: unlike the step's time, it hardly depends on what
else runs on the machine.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks, spread
from benchmarks.stages import CASES, Case, OurStep, PeerStep, Step
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.plan.timeline import Event, EventKind
from pipeswift_lightning.runtime.mesh import MeshGroups

MICRO_BATCHES = 8
SCHEDULES = ("1f1b", "gpipe")
_LEAD_S = 0.002  # From announcing the common start to the start: more than a broadcast takes.
_WARM_UP_STEPS = 3
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One line of the table: seconds of each round."""

    case: str
    ranks: int
    schedule: str
    ours_s: list[float]
    peer_s: list[float]
    ours_cpu_s: list[float]
    peer_cpu_s: list[float]
    ideal_s: list[float] | None

    def row(self) -> tuple[str, ...]:
        """Return the cells of the line."""
        chain = 2 * (MICRO_BATCHES + self.ranks - 1)
        ideal = self.ideal_s or [0.0] * len(self.ours_s)
        ours_us = [1e6 * (o - i) / chain for o, i in zip(self.ours_s, ideal, strict=True)]
        peer_us = [1e6 * (p - i) / chain for p, i in zip(self.peer_s, ideal, strict=True)]
        # Durations that our recorder measured are no ideal of the peer's steps.
        shared_ideal = self.ideal_s is None or CASES[self.case].known_s is not None
        return (
            self.case,
            str(self.ranks),
            self.schedule,
            spread([1e3 * s for s in self.ours_s], 2),
            spread([1e3 * s for s in self.peer_s], 2),
            spread([o / p for o, p in zip(self.ours_s, self.peer_s, strict=True)], 3),
            spread([o / i for o, i in zip(self.ours_s, self.ideal_s, strict=True)], 3)
            if self.ideal_s
            else "-",
            f"{statistics.median(ours_us):.0f}",
            f"{statistics.median(peer_us):.0f}" if shared_ideal else "-",
            *(
                f"{1e6 * statistics.median(cpu_s) / (2 * MICRO_BATCHES):.0f}"
                for cpu_s in (self.ours_cpu_s, self.peer_cpu_s)
            ),
        )


_HEADER = (
    "case", "ranks", "schedule", "ours ms", "peer ms", "ratio", "ours/ideal",
    "ours us/instr", "peer us/instr", "ours cpu us/instr", "peer cpu us/instr",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--receive-window", type=int)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 5
    races = [race for ranks in options.ranks for race in run_ranks(_races, ranks, options)]
    races.sort(key=lambda race: (list(CASES).index(race.case), race.ranks))
    print(_table([_HEADER, *(race.row() for race in races)]))


def _races(groups: MeshGroups, report: Callable[[Any], None], options: argparse.Namespace) -> None:
    for name in options.cases:
        for schedule in options.schedules:
            race = _race(name, schedule, groups, options)
            if groups.rank == 0:
                report(race)


def _race(name: str, schedule_name: str, groups: MeshGroups, options: argparse.Namespace) -> Race:
    case, ranks = CASES[name], groups.mesh.num_stages
    schedule = lower(
        build_schedule(schedule_name, ranks, MICRO_BATCHES), receive_window=options.receive_window
    )
    batch = case.batch(MICRO_BATCHES)
    ours = OurStep(case, schedule, groups, batch)
    peer = PeerStep(case, schedule_name, MICRO_BATCHES, groups, batch)
    for _ in range(_WARM_UP_STEPS if case.known_s is None else 1):
        _timed(ours)
        _timed(peer)
    _compare_gradients(ours, peer)
    gc.collect()
    gc.freeze()  # What is left from set-up is no garbage of either side.
    spans: dict[Step, list[_Span]] = {ours: [], peer: []}
    events: list[tuple[Event, ...]] = []
    for index in range(options.rounds * case.rounds_factor):
        for step in (ours, peer) if index % 2 == 0 else (peer, ours):
            spans[step].append(_timed(step))
            if step is ours and case.known_s is None:
                events.append(ours.events())
    ours_s, ours_cpu_s = _slowest(spans[ours])
    peer_s, peer_cpu_s = _slowest(spans[peer])
    return Race(
        case=name,
        ranks=ranks,
        schedule=schedule_name,
        ours_s=ours_s,
        peer_s=peer_s,
        ours_cpu_s=ours_cpu_s,
        peer_cpu_s=peer_cpu_s,
        ideal_s=_ideal_s(case, schedule, len(ours_s), _gathered(events)),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """One step on one rank; all ranks share the clock, since they share the machine."""

    start_s: float
    end_s: float
    cpu_s: float


def _timed(step: Step) -> _Span:
    """Run one step from a common start."""
    step.prepare()
    dist.barrier()
    start = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    start_s = float(start.item())
    while (left_s := start_s - time.perf_counter()) > 0:
        time.sleep(left_s)
    cpu_s = time.process_time()
    step.run()
    return _Span(start_s, time.perf_counter(), time.process_time() - cpu_s)


def _slowest(spans: Sequence[_Span]) -> tuple[list[float], list[float]]:
    """Return, for each step, the seconds until the last rank's end and the most processor time."""
    steps = list(zip(*_gathered(list(spans)), strict=True))
    return (
        [max(span.end_s for span in step) - step[0].start_s for step in steps],
        [max(span.cpu_s for span in step) for step in steps],
    )


def _gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _ideal_s(
    case: Case, schedule: Schedule, rounds: int, every: Sequence[Sequence[Sequence[Event]]]
) -> list[float] | None:
    """Return the simulated seconds of each round, from known or from recorded durations."""
    if case.known_s is not None:
        forward_s, backward_s = case.known_s
        if not forward_s:
            return None
        costs = StepCosts.uniform(
            schedule.num_stages, MICRO_BATCHES, forward_s=forward_s, backward_s=backward_s
        )
        return [makespan_s(schedule, costs)] * rounds
    return [makespan_s(schedule, _costs(schedule, step)) for step in zip(*every, strict=True)]


def _costs(schedule: Schedule, step: Sequence[Sequence[Event]]) -> StepCosts:
    shape = schedule.num_stages, schedule.num_micro_batches
    tables = {kind: [[0.0] * shape[1] for _ in range(shape[0])] for kind in EventKind}
    for event in (event for events in step for event in events):
        if event.micro_batch is not None:
            tables[event.kind][event.stage][event.micro_batch] += event.duration_s
    return StepCosts(
        forward_s=tables[EventKind.FORWARD],  # type: ignore[arg-type]
        backward_s=tables[EventKind.BACKWARD],  # type: ignore[arg-type]
    )


def _compare_gradients(ours: OurStep, peer: PeerStep) -> None:
    for (name, a), b in zip(ours.module.named_parameters(), peer.module.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert a.grad.abs().sum() > 0, f"{name} has no gradient"
        scale = float(b.grad.abs().max())
        worst = float((a.grad - b.grad).abs().max())
        assert worst <= _TOLERANCE * max(1.0, scale), f"gradients of {name} differ by {worst}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    main()
