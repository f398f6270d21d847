"""Which computation waits for which: the data flow of a pipeline, whatever the schedule."""

from collections import deque
from typing import assert_never

from pipeswift_lightning.plan.instructions import Backward, Compute, Forward, Schedule

__all__ = ["consumer", "dependency", "unit_starts"]


def dependency(compute: Compute, num_stages: int) -> Compute | None:
    """Return the computation whose result ``compute`` needs, or None for stage 0's Forward.

    A Backward needs its own Forward too; that one comes before through the chain of dependencies.

    Example:
        >>> dependency(Forward(2, 7), num_stages=4), dependency(Backward(3, 7), num_stages=4)
        (Forward(stage=1, micro_batch=7), Forward(stage=3, micro_batch=7))
    """
    match compute:
        case Forward(stage, micro_batch):
            return Forward(stage - 1, micro_batch) if stage > 0 else None
        case Backward(stage, micro_batch):
            if stage == num_stages - 1:
                return Forward(stage, micro_batch)
            return Backward(stage + 1, micro_batch)
        case _:
            assert_never(compute)


def consumer(compute: Compute, num_stages: int) -> Compute | None:
    """Return the computation of the neighbouring *stage* that needs the result, or None at an end.

    Example:
        >>> consumer(Forward(2, 7), num_stages=4), consumer(Backward(0, 7), num_stages=4)
        (Forward(stage=3, micro_batch=7), None)
    """
    match compute:
        case Forward(stage, micro_batch):
            return Forward(stage + 1, micro_batch) if stage < num_stages - 1 else None
        case Backward(stage, micro_batch):
            return Backward(stage - 1, micro_batch) if stage > 0 else None
        case _:
            assert_never(compute)


def unit_starts(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return when each computation starts if each takes one unit and nothing else takes time.

    Returns:
        Start of each computation of each rank, in units. Shape ``[ranks][computations]``. A row is
        shorter than the schedule's where the rank gets stuck: such a schedule never finishes.

    Example:
        >>> rows = ((Forward(0, 0), Forward(0, 1)), (Forward(1, 0), Forward(1, 1)))
        >>> unit_starts(Schedule(rows, num_stages=2))
        ((0, 1), (1, 2))
    """
    rows = schedule.compute_only().rows
    starts: list[list[int]] = [[] for _ in rows]
    end: dict[Compute, int] = {}
    waiting: dict[Compute, list[int]] = {}
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        while len(starts[rank]) < len(rows[rank]):
            compute = rows[rank][len(starts[rank])]
            assert isinstance(compute, Compute)  # for the type checker: compute_only says so
            needed = dependency(compute, schedule.num_stages)
            if needed is not None and needed not in end:
                waiting.setdefault(needed, []).append(rank)
                break
            free = starts[rank][-1] + 1 if starts[rank] else 0
            starts[rank].append(max(free, end[needed] if needed is not None else 0))
            end[compute] = starts[rank][-1] + 1
            ready.extend(waiting.pop(compute, ()))
    return tuple(map(tuple, starts))
