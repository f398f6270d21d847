"""Carry out a lowered schedule on symbols instead of tensors: the meaning of the instructions.

Written without a look at ``validate``, so that the two can be held against each other. Each rank is
a generator that yields while it is blocked; sends block until the receive is posted, and messages
match by order alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pipeswift_lightning.plan.instructions import (
    Backward,
    Forward,
    Free,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
)

__all__ = ["WrongError", "interpret"]


class WrongError(Exception):
    """The schedule blocks for ever, or computes something else than it should."""


def interpret(schedule: Schedule, *, training: bool) -> None:
    """Return if the schedule does what it should, else raise ``WrongError``."""
    world = _World(schedule, training=training)
    ranks = [world.run(rank) for rank in range(schedule.num_ranks)]
    while ranks:
        before = world.progress
        try:
            ranks = [rank for rank in ranks if next(rank, None) is not None]
        except (KeyError, IndexError) as error:
            raise WrongError(f"not there: {error!r}") from error
        if ranks and world.progress == before:
            raise WrongError("deadlock")
    world.check_all_done()


def _forward(stage: int, micro_batch: int) -> str:
    return f"f{stage}(" * (stage + 1) + f"batch {micro_batch}"


class _World:
    def __init__(self, schedule: Schedule, *, training: bool) -> None:
        self.schedule, self.training = schedule, training
        self.last = schedule.num_stages - 1
        self.progress = 0
        self.posted: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # edge -> buffers
        self.num_sent: dict[Any, int] = defaultdict(int)
        self.buffers: dict[Any, dict[str, Any]] = {}  # (kind, stage, mb) -> buffer with "value"
        self.held: dict[Any, dict[str, Any]] = {}  # (stage, mb) -> what the stage keeps
        self.handed: dict[Any, Any] = {}  # (kind, stage, mb) -> value given on the same rank
        self.ran: list[Any] = []

    def run(self, rank: int) -> Iterator[bool]:
        for instruction in self.schedule.rows[rank]:
            key = (instruction.stage, instruction.micro_batch)
            match instruction:
                case ReceiveActivation() | ReceiveGradient():
                    kind = "a" if isinstance(instruction, ReceiveActivation) else "g"
                    if (kind, *key) in self.buffers:
                        raise WrongError("a buffer is received into twice")
                    self.buffers[kind, *key] = buffer = {}
                    self.posted[instruction.peer, rank].append(buffer)
                case SendActivation() | SendGradient():
                    edge = (rank, instruction.peer)
                    number = self.num_sent[edge]
                    self.num_sent[edge] += 1
                    while len(self.posted[edge]) <= number:
                        yield True
                    name = "output" if isinstance(instruction, SendActivation) else "gradient"
                    self.posted[edge][number]["value"] = self.held[key].pop(name)
                case Forward():
                    yield from self.wait("a", rank, *key)
                    self.forward(rank, *key)
                case Backward():
                    yield from self.wait("g", rank, *key)
                    self.backward(rank, *key)
                case Free():
                    self.free(rank, *key)
            self.progress += 1

    def source(self, kind: str, stage: int) -> int | None:
        """The stage that the input of (kind, stage) comes from."""
        other = stage - 1 if kind == "a" else stage + 1
        return other if 0 <= other <= self.last else None

    def is_local(self, rank: int, stage: int | None) -> bool:
        return stage is not None and self.schedule.stage_ranks[stage] == rank

    def wait(self, kind: str, rank: int, stage: int, micro_batch: int) -> Iterator[bool]:
        source = self.source(kind, stage)
        if source is not None and not self.is_local(rank, source):
            while "value" not in self.buffers[kind, stage, micro_batch]:
                yield True

    def take(self, kind: str, rank: int, stage: int, micro_batch: int) -> Any:
        if self.is_local(rank, self.source(kind, stage)):
            return self.handed.pop((kind, stage, micro_batch))
        return self.buffers[kind, stage, micro_batch].pop("value")

    def forward(self, rank: int, stage: int, micro_batch: int) -> None:
        if (Forward, stage, micro_batch) in self.ran:
            raise WrongError("forward twice")
        self.ran.append((Forward, stage, micro_batch))
        if stage > 0:
            got = self.take("a", rank, stage, micro_batch)
            if got != _forward(stage - 1, micro_batch):
                raise WrongError(f"stage {stage} ran {got!r} as micro-batch {micro_batch}")
        output = _forward(stage, micro_batch)
        held = self.held[stage, micro_batch] = {"graph": True}
        if self.is_local(rank, stage + 1 if stage < self.last else None):
            self.handed["a", stage + 1, micro_batch] = output
        elif stage < self.last:
            held["output"] = output

    def backward(self, rank: int, stage: int, micro_batch: int) -> None:
        self.ran.append((Backward, stage, micro_batch))
        self.held[stage, micro_batch].pop("graph")
        gradient = ("g", stage, micro_batch)
        if stage < self.last and self.take("g", rank, stage, micro_batch) != gradient:
            raise WrongError(
                f"wrong gradient in backward of micro-batch {micro_batch}, stage {stage}"
            )
        if self.is_local(rank, stage - 1 if stage > 0 else None):
            self.handed["g", stage - 1, micro_batch] = ("g", stage - 1, micro_batch)
        elif stage > 0:
            self.held[stage, micro_batch]["gradient"] = ("g", stage - 1, micro_batch)

    def free(self, rank: int, stage: int, micro_batch: int) -> None:
        held = self.held.pop((stage, micro_batch))
        if self.training and (Backward, stage, micro_batch) not in self.ran:
            raise WrongError("freed before its backward")
        if held.keys() - ({"graph"} if not self.training else set()):
            raise WrongError(f"freed with {held} unsent")

    def check_all_done(self) -> None:
        kinds = (Forward, Backward) if self.training else (Forward,)
        want = [
            (kind, stage, micro_batch)
            for kind in kinds
            for stage in range(self.schedule.num_stages)
            for micro_batch in range(self.schedule.num_micro_batches)
        ]
        if sorted(self.ran, key=str) != sorted(want, key=str):
            raise WrongError("not every stage ran every micro-batch once")
        if self.held or any(buffer for buffers in self.posted.values() for buffer in buffers):
            raise WrongError("something is still held")
        if any(len(posted) != self.num_sent[edge] for edge, posted in self.posted.items()):
            raise WrongError("a receive was posted for which nothing is sent")
