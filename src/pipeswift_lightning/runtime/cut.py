"""Cut the user's step at layer boundaries, without an edit to its code.

Each stage runs the step from its first line. The layers of other stages do not run: those before
the stage return absent values (see `absent`), and the call of the first layer after the stage ends
the run and yields the values that cross the cut. The last stage runs on into the user's loss. So
a stage executes its own layers and the code between them, and each mask or position that depends
on the batch alone is computed where it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.absent import AbsentMode, entered, left
from pipeswift_lightning.runtime.discovery import Discovery, DiscoveryDone, LayerCalledTwiceError
from pipeswift_lightning.runtime.network_call import CutError, NetworkCall
from pipeswift_lightning.runtime.recompute import is_recomputing, note_present, with_present
from pipeswift_lightning.runtime.rng import Reseed, enter_layer
from pipeswift_lightning.runtime.run_state import RunState
from pipeswift_lightning.runtime.skipped import SkippedLayers
from pipeswift_lightning.runtime.structure import leaves_of, mapped, refilled
from pipeswift_lightning.runtime.trace import StepTrace, Stretch

__all__ = ["Boundary", "Completed", "CutError", "LayerCut"]

_WHOLE = Stretch((), (), frozenset(), {})  # of the only stage


@dataclass(frozen=True, slots=True)
class Boundary:
    """The run reached the next stage's first layer; ``values`` cross the cut."""

    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """The run reached the end of the step; ``output`` is what the step returned."""

    output: Any


class _ReachedBoundaryError(BaseException):
    """Ends a run at a cut. Not an ``Exception``, so that user code does not catch it."""


class LayerCut:
    """Intercepts the layers of a network, and the network's own call.

    Args:
        network: The module whose call is pipelined.
        layers: Its layers, as they are registered (the call order is discovered).
        network_name: How errors name the network, for instance ``"self.model"``.
        device: The device of this rank's stage.
        returned: What a step may use of the network's output; the rest need not reach it.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Sequence[nn.Module],
        *,
        network_name: str,
        device: torch.device,
        returned: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        self._returned = returned
        self.network = network
        self.layers = tuple(layers)
        self.network_name = network_name
        self.device = device
        self._uncut: set[int] = set()
        self._run: RunState | None = None
        self._discovery: Discovery | None = None
        self.call = NetworkCall(network_name, len(self.layers), device)
        self.on_outside: Callable[[], None] | None = None  # a layer runs outside any run
        self._skipped = SkippedLayers(self.layers, network_name)
        self._originals: list[tuple[nn.Module, Callable[..., Any]]] = []

    @property
    def is_installed(self) -> bool:
        """Whether the interception is in place."""
        return bool(self._originals)

    def install(self) -> None:
        """Put the interception in place; `remove` takes it away."""
        for index, layer in enumerate(self.layers):
            self._intercept(layer, partial(self._call_layer, index))
        self._intercept(self.network, self._call_network)

    def remove(self) -> None:
        """Give the modules their own ``forward`` back."""
        for module, forward in reversed(self._originals):
            del module.forward
            if module.forward != forward:  # it was an attribute of the instance already
                module.forward = forward
        self._originals.clear()

    def _intercept(self, module: nn.Module, handler: Callable[..., Any]) -> None:
        original = module.forward
        self._originals.append((module, original))
        module.forward = partial(handler, original)

    # -- discovery ----------------------------------------------------------------------------

    def discover(
        self,
        step: Callable[[], Any],
        *,
        step_name: str,
        names: Mapping[int, str],
        at_return: Callable[[], None] | None = None,
    ) -> StepTrace:
        """Run ``step`` once on absent values, and return the order and flow of its layers.

        Nothing is computed and no rank is needed: every rank finds the same trace by itself.

        Args:
            step: The user's step with its arguments bound.
            step_name: How errors name the step.
            names: Names of the module's parameters, by ``id``.
            at_return: Called when the network has returned. Then the step runs on, as far as it
                can without data, and the trace tells whether it calls the network again.

        Raises:
            CutError: The step calls no layer, or one of them twice.
        """
        while True:
            discovery = Discovery(self.device, at_return=at_return)
            try:
                self._discover_once(discovery, step)
            except LayerCalledTwiceError as error:
                # It cannot be cut off, but it can run as code between the other layers.
                self._uncut.add(error.index)
                if len(self._uncut) == len(self.layers):
                    raise
            else:
                break
        if not discovery.order:
            raise CutError(self.call.not_called(step_name))
        if discovery.changes_arguments:
            msg = (
                f"a layer of {self.network_name} changes a tensor or a list that it is given and "
                "that the step made itself. Rule: layers hand on what they compute by returning "
                "it, since another stage has its own copy of their arguments. Remedy: return the "
                "changed value from the layer, and pass it to the next"
            )
            raise CutError(msg)
        return discovery.trace(names)

    def _discover_once(self, discovery: Discovery, step: Callable[[], Any]) -> None:
        self._discovery = discovery
        try:
            with discovery.mode:
                step()
        except DiscoveryDone:
            pass
        except Exception:
            # What follows the network needs data, which nobody has yet; there is no more to see.
            if not discovery.network_returned:
                raise
        finally:
            self._discovery = None

    # -- running ------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        *,
        step_name: str,
        trace: StepTrace | None,
        first: int,
        last: int,
        received: Sequence[Tensor],
        reseed: Reseed,
    ) -> Boundary | Completed:
        """Run ``step`` over the layers ``first <= i < last`` (in call order).

        Args:
            step: The user's step with its arguments bound.
            step_name: How errors name the step.
            trace: What `discover` found; ``None`` only where one stage holds every layer.
            first: First layer of the stage.
            last: First layer of the next stage; the number of layers on the last stage.
            received: The values ``trace.carried(first)``.
            reseed: Called with (index, is_layer) before each layer and each gap of code.

        Raises:
            CutError: The network is called twice or not at all, or layers out of order.
        """
        num_layers = trace.num_layers if trace is not None else len(self.layers)
        stretch, mode = _WHOLE, None
        if trace is not None:  # nothing is absent on the first stage, or a wrong step would show it
            stretch = trace.stretch(first, last)
            seen = self._skipped.operations
            mode = AbsentMode(
                self.device, absent_parameters=first > 0, strict=first == 0, seen=seen
            )
        present = dict(zip(stretch.arriving, received, strict=True))
        run = RunState(trace, first, last, present, reseed, mode, stretch)
        self._run = run
        try:
            reseed(0, False)  # noqa: FBT003 -- a gap, not a layer
            with entered(mode):
                output = step()
        except _ReachedBoundaryError:
            return Boundary(run.boundary)
        finally:
            self._run = None
            if mode is not None:
                mode.deferred.clear()
        self._check_complete(run, step_name, num_layers, last)
        return Completed(_resolved(output, run.resolve))

    def _check_complete(self, run: RunState, step_name: str, num_layers: int, last: int) -> None:
        whole = run.trace is None
        if run.position == 0 or (not whole and run.position < num_layers):
            msg = (
                f"{step_name} called {run.position} of the {num_layers} layers of "
                f"{self.network_name}. Rule: each step calls the network exactly once. Remedy: "
                "call it in every step, whatever the batch"
            )
            raise CutError(msg)
        if last < num_layers:
            msg = f"{step_name} ended before layer {last}, where the next stage begins"
            raise CutError(msg)

    def _call_network(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.call.answer is not None:
            return self.call.answer(*args, **kwargs)
        if self._discovery is not None:
            self._discovery.network_called()
            output = original(*args, **kwargs)
            if self._discovery.order:
                self._discovery.network_returns(self._returned(output))
            return output
        run = self._run
        if run is not None:
            run.network_calls += 1
            if run.network_calls > 1 and run.trace is not None:
                raise CutError(self.call.called_twice())
        return original(*args, **kwargs)

    def _call_layer(
        self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if index in self._uncut:
            return original(*args, **kwargs)
        if self._discovery is not None:
            return self._discovery.call_layer(index, self.layers[index], original, args, kwargs)
        run = self._run
        if run is None:
            return self._call_outside(index, original, args, kwargs)
        position, trace, mode = run.position, run.trace, run.mode
        if trace is not None:
            order = trace.order
            if position >= len(order) or order[position] != index:
                raise CutError(self.call.out_of_order(index, position, order))
        if mode is not None and mode.counter is not None:
            run.leave_gap(self.network_name, mode.counter)
        run.position += 1
        with left(mode):
            if position < run.first:
                return self._skip(run, index, original, args, kwargs)
            return self._run_or_end(run, position, original, args, kwargs)

    def _run_or_end(
        self, run: RunState, position: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if run.trace is not None:
            leaves = leaves_of((args, kwargs))
            changed = self._bind(run, run.trace, position, leaves)
            if position == run.last:
                run.boundary = run.crossing(self.network_name)
                raise _ReachedBoundaryError
            if changed:
                args, kwargs = refilled((args, kwargs), leaves)
        run.reseed(position, True)  # noqa: FBT003 -- a layer
        output = original(*args, **kwargs)
        run.enter_gap(position + 1, output)
        run.keep_outputs(position, output)
        return output

    def _call_outside(
        self, index: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if any(p.is_meta for p in self.layers[index].parameters()):
            raise CutError(self.call.outside(index))
        if self.on_outside is not None:
            self.on_outside()
        if is_recomputing():
            args, kwargs = with_present((args, kwargs))
            enter_layer(self.device)
        return original(*args, **kwargs)

    def _skip(
        self, run: RunState, index: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        assert run.trace is not None
        assert run.mode is not None
        position = run.position - 1
        leaves = leaves_of((args, kwargs))
        run.remember(leaves, run.trace.inputs[position])
        outputs, like = self._skipped.answer(index, original, args, kwargs, leaves, run.mode)
        run.remember(outputs, run.trace.outputs[position])
        run.enter_gap(position + 1, outputs)
        return refilled(like, outputs)

    def _bind(self, run: RunState, trace: StepTrace, position: int, leaves: list[Any]) -> bool:
        """Put the values that have arrived in the place of absent arguments; were there any?"""
        if position == run.first:
            run.remember(leaves, trace.inputs[position])
            if run.mode is not None:
                run.mode.absent_parameters = False
                run.mode.resolve = run.resolve
        changed = False
        for leaf, value in trace.inputs[position]:
            if value in run.present:
                present = run.present[value]
                note_present(leaves[leaf], present, f"layer {position} of {self.network_name}")
                leaves[leaf] = present
                changed = True
            elif value in run.stretch.keep:
                run.present[value] = leaves[leaf]
        for i, leaf_value in enumerate(leaves):
            if isinstance(leaf_value, Tensor) and leaf_value.is_meta:
                if id(leaf_value) not in run.resolve:
                    self._raise_absent(position, i)
                leaves[i] = run.resolve[id(leaf_value)]
                changed = True
        return changed

    def _raise_absent(self, position: int, leaf: int) -> None:
        msg = (
            f"layer {position} of {self.network_name} takes a value (argument {leaf}) that an "
            "earlier stage computes and no layer before it takes or returns. Rule: what crosses a "
            "cut is an argument or an output of a layer. Remedy: pass it through the layers, or "
            "return other layers from configure_pipeline()"
        )
        raise CutError(msg)


def _resolved(output: Any, present: Mapping[int, Tensor]) -> Any:
    """Replace absent tensors that a step returns untouched by what has arrived for them."""
    if not present:
        return output

    def resolved(leaf: Any) -> Any:
        return present.get(id(leaf), leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    return mapped(resolved, output)
