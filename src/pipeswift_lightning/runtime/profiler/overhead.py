"""What a stage takes for each Forward and Backward, besides its layers."""

import statistics
import time
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.messages import Channel
from pipeswift_lightning.runtime.profiler.clock import clock_for
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.stage_program import StageProgram
from pipeswift_lightning.runtime.transport import Transport

__all__ = ["measure_overhead", "overhead_of"]

_MICRO_BATCHES, _WARM_UP, _REPEATS = 8, 3, 9
_ROUNDS = 40  # of the bisection: to a trillionth of where it begins


class _Empty(StageProgram):
    """A stage with next to no work, and messages of next to no bytes."""

    def __init__(self, device: torch.device, *, is_last: bool) -> None:
        self._weight = torch.ones(8, device=device, requires_grad=True)
        self._is_last = is_last

    @override
    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        output = self._weight * (received[0] if stage else 1.0)
        return output.sum() if self._is_last else (output,)

    @override
    def backward(self, micro_batch: int, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @override
    def signature(self, micro_batch: int) -> Hashable:
        return "empty"


def measure_overhead(
    transport: Transport, num_stages: int, link: Link | None, group: dist.ProcessGroup | None
) -> float:
    """Run steps of empty stages; return the seconds of an instruction that explain their time.

    Every rank of the pipeline calls this, and gets the same number. It takes 12 steps of 8
    micro-batches, a few hundredths of a second. On a GPU it is the host's time, which larger stages
    hide in part: there it is the most that it may be.

    Args:
        transport: Channels to the neighbours.
        num_stages: Number of stages.
        link: What a message takes on its way, which is no overhead.
        group: The ranks of the pipeline.
    """
    if num_stages == 1:
        return 0.0
    schedule = lower(build_schedule("1f1b", num_stages, _MICRO_BATCHES))
    # Sanity checks come first, without gradients.
    with torch.inference_mode(mode=False), torch.enable_grad():
        mine = _steps_s(schedule, transport, group)
    every: list[list[float]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(every, mine[_WARM_UP:], group=group)
    step_s = statistics.median(map(max, zip(*every, strict=True)))
    return overhead_of(schedule, step_s, link or Link())


def _steps_s(
    schedule: Schedule, transport: Transport, group: dist.ProcessGroup | None
) -> list[float]:
    stage, device, stages = transport.position, transport.device, schedule.num_stages
    program = _Empty(device, is_last=stage == stages - 1)
    executor = Executor(Channel(transport), range(stages), recorder=Recorder(stage, device))
    clock, seconds = clock_for(device), []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier(group=group)
        start_s = time.perf_counter()
        executor.run(schedule.rows[stage], program, training=True)
        clock.finish()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def overhead_of(schedule: Schedule, step_s: float, link: Link) -> float:
    """Return what each Forward and Backward takes, if a step of nothing else takes ``step_s``.

    Args:
        schedule: The step's.
        step_s: Its seconds.
        link: What its messages take.

    Example:
        >>> from pipeswift_lightning.plan.schedules import gpipe
        >>> round(overhead_of(gpipe(2, 4), 0.010, Link()), 6)  # (4 + 2 - 1) of each
        0.001
    """

    def predicted_s(overhead_s: float) -> float:
        shape = schedule.num_stages, schedule.num_micro_batches
        costs = StepCosts.uniform(*shape, forward_s=overhead_s, backward_s=overhead_s)
        return makespan_s(schedule, costs, link=link)

    low_s, high_s = 0.0, step_s
    if predicted_s(low_s) >= step_s:
        return 0.0
    for _ in range(_ROUNDS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if predicted_s(middle_s) < step_s else (low_s, middle_s)
    return low_s
