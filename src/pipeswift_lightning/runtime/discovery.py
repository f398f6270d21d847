"""One pass of the step over absent values: which layers, in which order, fed by what."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from pipeswift_lightning.runtime.absent import AbsentMode, to_absent
from pipeswift_lightning.runtime.containers import Containers
from pipeswift_lightning.runtime.operations import Operation, OperationCounter
from pipeswift_lightning.runtime.structure import leaves_of
from pipeswift_lightning.runtime.trace import StepTrace, Value

__all__ = ["Discovery", "DiscoveryDone", "LayerCalledTwiceError"]


class DiscoveryDone(BaseException):
    """Ends discovery once the network has returned, before the user's loss and metrics run."""


class LayerCalledTwiceError(RuntimeError):
    """A layer takes part in the step more than once; ``index`` says which."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class _TracingMode(AbsentMode):
    """An `AbsentMode` that tells the discovery which absent values meet in which gap."""

    def __init__(self, device: torch.device, discovery: "Discovery") -> None:
        super().__init__(device, absent_parameters=True, on_parameter=discovery.note_parameter)
        self._discovery = discovery

    @override
    def _run_absent(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._discovery.note_use(args, kwargs)
        if func in _DIFFERENTIATES:
            self._discovery.differentiated()
        result = super()._run_absent(func, args, kwargs)
        self._discovery.note_created(result)
        return result


class Discovery:
    """Collects a `StepTrace` while the step runs under its ``mode``.

    Args:
        device: The device that absent values claim to be on.
        at_return: Called when the network has returned; then the rest of the step runs as well, to
            see whether it calls the network again. ``None`` ends discovery there.
    """

    def __init__(
        self, device: torch.device, *, at_return: Callable[[], None] | None = None
    ) -> None:
        self.mode = _TracingMode(device, self)
        self._counter = self.mode.counter = OperationCounter(self._note_operation)
        self.order: list[int] = []
        self.network_returned = False
        self.returns_scalar = False
        self.returned_rows: frozenset[int] = frozenset()
        self.only_whole = ""
        self.changes_arguments = False
        self._at_return = at_return
        self._side_inputs: dict[int, tuple[int, bool]] = {}
        self._gap = 0
        self._inside_layer = False
        self._held: frozenset[int] = frozenset()
        self._alive: list[Any] = []  # ids stay unique only while the tensors live
        self._created: dict[int, int] = {}
        self._value_of: dict[int, int] = {}
        self._created_in: list[int] = []
        self._named_at: list[int] = []
        self._last_use: list[int] = []
        self._inputs: list[tuple[tuple[int, int], ...]] = []
        self._outputs: list[tuple[tuple[int, int], ...]] = []
        self._parameter_gaps: defaultdict[int, set[int]] = defaultdict(set)
        self._operations: dict[int, Operation] = {}
        self._operation_of: dict[int, Operation] = {}
        self._digests: dict[int, int] = {}

    # -- told by the mode ---------------------------------------------------------------------

    def note_parameter(self, parameter: nn.Parameter) -> None:
        """A parameter takes part outside the layers, or in a layer that does not hold it."""
        if self.network_returned:
            return
        if not self._inside_layer:
            self._parameter_gaps[id(parameter)].add(self._gap)
        elif id(parameter) not in self._held:
            self._parameter_gaps[id(parameter)].add(self._gap + 1)  # with the layer, like its gap

    def note_use(self, args: Any, kwargs: Any) -> None:
        """Code outside the layers uses absent values."""
        if self._inside_layer or self.network_returned:
            return
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._use(leaf, self._gap - 1)

    def note_created(self, result: Any) -> None:
        """Code outside the layers made absent values."""
        if self._inside_layer or self.network_returned:
            return
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._created:
                self._alive.append(leaf)
                self._created[id(leaf)] = self._gap

    def _use(self, leaf: Tensor, layer: int) -> None:
        value = self._value_of.get(id(leaf))
        if value is not None:
            self._last_use[value] = max(self._last_use[value], layer)
        elif self._created.get(id(leaf), layer + 1) <= layer:
            self._last_use[self._add(leaf, self._created[id(leaf)], self._created[id(leaf)])] = (
                layer
            )

    def _note_operation(self, operation: Operation, leaf: Tensor) -> None:
        self._operation_of.setdefault(id(leaf), operation)

    # -- told by the cut ----------------------------------------------------------------------

    def call_layer(
        self, index: int, layer: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Record the call of ``layer`` and return its absent output."""
        if self.network_returned:
            raise DiscoveryDone
        if index in self.order:
            msg = (
                f"layer {index} is called twice in one step (calls {self.order.index(index)} and "
                f"{len(self.order)}). Rule: each layer of the network runs once in a step, on one "
                "stage; that also means that the network is called once. Remedy: call the network "
                "once on the concatenated inputs, or give the repeated layer its own copy"
            )
            raise LayerCalledTwiceError(index, msg)
        position = len(self.order)
        self.order.append(index)
        self._digests[position] = self._counter.digest
        leaves = leaves_of((args, kwargs))
        self._inputs.append(
            tuple(
                (i, self._name(leaf, position))
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and (leaf.is_meta or isinstance(leaf, nn.Parameter))
            )
        )
        self._held = frozenset(map(id, layer.parameters()))
        output = self._absent_output(original, args, kwargs, leaves)
        self._gap = position + 1
        self._counter.enter(self._gap)
        self._outputs.append(
            tuple(
                (i, self._name(leaf, position + 1, is_output=True))
                for i, leaf in enumerate(leaves_of(output))
                if isinstance(leaf, Tensor) and leaf.is_meta
            )
        )
        return output

    def _absent_output(
        self, original: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Any]
    ) -> Any:
        self._inside_layer = self._counter.paused = True
        given = to_absent((args, kwargs))
        copies, before, containers = leaves_of(given), tree_flatten(given)[1], Containers(given)
        try:
            output = original(*given[0], **given[1])
            resized = tree_flatten(given)[1] != before
            self._note_changes(leaves, copies, resized or containers.changed(but_for=output))
            return to_absent(output)
        except (RuntimeError, NotImplementedError):
            # A layer that cannot run without data; blocks keep their first tensor's shape.
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            return torch.empty_like(tensors[0], device="meta")
        finally:
            self._inside_layer = self._counter.paused = False

    def _note_changes(self, leaves: list[Any], copies: list[Any], resized: bool) -> None:  # noqa: FBT001
        """Note side inputs that the layer has changed; it matters if another layer has them too."""
        self.changes_arguments |= resized
        for leaf, copy in zip(leaves, copies, strict=True):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._alive.append(leaf)
                given, changed = self._side_inputs.get(id(leaf), (0, False))
                state = (given + 1, changed or copy._version > 0)
                self._side_inputs[id(leaf)] = state
                self.changes_arguments |= state[0] > 1 and state[1]

    def _name(self, leaf: Tensor, boundary: int, *, is_output: bool = False) -> int:
        value = self._value_of.get(id(leaf))
        if value is None:
            created = boundary if is_output else self._created.get(id(leaf), self._gap)
            if isinstance(leaf, nn.Parameter):
                self._parameter_gaps[id(leaf)].add(self._gap)
            by_operation = not is_output and id(leaf) in self._operation_of
            value = self._add(leaf, created, created if by_operation else boundary)
        if not is_output:
            self._last_use[value] = max(self._last_use[value], boundary)
        return value

    def _add(self, leaf: Tensor, created: int, named_at: int) -> int:
        value = len(self._created_in)
        self._alive.append(leaf)
        self._value_of[id(leaf)] = value
        self._created_in.append(created)
        self._named_at.append(named_at)
        self._last_use.append(-1)
        if created == named_at and id(leaf) in self._operation_of:
            self._operations[value] = self._operation_of[id(leaf)]
        return value

    def network_returns(self, output: Any) -> None:
        """Note what the network has returned.

        Raises:
            DiscoveryDone: Nobody wants to know how the step goes on.
        """
        self.note_use((output,), {})  # what it returns is used by the step, on the last stage
        self.network_returned = True
        tensors = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]
        self.returns_scalar = any(x.dim() == 0 and x.is_floating_point() for x in tensors)
        self.returned_rows = frozenset(x.shape[0] if x.dim() else -1 for x in tensors)
        if self._at_return is None:
            raise DiscoveryDone
        self._at_return()

    def network_called(self) -> None:
        """The step calls the network.

        Raises:
            DiscoveryDone: It has called it before.
        """
        if self.network_returned:
            self.only_whole = "calls the network more than once"
            raise DiscoveryDone

    def differentiated(self) -> None:
        """The step differentiates by itself.

        Raises:
            DiscoveryDone: That ends what can be seen.
        """
        if self.network_returned:
            self.only_whole = "differentiates by itself"
            raise DiscoveryDone

    def trace(self, names: Mapping[int, str]) -> StepTrace:
        """Return what was seen; ``names`` names the module's parameters by ``id``."""
        return StepTrace(
            order=tuple(self.order),
            values=tuple(map(Value, self._created_in, self._named_at, self._last_use)),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            parameter_gaps={
                names[key]: frozenset(gaps)
                for key, gaps in self._parameter_gaps.items()
                if key in names
            },
            operations=self._operations,
            digests=self._digests,
            calls_network=self.network_returned,
            returns_scalar=self.returns_scalar,
            returned_rows=self.returned_rows,
            only_whole=self.only_whole,
        )
