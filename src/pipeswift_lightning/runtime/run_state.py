"""The state of one pass of the step over the layers of a stage."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeswift_lightning.runtime.absent import AbsentMode
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.operations import Operation, OperationCounter, mark_dependent
from pipeswift_lightning.runtime.rng import Reseed
from pipeswift_lightning.runtime.structure import leaves_of
from pipeswift_lightning.runtime.trace import StepTrace, Stretch

__all__ = ["RunState"]


@dataclass(slots=True)
class RunState:
    """The state of one pass of the step over layers ``first`` to ``last - 1``.

    Attributes:
        present: The values that have arrived or been computed here, by index.
        stretch: Which values arrive, and which the next stage needs.
        resolve: The present tensor for each absent one, by ``id``.
        alive: Keeps the absent ones, or their ids could be others'.
    """

    trace: StepTrace | None
    first: int
    last: int
    present: dict[int, Tensor]
    reseed: Reseed
    mode: AbsentMode | None
    stretch: Stretch
    position: int = 0
    network_calls: int = 0
    boundary: tuple[Tensor, ...] = ()
    resolve: dict[int, Tensor] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode is not None and self.stretch.wanted:
            mark_dependent(list(self.present.values()))
            self.mode.counter = OperationCounter(self._made)

    def _made(self, operation: Operation, tensor: Tensor) -> None:
        """An operation outside the layers has made a value."""
        value = self.stretch.wanted.get(operation)
        if value is None:
            return
        if tensor.is_meta:
            self.stand_in(tensor, value)
        elif value in self.stretch.keep:
            self.present[value] = tensor

    def stand_in(self, absent: Any, value: int) -> None:
        """Let the present tensor of ``value`` take the place of ``absent``, if there is one."""
        if value in self.present and isinstance(absent, Tensor):
            self.resolve[id(absent)] = self.present[value]
            self.alive.append(absent)

    def remember(self, leaves: list[Any], pairs: tuple[tuple[int, int], ...]) -> None:
        """Let the values that have arrived take the place of absent arguments or outputs."""
        for leaf, value in pairs:
            self.stand_in(leaves[leaf], value)

    def leave_gap(self, network: str, counter: OperationCounter) -> None:
        """A layer is called: the code before it, whose operations were counted, has ended.

        Raises:
            CutError: That code ran other operations than in the first step, and they name values.
        """
        gap, digests = self.position, {} if self.trace is None else self.trace.digests
        named = any(operation.gap == gap for operation in self.stretch.wanted)
        if named and counter.digest != digests.get(gap):
            msg = (
                f"the code of {network} before its layer {gap} (in call order) ran other "
                "operations than in the first step, and a value from there is used after later "
                "layers. Rule: such code is the same for every batch. Remedy: pass the value "
                "through the layers, or return other layers from configure_pipeline()"
            )
            raise CutError(msg)
        counter.paused = True

    def enter_gap(self, gap: int, output: Any) -> None:
        """A layer has returned ``output``: the code after it runs."""
        counter = self.mode.counter if self.mode is not None else None
        if counter is not None:
            counter.paused = False
            mark_dependent(output)
            counter.enter(gap)
        self.reseed(gap, False)  # noqa: FBT003 -- a gap, not a layer

    def keep_outputs(self, position: int, output: Any) -> None:
        """Note which outputs of a layer the next stage needs."""
        keep = self.stretch.keep
        if self.trace is None or not keep:
            return
        leaves = leaves_of(output)
        for leaf, value in self.trace.outputs[position]:
            if value in keep:
                self.present[value] = leaves[leaf]

    def crossing(self, network: str) -> tuple[Tensor, ...]:
        """Return the values that the next stage needs.

        Raises:
            CutError: This batch did not make one of them.
        """
        try:
            return tuple([self.present[value] for value in self.stretch.leaving])
        except KeyError:
            msg = (
                f"code between the layers of {network} made fewer values than in the first step "
                "(a list whose length depends on the batch), and later code uses them. Rule: what "
                "crosses a cut is the same for every batch. Remedy: join the list before the next "
                "layer, or move the cut by partition=[...]"
            )
            raise CutError(msg) from None
