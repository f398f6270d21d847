"""From the order of computation to sends, receives and frees.

Three rules make the result safe on transports that match messages by order alone (NCCL) and that
may block the sender until the receive is posted (rendezvous):

1. Each directed edge (source rank, destination rank) has its receives posted in the order of the
   sender's row.
2. Receives are posted ahead: message ``k`` before the computation that uses message ``k - window``,
   or by default as far ahead as memory allows: what a rank has posted on an edge and what it holds
   for backward together exceed its peak of held micro-batches by two at most. A transport has less
   to do for a message whose receive is there before it (gloo: no notice, one wake-up less).
3. A receive is posted before the receiver gets to any work that may come after the send. That is
   read off one order in which the whole schedule can run (each computation one unit long): had all
   sends to block, that order would still be carried out without a wait. So any schedule whose
   computation can finish stays free of deadlock after lowering, however deep its warm-up.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, assert_never

from pipeswift_lightning.plan.dependencies import consumer, unit_starts
from pipeswift_lightning.plan.instructions import (
    Backward,
    Communication,
    Compute,
    Forward,
    Free,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
)

__all__ = ["lower"]

_BUFFERS_ABOVE_PEAK = 2  # the message being used, and one to overlap with that

_ComputeRows: TypeAlias = tuple[tuple[Compute, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One transfer; positions count the computations of a row."""

    produced_at: int
    consumed_at: int
    receive: Communication
    shape_known_at: int  # A gradient is shaped like the output of the stage's own Forward.


def lower(schedule: Schedule, *, receive_window: int | None = None) -> Schedule:
    """Return the schedule with communication and Free added; what it had of these is replaced.

    A send follows directly the computation that produced it. A receive is *posted* by the rules at
    the top of this module, and a gradient's never before the Forward whose output has its shape.
    Free follows the last use. Stages on the same rank exchange no messages. O(n log n) in the
    number of instructions.

    Args:
        schedule: Any number of stages a rank, forward-only or training.
        receive_window: How many messages a receive is posted ahead of use, 1 or more. Each costs
            one buffer an edge. ``None``: as many as fit under the peak of held micro-batches.

    Raises:
        ScheduleError: ``receive_window`` is below 1.

    Example:
        >>> from pipeswift_lightning.plan.notation import draw
        >>> from pipeswift_lightning.plan.schedules import one_f_one_b
        >>> print(draw(lower(one_f_one_b(2, 2))))
        F0 sa0>1 rg0<1 F1 sa1>1 rg1<1 B0 x0 B1 x1
        ra0<0 ra1<0 F0 B0 sg0>0 x0 F1 B1 sg1>0 x1
    """
    if receive_window is not None and receive_window < 1:
        message = (
            f"receive_window={receive_window} must be 1 or more: a receive posted only when it is "
            "needed cannot overlap with computation"
        )
        raise ScheduleError(message)
    rows: _ComputeRows = tuple(
        tuple(i for i in row if isinstance(i, Compute)) for row in schedule.rows
    )
    posts: list[list[list[Instruction]]] = [[[] for _ in row] for row in rows]
    starts = unit_starts(schedule)
    for (source, target), messages in sorted(_edges(schedule, rows).items()):
        safe = [_safe_slot(m, source, target, starts, len(rows[target])) for m in messages]
        used = [m.consumed_at for m in messages]
        ahead = (
            _slots_in_memory(rows[target], used, has_backward=schedule.has_backward)
            if receive_window is None
            else [0] * min(receive_window, len(used)) + used[:-receive_window]
        )
        for slot, m in zip(_slots(messages, safe, ahead), messages, strict=True):
            posts[target][slot].append(m.receive)
    lowered = tuple(
        tuple(
            instruction
            for compute, receives in zip(row, posts[rank], strict=True)
            for instruction in (*receives, compute, *_after(compute, rank, schedule))
        )
        for rank, row in enumerate(rows)
    )
    return Schedule(lowered, schedule.num_stages)


def _edges(schedule: Schedule, rows: _ComputeRows) -> dict[tuple[int, int], list[_Message]]:
    """Return the messages of each (source rank, target rank), in the order of the sender's row."""
    position = {compute: at for row in rows for at, compute in enumerate(row)}
    edges: dict[tuple[int, int], list[_Message]] = {}
    for source, row in enumerate(rows):
        for at, compute in enumerate(row):
            user = consumer(compute, schedule.num_stages)
            if user is None or user not in position:
                continue
            target = schedule.stage_ranks[user.stage]
            if target != source:
                forward = position.get(Forward(user.stage, user.micro_batch), -1)
                message = _Message(
                    produced_at=at,
                    consumed_at=position[user],
                    receive=_receive(user, source),
                    shape_known_at=forward + 1 if isinstance(user, Backward) else 0,
                )
                edges.setdefault((source, target), []).append(message)
    return edges


def _slots_in_memory(row: tuple[Compute, ...], used: list[int], *, has_backward: bool) -> list[int]:
    """Return before which computation each message's buffer first fits under the rank's peak."""
    held = [0] * (len(row) + 1)
    if has_backward:
        held = list(accumulate((1 if isinstance(c, Forward) else -1 for c in row), initial=0))
    uses = set(used)
    consumed = accumulate((i in uses for i in range(len(row))), initial=0)
    left = list(accumulate((n - h for n, h in zip(consumed, held, strict=True)), max))
    room = max(held) + _BUFFERS_ABOVE_PEAK
    return [bisect_right(left, k - room) for k in range(len(used))]


def _slots(messages: list[_Message], safe: list[int], ahead: list[int]) -> list[int]:
    """Return before which computation of the receiver's row each message is posted.

    Each list below never decreases along the edge, hence neither does the result: order is kept
    even where the receiver uses the messages in another order than they are sent.
    """
    used = [m.consumed_at for m in messages]
    latest = _suffix_minimum(used)
    wanted = _suffix_minimum([min(a, u) for a, u in zip(ahead, used, strict=True)])
    shaped = accumulate((m.shape_known_at for m in messages), max)
    return [
        min(late, still_safe, max(want, shape))
        for late, still_safe, want, shape in zip(latest, safe, wanted, shaped, strict=True)
    ]


def _suffix_minimum(values: list[int]) -> list[int]:
    return list(accumulate(reversed(values), min))[::-1]


def _safe_slot(
    message: _Message,
    source: int,
    target: int,
    starts: tuple[tuple[int, ...], ...],
    num_computes: int,
) -> int:
    """Count the receiver's computations that come before the message is produced (rule 3).

    Of two computations with one start the higher rank's comes first; any fixed rule would do, this
    one lets activations be posted latest.
    """
    if message.produced_at >= len(starts[source]):
        return num_computes  # Never produced: the schedule is stuck, whatever is posted.
    start = starts[source][message.produced_at]
    count = bisect_right if target > source else bisect_left
    return count(starts[target], start)


def _receive(user: Compute, source: int) -> Communication:
    match user:
        case Forward(stage, micro_batch):
            return ReceiveActivation(stage, micro_batch, source)
        case Backward(stage, micro_batch):
            return ReceiveGradient(stage, micro_batch, source)
        case _:
            assert_never(user)


def _after(compute: Compute, rank: int, schedule: Schedule) -> tuple[Instruction, ...]:
    """Return the send of the result, if another rank needs it, and the Free after the last use."""
    stage, micro_batch = compute.stage, compute.micro_batch
    user = consumer(compute, schedule.num_stages)
    peer = rank if user is None else schedule.stage_ranks[user.stage]
    free = (Free(stage, micro_batch),)
    match compute:
        case Forward():
            send = (SendActivation(stage, micro_batch, peer),) if peer != rank else ()
            return send if schedule.has_backward else (*send, *free)
        case Backward():
            return (*((SendGradient(stage, micro_batch, peer),) if peer != rank else ()), *free)
        case _:
            assert_never(compute)
