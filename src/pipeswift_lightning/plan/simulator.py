"""Predict the timeline of a schedule from its costs.

The rules: a rank carries out its computations strictly in order, one at a time; a computation
starts once the rank is free and its input is there. Each pair of neighbouring stages has one
directed link a direction; a message occupies it for ``bytes / bandwidth``, one at a time and in the
order of production, and is there ``latency`` later. With ``overlap`` the sender computes on in the
meantime, without it the sender is blocked until the message is there. Receivers are never blocked
by a transfer. Stages on the same rank hand over for free.

Each link is fed by one rank only, in the order of its row; so the times follow from a single pass
over the rows, and no queue of events is needed. Computations are numbered so that the pass touches
lists of numbers alone: with ``S`` stages and ``m`` micro-batches, Forward ``i`` on stage ``s`` is
``s m + i`` and Backward ``S m + s m + i``.
"""

from collections import deque
from dataclasses import dataclass

from pipeswift_lightning.plan.costs import CostError, Link, StepCosts
from pipeswift_lightning.plan.instructions import (
    Backward,
    Compute,
    Forward,
    Schedule,
    ScheduleError,
)
from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline

__all__ = ["makespan_s", "simulate"]

_INSTANT = Link()
_NEVER = -1.0  # Marks an arrival that has not happened; times are 0 or more.


def simulate(
    schedule: Schedule, costs: StepCosts, *, link: Link = _INSTANT, overlap: bool = True
) -> Timeline:
    """Return the timeline of the schedule, by the rules at the top of this module.

    Communication and Free in the rows are ignored: transfers follow from the computations. Waits
    are in the timeline as RECEIVE_WAIT and, without ``overlap``, SEND_WAIT. O(n) in the number of
    computations.

    Args:
        schedule: Compute-only or lowered, any number of stages a rank.
        costs: Seconds and bytes of each stage and micro-batch; every Forward and Backward in the
            schedule needs its entry.
        link: Latency and bandwidth between neighbouring stages.
        overlap: Whether a sender computes on during its transfer.

    Raises:
        ScheduleError: The schedule never finishes; names what each stuck rank waits for.
        CostError: The costs are for another number of stages or too few micro-batches.

    Example:
        >>> from pipeswift_lightning.plan.schedules import one_f_one_b
        >>> costs = StepCosts.uniform(2, 4, forward_s=1.0, backward_s=2.0)
        >>> timeline = simulate(one_f_one_b(2, 4), costs)
        >>> timeline.makespan_s, timeline.bubble_ratio  # (m + p - 1) (f + b), (p - 1) / (m + p - 1)
        (15.0, 0.2)
    """
    program = _number(schedule, costs)
    times = _run(program, costs, link, overlap=overlap)
    events: list[Event] = []
    for rank, row in enumerate(program.rows):
        free_s = 0.0
        for compute in row:
            stage, micro_batch = divmod(compute % program.num_forwards, program.num_micro_batches)
            backward = compute >= program.num_forwards
            start_s, end_s = times.start_s[compute], times.end_s[compute]
            kind = EventKind.BACKWARD if backward else EventKind.FORWARD
            if start_s > free_s:
                wait = EventKind.RECEIVE_WAIT
                events.append(Event(rank, stage, micro_batch, wait, free_s, start_s))
            events.append(Event(rank, stage, micro_batch, kind, start_s, end_s))
            free_s = times.release_s[compute]
            if free_s > end_s:
                wait = EventKind.SEND_WAIT
                events.append(Event(rank, stage, micro_batch, wait, end_s, free_s))
    return Timeline(tuple(events), schedule.num_ranks)


def makespan_s(
    schedule: Schedule, costs: StepCosts, *, link: Link = _INSTANT, overlap: bool = True
) -> float:
    """Return ``simulate(...).makespan_s`` without building the timeline; for search loops.

    Example:
        >>> from pipeswift_lightning.plan.schedules import gpipe
        >>> makespan_s(gpipe(2, 4), StepCosts.uniform(2, 4, forward_s=1.0, backward_s=2.0))
        15.0
    """
    program = _number(schedule, costs)
    times = _run(program, costs, link, overlap=overlap)
    first = min(times.start_s[row[0]] for row in program.rows if row)
    return max(times.end_s[compute] for row in program.rows for compute in row[-1:]) - first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The computations of a schedule as numbers."""

    rows: list[list[int]]
    stage_ranks: tuple[int, ...]
    num_micro_batches: int

    @property
    def num_forwards(self) -> int:
        return len(self.stage_ranks) * self.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """When each computation started and ended, and when its rank was free again."""

    start_s: list[float]
    end_s: list[float]
    release_s: list[float]


def _number(schedule: Schedule, costs: StepCosts) -> _Program:
    stages, micro_batches = costs.num_stages, costs.num_micro_batches
    if stages != schedule.num_stages or micro_batches < schedule.num_micro_batches:
        message = (
            f"costs are for {stages} stages and {micro_batches} micro-batches, the schedule has "
            f"{schedule.num_stages} and {schedule.num_micro_batches}: measure the same partition "
            "and micro-batches"
        )
        raise CostError(message)
    size = stages * micro_batches
    rows = [
        [
            i.stage * micro_batches + i.micro_batch + (size if isinstance(i, Backward) else 0)
            for i in row
            if isinstance(i, Compute)
        ]
        for row in schedule.rows
    ]
    return _Program(rows=rows, stage_ranks=schedule.stage_ranks, num_micro_batches=micro_batches)


def _run(program: _Program, costs: StepCosts, link: Link, *, overlap: bool) -> _Times:
    """Carry out the rows; a rank that lacks an input is taken up again when the input arrives."""
    size, m = program.num_forwards, program.num_micro_batches
    duration = [s for table in (costs.forward_s, costs.backward_s) for row in table for s in row]
    user, occupied = _transfers(program, costs, link)
    rank_of = [program.stage_ranks[c % size // m] for c in range(2 * size)]
    start, end, release = [0.0] * (2 * size), [0.0] * (2 * size), [0.0] * (2 * size)
    arrival = [0.0] * m + [_NEVER] * (2 * size - m)
    link_free = [0.0] * (2 * len(program.stage_ranks))
    position, free = [0] * len(program.rows), [0.0] * len(program.rows)
    ready = deque(range(len(program.rows)))
    while ready:
        rank = ready.popleft()
        row = program.rows[rank]
        while position[rank] < len(row) and arrival[row[position[rank]]] != _NEVER:
            compute = row[position[rank]]
            begun = max(free[rank], arrival[compute])
            done = free_again = begun + duration[compute]
            target = user[compute]
            if target >= 0:
                there = done
                if (other := rank_of[target]) != rank:
                    sent = max(done, link_free[compute // m]) + occupied[compute]
                    link_free[compute // m] = sent
                    there = sent + link.latency_s
                    free_again = done if overlap else there
                    ready.append(other)
                arrival[target] = there
            start[compute], end[compute], release[compute] = begun, done, free_again
            free[rank] = free_again
            position[rank] += 1
    _check_finished(program, position)
    return _Times(start_s=start, end_s=end, release_s=release)


def _transfers(program: _Program, costs: StepCosts, link: Link) -> tuple[list[int], list[float]]:
    """Return who uses the result of each computation (-1: nobody) and the wire time it takes."""
    size, m = program.num_forwards, program.num_micro_batches
    forward = [c + m for c in range(size - m)] + [c + size for c in range(size - m, size)]
    backward = [-1] * m + [c - m for c in range(size + m, 2 * size)]
    bandwidth = link.bandwidth_bytes_per_s
    activations = costs.activation_bytes
    gradients = activations if costs.gradient_bytes is None else costs.gradient_bytes
    silent = [0.0] * m  # The last stage's Forward and stage 0's Backward send nothing.
    activation_s, gradient_s = (
        [0.0] * (size - m) if table is None else [b / bandwidth for row in table for b in row]
        for table in (activations, gradients)
    )
    return forward + backward, activation_s + silent + silent + gradient_s


def _check_finished(program: _Program, position: list[int]) -> None:
    """Raise if a rank has not come to the end of its row."""
    stuck = []
    for rank, (row, at) in enumerate(zip(program.rows, position, strict=True)):
        if at < len(row):
            stage, micro_batch = divmod(row[at] % program.num_forwards, program.num_micro_batches)
            kind = Forward if row[at] < program.num_forwards else Backward
            stuck.append(f"rank {rank} at computation {at}, {kind(stage, micro_batch)}")
    if stuck:
        message = (
            f"the schedule never finishes; the input never comes for {'; '.join(stuck)}: let each "
            "rank compute what the others wait for first"
        )
        raise ScheduleError(message)
