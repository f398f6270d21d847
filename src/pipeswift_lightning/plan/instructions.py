"""The instruction set of a pipeline, and the schedule made of it.

A schedule is one row of instructions a rank, carried out strictly in order. A *compute-only* row
holds Forward and Backward; ``lowering`` adds the communication. The same Schedule object is drawn,
validated, simulated and executed.

``stage`` is always the stage of the rank that carries the instruction out, ``peer`` always the
*rank* at the other end, never its stage: with several stages a rank the two differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

__all__ = [
    "Backward",
    "Communication",
    "Compute",
    "Forward",
    "Free",
    "Instruction",
    "ReceiveActivation",
    "ReceiveGradient",
    "Schedule",
    "ScheduleError",
    "SendActivation",
    "SendGradient",
    "num_alone",
]


class ScheduleError(ValueError):
    """A schedule that cannot be carried out; the message names the place, the rule and a remedy."""


def _check(stage: int, micro_batch: int, peer: int = 0) -> None:
    for name, value in (("stage", stage), ("micro_batch", micro_batch), ("peer", peer)):
        if value < 0:
            message = f"{name}={value} must be 0 or more: count {name}s from 0"
            raise ScheduleError(message)


def _text(instruction: "Instruction") -> str:
    """Return the instruction as one cell of ``notation``, with its stage always."""
    match instruction:
        case Forward():
            kind, peer = "F", ""
        case Backward():
            kind, peer = "B", ""
        case SendActivation():
            kind, peer = "sa", f">{instruction.peer}"
        case ReceiveActivation():
            kind, peer = "ra", f"<{instruction.peer}"
        case SendGradient():
            kind, peer = "sg", f">{instruction.peer}"
        case ReceiveGradient():
            kind, peer = "rg", f"<{instruction.peer}"
        case Free():
            kind, peer = "x", ""
        case _:
            assert_never(instruction)
    return f"{kind}{instruction.micro_batch}@{instruction.stage}{peer}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage on one micro-batch.

    ``output[stage, micro_batch] = module[stage](input[stage, micro_batch])``

    Waits for its input: the message of ``ReceiveActivation(stage, micro_batch)``, or the Forward of
    ``stage - 1`` when that stage is on the same rank; stage 0 reads the batch. In training it pairs
    with the ``Backward`` of the same stage and micro-batch.
    """

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class Backward:
    """Back-propagate one micro-batch through the stage.

    ``input_gradient[stage, micro_batch] = backward(output, output_gradient)``; the gradients of the
    stage's parameters are added up on the way.

    Waits for its output gradient: the message of ``ReceiveGradient(stage, micro_batch)``, or the
    Backward of ``stage + 1`` when that stage is on the same rank; the last stage starts from the
    loss of its own ``Forward``.
    """

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the stage's output to the rank of the next stage.

    ``send(output[stage, micro_batch], to=peer)``

    Pairs with ``ReceiveActivation(stage + 1, micro_batch, peer=this rank)`` on rank ``peer``.
    Messages between two ranks match by order alone, so both must keep the same order.
    """

    stage: int
    micro_batch: int
    peer: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch, self.peer)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class ReceiveActivation:
    """Post the receive of the stage's input, without waiting for it.

    ``input[stage, micro_batch] = start_receive(source=peer)``

    ``Forward(stage, micro_batch)`` waits for it. Pairs with
    ``SendActivation(stage - 1, micro_batch, peer=this rank)`` on rank ``peer``.
    """

    stage: int
    micro_batch: int
    peer: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch, self.peer)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of the stage's input to the rank of the previous stage.

    ``send(input_gradient[stage, micro_batch], to=peer)``

    Pairs with ``ReceiveGradient(stage - 1, micro_batch, peer=this rank)`` on rank ``peer``.
    """

    stage: int
    micro_batch: int
    peer: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch, self.peer)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class ReceiveGradient:
    """Post the receive of the gradient of the stage's output, without waiting for it.

    ``output_gradient[stage, micro_batch] = start_receive(source=peer)``

    ``Backward(stage, micro_batch)`` waits for it. Pairs with
    ``SendGradient(stage + 1, micro_batch, peer=this rank)`` on rank ``peer``.
    """

    stage: int
    micro_batch: int
    peer: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch, self.peer)

    __str__ = _text


@dataclass(frozen=True, slots=True)
class Free:
    """Drop everything the stage still holds for the micro-batch.

    ``del input[stage, micro_batch], output[...], output_gradient[...], input_gradient[...]``

    Comes once, after the last use on the stage. What was handed to a neighbouring stage on the same
    rank belongs to that stage from then on, and is not touched. It pairs with the ``Forward``,
    which began the holding: the micro-batch is *in flight* between the two.
    """

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check(self.stage, self.micro_batch)

    __str__ = _text


Compute: TypeAlias = Forward | Backward
Communication: TypeAlias = SendActivation | ReceiveActivation | SendGradient | ReceiveGradient
Instruction: TypeAlias = Compute | Communication | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of instructions a rank.

    Args:
        rows: Instructions of each rank, in the order it carries them out. Shape ``[ranks][any]``.
        num_stages: Number of stages; each lies on exactly one rank. A rank may hold several.

    Attributes:
        stage_ranks: Rank of each stage, read off the rows. Shape ``[num_stages]``.
        num_micro_batches: One more than the highest micro-batch id.

    Raises:
        ScheduleError: There is no instruction, or a stage lies on no rank or on several, or a row
            names a stage that is not in ``[0, num_stages)``.

    Example:
        >>> schedule = Schedule(((Forward(0, 0), Backward(0, 0)),), num_stages=1)
        >>> schedule.stage_ranks, schedule.num_micro_batches, schedule.is_lowered
        ((0,), 1, False)
    """

    rows: tuple[tuple[Instruction, ...], ...]
    num_stages: int
    stage_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_micro_batches: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for stage in {instruction.stage for instruction in row}:
                if owner.setdefault(stage, rank) != rank:
                    message = (
                        f"stage {stage} is on ranks {owner[stage]} and {rank}, but a stage lies on "
                        "one rank: move its instructions into one row"
                    )
                    raise ScheduleError(message)
        if self.num_stages < 1 or sorted(owner) != list(range(self.num_stages)):
            message = (
                f"rows hold stages {sorted(owner)}, but num_stages={self.num_stages} asks for each "
                f"of 0..{self.num_stages - 1}: give every stage a row, or correct num_stages"
            )
            raise ScheduleError(message)
        last = max(instruction.micro_batch for row in self.rows for instruction in row)
        object.__setattr__(self, "stage_ranks", tuple(owner[s] for s in range(self.num_stages)))
        object.__setattr__(self, "num_micro_batches", last + 1)

    @property
    def num_ranks(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def is_lowered(self) -> bool:
        """Whether the rows hold more than computation, as those of ``lowering.lower`` do."""
        return any(not isinstance(i, Compute) for row in self.rows for i in row)

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains (any Backward) rather than only runs forward."""
        return any(isinstance(i, Backward) for row in self.rows for i in row)

    def compute_only(self) -> "Schedule":
        """Return the schedule without communication and Free."""
        rows = tuple(tuple(i for i in row if isinstance(i, Compute)) for row in self.rows)
        return Schedule(rows, self.num_stages)


def num_alone(row: Sequence[Instruction]) -> int:
    """Return how many instructions at a row's begin need no message, and send none.

    Example:
        >>> num_alone([Forward(0, 0), SendActivation(0, 0, 1), Forward(0, 1)])
        1
        >>> num_alone([ReceiveActivation(1, 0, 0), Forward(1, 0)])
        0
    """
    if not row or row[0].stage > 0:
        return 0
    others = (i for i, instruction in enumerate(row) if not isinstance(instruction, Forward))
    return next(others, len(row))
