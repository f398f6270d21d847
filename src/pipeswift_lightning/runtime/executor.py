"""Walk one rank's row of instructions."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeswift_lightning.plan.instructions import (
    Backward,
    Forward,
    Free,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    num_alone,
)
from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.runtime.arrival import Arrival
from pipeswift_lightning.runtime.communication import CommunicationError, communicating
from pipeswift_lightning.runtime.device_clock import Instant
from pipeswift_lightning.runtime.gradients import differentiate
from pipeswift_lightning.runtime.messages import Channel, InFlight, Pending, tensors_of
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.stage_program import Admission, StageProgram

__all__ = ["Executor", "Held"]

_MAX_SENDS = 8
_PATIENCE_S = 2.0  # for ranks that may explain a failure
_WAITING = {False: "waiting for the activation", True: "waiting for the gradient"}


@dataclass(slots=True)
class _Saved:
    """What a stage holds for one micro-batch between its forward and its backward."""

    inputs: list[Arrival]
    output: Any
    loss: Tensor | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    sent: InFlight | None = None
    retain: bool = False  # the backward may be asked for again


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds between a run of forwards and one of their backwards."""

    saved: Mapping[tuple[int, int], _Saved]


class Executor:
    """Runs a row over a channel.

    Args:
        channel: Moves activations and gradients.
        stage_positions: The pipeline position (rank within the pipeline) of each stage.
        ranks: The global rank at each position, for the watchdog; the positions if not given.
        progress: Where the watchdog reads what this rank is doing.
        recorder: Where events go; ``None`` records nothing.
    """

    def __init__(
        self,
        channel: Channel,
        stage_positions: Sequence[int],
        *,
        ranks: Sequence[int] | None = None,
        progress: Progress | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._channel = channel
        self._positions = tuple(stage_positions)
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(len(self._positions)))
        self._last_stage = len(self._positions) - 1
        self._progress = progress if progress is not None else Progress()
        self._recorder = recorder
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._pending: dict[tuple[int, int, bool], Pending] = {}
        self._sends: deque[tuple[int, int, InFlight]] = deque()
        self._meanwhile: Callable[[], None] | None = None

    @property
    def progress(self) -> Progress:
        """What the watchdog reads."""
        return self._progress

    def run(
        self,
        row: Sequence[Instruction],
        program: StageProgram,
        *,
        training: bool,
        begin: bool = True,
        admit: Admission | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Execute ``row``; returns when every message of this rank has left.

        Args:
            row: The instructions.
            program: What they compute.
            training: Whether there is a backward.
            begin: Whether the step begins here, for the channel.
            admit: Called before anything is sent or awaited; raises if that must not be. What a
                first stage can compute without it has run then.
            meanwhile: Called once, when there is nothing else to do: before the first wait for a
                peer, or else at the end of the row.

        Raises:
            CommunicationError: A transfer failed, most often since the peer has gone.
            Exception: Whatever the program raises, with a note that says where.
        """
        if begin:
            self._channel.begin()
        self._meanwhile = meanwhile
        self._walk(row, program, training=training, admit=admit)

    def begin(self) -> None:
        """Begin a step of several runs."""
        self._channel.begin()

    def forget(self) -> None:
        """Forget how messages look, between steps: from now on other layers send them."""
        self._channel.forget()

    def close(self) -> None:
        """Let go of the connections; nothing can be run afterwards."""
        self._channel.close()

    def run_forward(self, row: Sequence[Instruction], program: StageProgram) -> Held:
        """Execute a row of forwards whose backwards may come, now or later or never.

        The caller begins the step, once for all runs that overlap.

        Raises:
            CommunicationError: As `run`.
            Exception: As `run`.
        """
        held: dict[tuple[int, int], _Saved] = {}
        self._walk(row, program, training=True, keep=held)
        return Held(held)

    def run_backward(self, row: Sequence[Instruction], program: StageProgram, held: Held) -> None:
        """Execute a row of backwards; ``held`` stays as it is, so this may be done again.

        Raises:
            CommunicationError: As `run`.
            Exception: As `run`.
        """
        self._saved = {key: replace(saved, retain=True) for key, saved in held.saved.items()}
        self._walk(row, program, training=True)

    def _walk(
        self,
        row: Sequence[Instruction],
        program: StageProgram,
        *,
        training: bool,
        keep: dict[tuple[int, int], _Saved] | None = None,
        admit: Admission | None = None,
    ) -> None:
        alone = 0 if admit is None else num_alone(row)
        try:
            with torch.set_grad_enabled(training):
                try:
                    for instruction in row[:alone]:
                        self._step(instruction, program, training=training)
                except Exception:
                    self._explain(admit)
                    raise
                if admit is not None:
                    admit()
                for instruction in row[alone:]:
                    self._step(instruction, program, training=training)
            if keep is not None:
                keep.update(self._saved)
                for (stage, _), saved in keep.items():
                    if saved.sent is not None:
                        self._sends.append((stage, self._positions[stage + 1], saved.sent))
                        saved.sent = None
            self._use_wait()
            while self._sends:
                self._reap()
        finally:
            self._saved.clear()
            self._pending.clear()
            self._sends.clear()
            self._meanwhile = None
        # Only after success: a report on a failure must still find where it happened.
        self._progress.mark("between steps")

    def _step(self, instruction: Instruction, program: StageProgram, *, training: bool) -> None:
        stage, micro_batch = instruction.stage, instruction.micro_batch
        match instruction:
            case Forward():
                torch.set_grad_enabled(training)  # whatever the last one has left
                self._forward(stage, micro_batch, program)
            case Backward():
                self._backward(stage, micro_batch, program)
            case SendActivation():
                self._send_activation(stage, micro_batch, program, training=training)
            case SendGradient():
                self._send_gradient(stage, micro_batch)
            case ReceiveActivation():
                self._post(stage, micro_batch, stage - 1, program, training=training)
            case ReceiveGradient():
                self._post(stage, micro_batch, stage + 1, program, training=training)
            case Free():
                saved = self._saved.pop((stage, micro_batch), None)
                if saved is not None and saved.sent is not None:
                    self._keep_send(stage, stage + 1, saved.sent)
            case _:
                assert_never(instruction)

    # -- compute ------------------------------------------------------------------------------

    def _forward(self, stage: int, micro_batch: int, program: StageProgram) -> None:
        received: Any = None
        inputs: list[Arrival] = []
        if stage > 0:
            pending = self._pending[stage, micro_batch, False]
            received = self._wait(stage, micro_batch, is_gradient=False)
            inputs = pending.arrivals
        self._mark("Forward", stage, micro_batch)
        start = self._now()
        try:
            output = program.forward(stage, micro_batch, received)
        except Exception as error:
            _note(error, "Forward", stage, micro_batch)
            raise
        self._record(EventKind.FORWARD, stage, micro_batch, start)
        saved = _Saved(inputs, output)
        if stage == self._last_stage:
            saved.loss = output
            saved.output = None
        self._saved[stage, micro_batch] = saved

    def _backward(self, stage: int, micro_batch: int, program: StageProgram) -> None:
        saved = self._saved[stage, micro_batch]
        gradients: list[Tensor] = []
        if stage != self._last_stage:
            gradients = self._wait(stage, micro_batch, is_gradient=True)
        self._mark("Backward", stage, micro_batch)
        start = self._now()
        try:
            if stage == self._last_stage:
                if saved.loss is not None:
                    program.backward(micro_batch, saved.loss)
            elif saved.edges:
                differentiate(saved.edges, gradients, retain=saved.retain)
        except Exception as error:
            _note(error, "Backward", stage, micro_batch)
            raise
        saved.gradients = [arrival.take_gradient_or_zeros() for arrival in saved.inputs]
        saved.loss = None
        saved.edges = []
        self._record(EventKind.BACKWARD, stage, micro_batch, start)

    # -- communication ------------------------------------------------------------------------

    def _send_activation(
        self, stage: int, micro_batch: int, program: StageProgram, *, training: bool
    ) -> None:
        saved = self._saved[stage, micro_batch]
        self._mark("sending the activation", stage, micro_batch)
        key = self._key(stage, micro_batch, program, training=training)
        peer = self._positions[stage + 1]
        try:
            saved.sent = self._channel.send_activation(peer, key, saved.output)
        except Exception:  # Only now: the words take longer than a send.
            with communicating(f"stage {stage} sending micro-batch {micro_batch} forward", peer):
                raise
        if training:
            # The graph needs no output data, only the edges into it.
            saved.edges = [get_gradient_edge(x) for x in _differentiable(saved.output)]
        saved.output = None

    def _send_gradient(self, stage: int, micro_batch: int) -> None:
        saved = self._saved[stage, micro_batch]
        self._mark("sending the gradient", stage, micro_batch)
        peer = self._positions[stage - 1]
        try:
            flight = self._channel.send_gradient(peer, saved.gradients)
        except Exception:
            with communicating(f"stage {stage} sending micro-batch {micro_batch} backward", peer):
                raise
        saved.gradients = []
        self._keep_send(stage, stage - 1, flight)

    def _post(
        self, stage: int, micro_batch: int, peer: int, program: StageProgram, *, training: bool
    ) -> None:
        is_gradient = peer > stage
        key = self._key(min(stage, peer), micro_batch, program, training=training)
        self._pending[stage, micro_batch, is_gradient] = self._channel.post(
            self._positions[peer], key, is_gradient=is_gradient
        )

    def _key(
        self, lower_stage: int, micro_batch: int, program: StageProgram, *, training: bool
    ) -> Hashable:
        """Return what determines the layout of a micro-batch's activation."""
        signature = program.signature(micro_batch)
        if self._channel.dynamic_shapes:
            return lower_stage, training, signature, micro_batch
        return lower_stage, training, signature

    def _wait(self, stage: int, micro_batch: int, *, is_gradient: bool) -> Any:
        self._use_wait()
        pending = self._pending.pop((stage, micro_batch, is_gradient))
        doing = _WAITING[is_gradient]
        self._mark(doing, stage, micro_batch, self._ranks[pending.source])
        start = self._now()
        try:
            value = self._channel.wait(pending)
        except Exception:
            with communicating(
                f"stage {stage} {doing} of micro-batch {micro_batch} from position "
                f"{pending.source}",
                pending.source,
            ):
                raise
        self._record(EventKind.RECEIVE_WAIT, stage, micro_batch, start)
        return value

    def _use_wait(self) -> None:
        """Do what the caller of `run` has left for the first wait."""
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()

    def _keep_send(self, stage: int, peer_stage: int, flight: InFlight) -> None:
        """Hold a message until it has left, with a bound on how many are held."""
        self._sends.append((stage, self._positions[peer_stage], flight))
        if len(self._sends) > _MAX_SENDS:
            self._reap()

    def _reap(self) -> None:
        stage, peer, flight = self._sends.popleft()
        self._progress.mark(
            "waiting for a message to leave",
            micro_batch=self._progress.micro_batch,
            waiting_for=self._ranks[peer],
        )
        start = self._now()
        try:
            flight.wait()
        except Exception:
            with communicating(f"sending to position {peer}", peer):
                raise
        self._record(EventKind.SEND_WAIT, stage, None, start)

    def _explain(self, admit: Admission | None) -> None:
        """Let ranks that disagree be the explanation of a failure, if they say so soon.

        Raises:
            DisagreementError: They do.
        """
        at = self._progress
        place = at.doing, at.stage, at.micro_batch
        if admit is not None:
            with suppress(CommunicationError):
                admit(patience_s=_PATIENCE_S)
        at.mark(place[0], stage=place[1], micro_batch=place[2])

    # -- observing ----------------------------------------------------------------------------

    def _mark(self, doing: str, stage: int, micro_batch: int, peer: int | None = None) -> None:
        self._progress.mark(doing, stage=stage, micro_batch=micro_batch, waiting_for=peer)

    def _now(self) -> Instant:
        return 0.0 if self._recorder is None else self._recorder.now()

    def _record(self, kind: EventKind, stage: int, micro_batch: int | None, start: Instant) -> None:
        if self._recorder is not None:
            self._recorder.add(kind, stage, micro_batch, start, self._recorder.now())


def _differentiable(value: Any) -> list[Tensor]:
    """Return the tensors whose gradient comes back."""
    return [x for x in tensors_of(value) if x.requires_grad]


def _note(error: Exception, what: str, stage: int, micro_batch: int) -> None:
    error.add_note(f"pipeswift: in {what} of micro-batch {micro_batch} on stage {stage}")
