"""What one look at the user's step tells: the layers' order, and the values that cross each cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeswift_lightning.runtime.operations import Operation

__all__ = ["StepTrace", "Stretch", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that depends on parameters, and which may have to cross a cut.

    A *gap* is the code between two layers: gap ``g`` runs after layer ``g - 1`` and before layer
    ``g``; gap 0 is the code before the first layer, gap ``n`` the code after the last.

    Attributes:
        created_in_gap: The gap whose code computed it (``j + 1`` for an output of layer ``j``).
        named_at: The first layer boundary at which a stage can name it: by the operation that made
            it, or as an output of the layer before.
        last_use: The last layer whose stage needs it; use in gap ``g`` counts for layer ``g - 1``.
    """

    created_in_gap: int
    named_at: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a trace tells of the layers of one stage.

    Attributes:
        arriving: The values that the stage receives.
        leaving: The values that the next stage receives.
        keep: The same, for a fast look.
        wanted: Which of both are made by code outside the layers, by the operation.
    """

    arriving: tuple[int, ...]
    leaving: tuple[int, ...]
    keep: frozenset[int]
    wanted: Mapping[Operation, int]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The order of layers in one kind of step, and the values that flow between them.

    Attributes:
        order: Registered index of each layer, in the order in which the step calls them.
        values: Every value that crosses at least one layer boundary.
        inputs: For each layer (in call order), pairs (argument leaf, value index).
        outputs: For each layer (in call order), pairs (output leaf, value index).
        parameter_gaps: For each parameter (by name) that is used outside the layers, the gaps.
        operations: The operation that made each value which code outside the layers made.
        digests: For each gap, what its operations were.
        calls_network: Whether the step calls the network itself, not its layers one by one.
        returns_scalar: Whether the network returns a scalar, such as a loss of its own.
        returned_rows: The first dims of the tensors that the network returns; -1 for a scalar.
        only_whole: What the step was seen to do that it can do only where every rank runs it
            whole: calling the network once more, say. Empty, if nothing was seen.
    """

    order: tuple[int, ...]
    values: tuple[Value, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    outputs: tuple[tuple[tuple[int, int], ...], ...]
    parameter_gaps: Mapping[str, frozenset[int]]
    operations: Mapping[int, Operation] = field(default_factory=dict)
    digests: Mapping[int, int] = field(default_factory=dict)
    calls_network: bool = True
    returns_scalar: bool = False
    returned_rows: frozenset[int] = frozenset()
    only_whole: str = ""
    _stretches: dict[tuple[int, int], Stretch] = field(  # asked for by each run of the step
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of_all(cls, traces: Sequence["StepTrace"]) -> "StepTrace":
        """Return the first trace, with the gaps in which any of them uses each parameter.

        Args:
            traces: Of kinds of steps that call the same layers in the same order.
        """
        gaps: dict[str, frozenset[int]] = {}
        for trace in traces:
            for name, found in trace.parameter_gaps.items():
                gaps[name] = gaps.get(name, frozenset()) | found
        return replace(traces[0], parameter_gaps=gaps)

    @property
    def num_layers(self) -> int:
        """Number of layers that the step calls."""
        return len(self.order)

    def carried(self, boundary: int) -> tuple[int, ...]:
        """Return the values that a stage starting at layer ``boundary`` must receive.

        Example:
            >>> x = Value(created_in_gap=1, named_at=1, last_use=1)
            >>> trace = StepTrace((0, 1), (x,), ((), ((0, 0),)), (((0, 0),), ()), {})
            >>> trace.carried(1), trace.carried(0), trace.carried(2)
            ((0,), (), ())
        """
        if not 0 < boundary < self.num_layers:
            return ()
        return tuple(
            index
            for index, value in enumerate(self.values)
            if value.created_in_gap <= boundary
            and value.named_at <= boundary
            and value.last_use >= boundary
        )

    def stretch(self, first: int, last: int) -> "Stretch":
        """Return what the trace tells of one stage.

        Args:
            first: The stage's first layer.
            last: The next stage's first layer.
        """
        known = self._stretches.get((first, last))
        if known is None:
            carried = self.carried(first), self.carried(last)
            values = {*carried[0], *carried[1]}
            wanted = {
                operation: value for value, operation in self.operations.items() if value in values
            }
            known = self._stretches[first, last] = Stretch(*carried, frozenset(carried[1]), wanted)
        return known
