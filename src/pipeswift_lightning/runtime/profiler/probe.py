"""One pass of the user's step, in which each layer is timed and weighed by itself.

The graph is cut at each layer's inputs and outputs. So what a layer's backward takes is known
without that of its neighbours, and so is what the code between two layers takes: a *gap*, which
counts for the layer before it, as on a stage (gap 0 for the first layer). The losses and heads
after the last layer are a gap too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from typing_extensions import override

from pipeswift_lightning.runtime.absent import AbsentMode, absent_output, entered, left, to_absent
from pipeswift_lightning.runtime.arrival import Arrival
from pipeswift_lightning.runtime.layer_wrapper import LayerWrapper
from pipeswift_lightning.runtime.profiler.clock import Clock
from pipeswift_lightning.runtime.profiler.copies import StandIns
from pipeswift_lightning.runtime.structure import leaves_of, refilled
from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["OTHER_NUMBER", "Pass", "Probe", "ProfileError", "What"]


class ProfileError(RuntimeError):
    """A network that cannot be measured."""


OTHER_NUMBER = (
    "a layer takes or returns fewer tensors for these shapes than in the first look at the step. "
    "Rule: what layers take and return has one structure. Remedy: return coarser layers from "
    "configure_pipeline()"
)


class What(Enum):
    """What one pass measures."""

    FULL = auto()  # forward, and backward to inputs and weights
    INPUTS = auto()  # a backward to the inputs only
    MEMORY = auto()  # bytes that are kept and sent; no backward


@dataclass(slots=True)
class Pass:
    """What one pass has measured, by a layer's position in the order of calls.

    Attributes:
        forward_s: Seconds of the forwards, the gaps included.
        backward_s: Seconds of the backwards (to the inputs only, if the pass was for these).
        saved_bytes: What autograd keeps.
        input_bytes: What layers before the layer hand to it.
        value_bytes: Size of each value of the trace that layers take or return.
    """

    forward_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    saved_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    input_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    value_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Segment:
    """A part of the graph between two cuts.

    Attributes:
        position: The layer that it counts for.
        roots: Where its backward begins.
        inputs: Where it ends, besides parameters.
        again: Whether its graph is kept: the code of a later gap may reach into it.
    """

    position: int
    roots: list[Tensor]
    inputs: list[GradientEdge]
    again: bool


class _EndedError(BaseException):
    """Ends a pass. Not an ``Exception``, so that user code does not catch it."""


class Probe(LayerWrapper):
    """Measures the layers of a network while the user's step calls them.

    Args:
        layers: The layers, as registered.
        trace: Their order and the values between them.
        clock: Takes the time.
        device: Where the layers run.
        loose: Stand-ins for what is in no layer.
        held: Stand-ins for each layer to measure, by its position in call order; others do not run.
        at_once: Whether a layer's backward follows its forward at once, so that one layer's memory
            is all that is needed; otherwise it comes after all forwards, as in a real step.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        trace: StepTrace,
        clock: Clock,
        device: torch.device,
        loose: StandIns,
        held: Mapping[int, StandIns],
        *,
        at_once: bool,
    ) -> None:
        super().__init__(layers)
        self._trace = trace
        self._positions = {index: position for position, index in enumerate(trace.order)}
        self._clock, self._device = clock, device
        self._loose, self._held, self._at_once = loose, held, at_once
        whole = len(held) == trace.num_layers
        self._mode = None if whole else AbsentMode(device, absent_parameters=False)
        self._reset(What.FULL)

    def _reset(self, what: What) -> None:
        self._what = what
        self._pass = Pass()
        self._forward: list[tuple[int, Any, Any]] = []
        self._backward: list[tuple[int, Any, Any]] = []
        self._segments: list[_Segment] = []
        self._next = 0
        self._gap_inputs: list[GradientEdge] = []
        self._gap_start: Any = None
        self._running = False
        self._current = 0
        self._seen: dict[int, Any] = {}

    @contextmanager
    def in_place(self) -> Iterator["Probe"]:
        """Intercept the layers, and let the stand-ins take their places; gives the probe."""
        with ExitStack() as stack:
            stack.enter_context(self._loose.in_place())
            if not self._at_once:
                for held in self._held.values():
                    stack.enter_context(held.in_place())
            self.choose(self._trace.order)
            self.install()
            stack.callback(self.remove)
            yield self

    def run(self, step: Callable[[], Any], what: What) -> Pass:
        """Run ``step`` once, and return what its layers took.

        Raises:
            ProfileError: The step does not call the layers in their order.
        """
        self._reset(what)
        self._running = True
        hooks = saved_tensors_hooks(self._note_saved, lambda tensor: tensor)
        try:
            with torch.enable_grad(), entered(self._mode), ExitStack() as stack:
                if what is What.MEMORY:
                    stack.enter_context(hooks)
                self._gap_start = self._clock.mark()
                output = step()
                self._end_gap(leaves_of(output))
        except _EndedError:
            pass
        finally:
            self._running = False
        if self._next <= max(self._held):
            message = (
                f"a step called {self._next} of the network's {self._trace.num_layers} layers. "
                "Rule: each step calls all of them in the same order. Remedy: profile with batches "
                "of one kind"
            )
            raise ProfileError(message)
        while self._segments:
            self._differentiate(self._segments.pop())
        self._clock.finish()
        for marks, seconds in (
            (self._forward, self._pass.forward_s),
            (self._backward, self._pass.backward_s),
        ):
            for position, start, end in marks:
                seconds[position] += self._clock.seconds(start, end)
        return self._pass

    @override
    def call(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if not self._running:  # recomputed within a backward
            return original(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        self._end_gap(leaves)
        position = self._positions[index]
        if position != self._next:
            message = (
                f"a step called layer {position} of the network where layer {self._next} was due. "
                "Rule: each step calls the layers in the same order. Remedy: profile with batches "
                "of one kind"
            )
            raise ProfileError(message)
        self._next += 1
        if position > max(self._held):
            raise _EndedError
        if position not in self._held:
            output = absent_output(original, args, kwargs)
            self._begin_gap()
            return output
        return self._measure(position, original, (args, kwargs), leaves)

    def _measure(
        self, position: int, original: Callable[..., Any], like: Any, leaves: list[Any]
    ) -> Any:
        with left(self._mode):
            leaves = [self._made_present(leaf) for leaf in leaves]
        self._note_values(leaves, self._trace.inputs[position])
        self._pass.input_bytes[position] = sum(
            {v: _bytes(leaves[leaf]) for leaf, v in self._trace.inputs[position]}.values()
        )
        given, inputs = _arrived(leaves)
        args, kwargs = refilled(like, given)
        held = self._held[position]
        with ExitStack() as stack:
            stack.enter_context(left(self._mode))
            if self._at_once:
                stack.enter_context(held.in_place())
            self._enter(position, given)
            start = self._clock.mark()
            output = original(*args, **kwargs)
            self._forward.append((position, start, self._clock.mark()))
            outputs, like = leaves_of(output), to_absent(output)
            del output, args, kwargs, given
            roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
            self._add(_Segment(position, roots, inputs, again=False))
        self._note_values(outputs, self._trace.outputs[position])
        outputs, self._gap_inputs = _arrived(outputs)
        self._begin_gap()
        return refilled(like, outputs)

    def _begin_gap(self) -> None:
        self._gap_start = self._clock.mark()

    def _end_gap(self, leaves: list[Any]) -> None:
        """The code before a layer, or before the step's end, is done."""
        position = max(self._next - 1, 0)
        if position in self._held:
            self._forward.append((position, self._gap_start, self._clock.mark()))
            roots = [
                x
                for x in leaves
                if isinstance(x, Tensor) and x.grad_fn is not None and not x.is_meta
            ]
            with left(self._mode):
                self._add(_Segment(position, roots, self._gap_inputs, again=True))
        self._gap_inputs = []

    # -- backward -----------------------------------------------------------------------------

    def _add(self, segment: _Segment) -> None:
        if self._what is What.MEMORY or not segment.roots:
            return
        if not self._at_once:
            self._segments.append(segment)
            return
        self._running = False
        try:
            self._differentiate(segment)
        finally:
            self._running = True

    def _differentiate(self, segment: _Segment) -> None:
        roots, edges = segment.roots, segment.inputs
        gradients = [torch.ones_like(root) for root in roots]
        with torch.autocast(self._device.type, enabled=False):
            start = self._clock.mark()
            match self._what:
                case What.INPUTS if not edges:
                    pass
                case What.INPUTS:
                    torch.autograd.grad(
                        roots, edges, gradients, retain_graph=segment.again, allow_unused=True
                    )
                case _:
                    torch.autograd.backward(roots, gradients, retain_graph=segment.again)
            self._backward.append((segment.position, start, self._clock.mark()))

    # -- memory -------------------------------------------------------------------------------

    def _enter(self, position: int, given: list[Any]) -> None:
        """From now on, what is saved is this layer's."""
        self._current = position
        if self._at_once:  # Only what is handed on stays in memory, so only that is counted once.
            alive = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
            self._seen = {key: held for key, held in self._seen.items() if key in alive}

    def _note_saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(self._current)
        ours = self._loose.hold(tensor) or (held is not None and held.hold(tensor))
        if not ours and key not in self._seen:
            self._seen[key] = storage  # held, or its address would be another's soon
            self._pass.saved_bytes[self._current] += storage.nbytes()
        return tensor

    def _note_values(self, leaves: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
        if any(leaf >= len(leaves) for leaf, _ in pairs):
            raise ProfileError(OTHER_NUMBER)
        for leaf, value in pairs:
            self._pass.value_bytes[value] = _bytes(leaves[leaf])

    def _made_present(self, leaf: Any) -> Any:
        """Return data of an absent value's shape: what another rank's layers would give."""
        if not isinstance(leaf, Tensor) or not leaf.is_meta or self._device.type == "meta":
            return leaf
        made = torch.empty_like(leaf, device=self._device)
        if not made.is_floating_point():
            return made.zero_()
        return made.normal_().requires_grad_()


def _arrived(leaves: Sequence[Any]) -> tuple[list[Any], list[GradientEdge]]:
    """Cut the graph: return the leaves without their history, and where gradients arrive."""
    new: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in new:
            new[id(leaf)] = Arrival(leaf.detach()).tensor
    edges = [get_gradient_edge(tensor) for tensor in new.values()]
    return [new.get(id(leaf), leaf) for leaf in leaves], edges


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
