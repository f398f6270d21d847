"""Prove that a lowered schedule is complete, paired and free of deadlock, before it runs.

The proof holds on every transport: it assumes the least helpful one, which matches messages by
order alone and blocks each sender until the receive is posted.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from pipeswift_lightning.plan.dependencies import dependency
from pipeswift_lightning.plan.instructions import (
    Backward,
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

__all__ = ["ScheduleError", "ScheduleReport", "validate"]

_Send: TypeAlias = SendActivation | SendGradient
_Receive: TypeAlias = ReceiveActivation | ReceiveGradient
_Edge: TypeAlias = tuple[int, int]  # (source rank, target rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """What a valid schedule needs.

    Args:
        peak_in_flight: Most micro-batches a rank holds at once, from Forward to Free; a rank with
            several stages counts each. Shape ``[num_ranks]``.
        peak_receives: Most receives a rank has posted and not yet used, so buffers it needs.
            Shape ``[num_ranks]``.
        num_messages: Messages between ranks in one step.
    """

    peak_in_flight: tuple[int, ...]
    peak_receives: tuple[int, ...]
    num_messages: int


def validate(schedule: Schedule, *, training: bool | None = None) -> ScheduleReport:
    """Return what the lowered schedule needs, or say why it cannot run.

    Checked: each stage has one Forward of each micro-batch and, in training, one Backward; each is
    freed once, after its last use; each computation has its receives before it and its sends after
    it; sends and receives between two ranks come in the same order; all rows finish even if every
    send blocks until its receive is posted. O(n) in the number of instructions.

    Args:
        schedule: A lowered schedule; see ``lowering.lower``.
        training: Whether Backwards must be there; None: if there is any.

    Raises:
        ScheduleError: A rule is broken; names rank, index in the row, instruction, rule and remedy.

    Example:
        >>> from pipeswift_lightning.plan.lowering import lower
        >>> from pipeswift_lightning.plan.schedules import one_f_one_b
        >>> validate(lower(one_f_one_b(2, 4), receive_window=1))
        ScheduleReport(peak_in_flight=(2, 1), peak_receives=(2, 2), num_messages=8)
    """
    training = schedule.has_backward if training is None else training
    for rank in range(schedule.num_ranks):
        _check_row(schedule, rank, training=training)
    _check_pairs(schedule)
    _check_finishes(schedule)
    peaks = [_peaks(row) for row in schedule.rows]
    return ScheduleReport(
        peak_in_flight=tuple(in_flight for in_flight, _ in peaks),
        peak_receives=tuple(receives for _, receives in peaks),
        num_messages=sum(
            isinstance(instruction, _Send) for row in schedule.rows for instruction in row
        ),
    )


def _fault(rank: int, index: int, instruction: Instruction, rule: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, index {index}, {instruction}: {rule}")


def _check_row(schedule: Schedule, rank: int, *, training: bool) -> None:
    """Check that the row holds each instruction it needs once, each after those it relies on."""
    index: dict[Instruction, int] = {}
    for at, instruction in enumerate(schedule.rows[rank]):
        if instruction in index:
            rule = f"appears already at index {index[instruction]}; remove one of the two"
            raise _fault(rank, at, instruction, rule)
        index[instruction] = at
    needed: set[Instruction] = set()
    for stage in (s for s, owner in enumerate(schedule.stage_ranks) if owner == rank):
        for micro_batch in range(schedule.num_micro_batches):
            for pair in _chain(schedule, stage, micro_batch, training=training):
                _check_order(rank, pair, index)
                needed.update(pair)
    for instruction, at in index.items():
        if instruction not in needed:
            rule = (
                "nothing needs it: wrong peer, no neighbouring stage on another rank, or a "
                "Backward without training; remove it"
            )
            raise _fault(rank, at, instruction, rule)


def _check_order(
    rank: int, pair: tuple[Instruction, Instruction], index: dict[Instruction, int]
) -> None:
    before, after = pair
    for missing, other, place in ((before, after, "before"), (after, before, "after")):
        if missing not in index and other in index:
            rule = f"needs {missing} {place} it, which the row lacks; add it, or lower() again"
            raise _fault(rank, index[other], other, rule)
        if missing not in index:
            message = (
                f"rank {rank}: the row lacks {before} and {after}, but each stage handles every "
                "micro-batch; add both, or lower() the schedule"
            )
            raise ScheduleError(message)
    if index[before] > index[after]:
        rule = f"comes before {before} at index {index[before]}, on which it relies; swap the two"
        raise _fault(rank, index[after], after, rule)


def _chain(
    schedule: Schedule, stage: int, micro_batch: int, *, training: bool
) -> Iterator[tuple[Instruction, Instruction]]:
    """Yield (before, after) for all that one stage does with one micro-batch."""
    ranks = schedule.stage_ranks
    own = ranks[stage]
    previous = ranks[stage - 1] if stage > 0 else own
    following = ranks[stage + 1] if stage < schedule.num_stages - 1 else own
    forward: Instruction = Forward(stage, micro_batch)
    last = [forward]
    if previous != own:
        yield ReceiveActivation(stage, micro_batch, previous), forward
    if following != own:
        last.append(SendActivation(stage, micro_batch, following))
        yield forward, last[-1]
    if training:
        backward: Instruction = Backward(stage, micro_batch)
        last.append(backward)
        yield forward, backward
        if following != own:
            yield ReceiveGradient(stage, micro_batch, following), backward
        if previous != own:
            last.append(SendGradient(stage, micro_batch, previous))
            yield backward, last[-1]
    for instruction in reversed(last):
        yield instruction, Free(stage, micro_batch)


def _partner(send: _Send, rank: int) -> _Receive:
    """Return the receive that ``send`` on ``rank`` pairs with."""
    match send:
        case SendActivation(stage, micro_batch):
            return ReceiveActivation(stage + 1, micro_batch, rank)
        case SendGradient(stage, micro_batch):
            return ReceiveGradient(stage - 1, micro_batch, rank)
        case _:
            assert_never(send)


def _check_pairs(schedule: Schedule) -> None:
    """Check that messages between two ranks are received in the order of sending.

    The rows are complete by now, so both sides have the same messages; only their order may differ.
    """
    receives: dict[_Edge, list[tuple[int, _Receive]]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for at, instruction in enumerate(row):
            if isinstance(instruction, _Receive):
                receives[instruction.peer, rank].append((at, instruction))
    count: Counter[_Edge] = Counter()
    for rank, row in enumerate(schedule.rows):
        for at, instruction in enumerate(row):
            if isinstance(instruction, _Send):
                edge = (rank, instruction.peer)
                posted_at, posted = receives[edge][count[edge]]
                count[edge] += 1
                if posted != _partner(instruction, rank):
                    rule = (
                        f"is message {count[edge]} to rank {edge[1]}, whose receive {count[edge]} "
                        f"from here is {posted} at index {posted_at}; messages match by order, so "
                        "post the receives in the order of the sends"
                    )
                    raise _fault(rank, at, instruction, rule)


def _check_finishes(schedule: Schedule) -> None:
    """Carry out the rows with blocking sends; raise if some rank cannot come to its end."""
    finished: set[Instruction] = set()  # Computations and receives; a receive is done when posted.
    arrived: set[Instruction] = set()  # The receives whose message is there.
    position = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.rows[rank]
        while position[rank] < len(row):
            instruction = row[position[rank]]
            if _blocker(schedule, rank, instruction, finished, arrived) is not None:
                break
            match instruction:
                case SendActivation() | SendGradient():
                    arrived.add(_partner(instruction, rank))
                    ready.append(instruction.peer)
                case ReceiveActivation() | ReceiveGradient():
                    finished.add(instruction)
                    ready.append(instruction.peer)
                case Forward() | Backward() | Free():
                    finished.add(instruction)
                case _:
                    assert_never(instruction)
            position[rank] += 1
    stuck = []
    for rank, (row, at) in enumerate(zip(schedule.rows, position, strict=True)):
        if at < len(row):
            reason = _blocker(schedule, rank, row[at], finished, arrived)
            stuck.append(f"rank {rank} at index {at}, {row[at]}, waits for {reason}")
    if stuck:
        message = (
            f"deadlock with sends that block until the receive is posted: {'; '.join(stuck)}. "
            "Compute or post first what the others wait for, or lower() the compute-only schedule"
        )
        raise ScheduleError(message)


def _blocker(
    schedule: Schedule,
    rank: int,
    instruction: Instruction,
    finished: set[Instruction],
    arrived: set[Instruction],
) -> str | None:
    """Return what the instruction waits for, or None if it can go ahead."""
    match instruction:
        case SendActivation() | SendGradient():
            receive = _partner(instruction, rank)
            return None if receive in finished else f"{receive} on rank {instruction.peer}"
        case Forward(stage, micro_batch) | Backward(stage, micro_batch):
            needed = dependency(instruction, schedule.num_stages)
            if needed is None:
                return None
            source = schedule.stage_ranks[needed.stage]
            if source == rank:
                return None if needed in finished else f"{needed} later in its own row"
            kind = ReceiveActivation if isinstance(instruction, Forward) else ReceiveGradient
            message = kind(stage, micro_batch, source)
            return None if message in arrived else f"the message of {message}"
        case ReceiveActivation() | ReceiveGradient() | Free():
            return None
        case _:
            assert_never(instruction)


def _peaks(row: tuple[Instruction, ...]) -> tuple[int, int]:
    """Return the most micro-batches in flight and the most receives posted and not yet used."""
    in_flight = receives = 0
    peak_in_flight = peak_receives = 0
    messages = {(type(i), i.stage, i.micro_batch) for i in row if isinstance(i, _Receive)}
    for instruction in row:
        match instruction:
            case ReceiveActivation() | ReceiveGradient():
                receives += 1
            case Forward(stage, micro_batch):
                in_flight += 1
                receives -= (ReceiveActivation, stage, micro_batch) in messages
            case Backward(stage, micro_batch):
                receives -= (ReceiveGradient, stage, micro_batch) in messages
            case Free():
                in_flight -= 1
            case SendActivation() | SendGradient():
                pass
            case _:
                assert_never(instruction)
        peak_in_flight = max(peak_in_flight, in_flight)
        peak_receives = max(peak_receives, receives)
    return peak_in_flight, peak_receives
