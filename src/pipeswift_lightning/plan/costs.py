"""What a step costs: seconds of computation, bytes on the wire, speed of the wire."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

__all__ = ["CostError", "LayerCost", "Link", "Origin", "StepCosts"]

Table: TypeAlias = tuple[tuple[float, ...], ...]


class CostError(ValueError):
    """A cost that cannot be: negative, not finite, or of the wrong shape."""


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        message = (
            f"{name}={value} is no cost. Rule: finite, and 0 or more. Remedy: measure it again"
        )
        raise CostError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs for one micro-batch.

    Args:
        forward_s: Time of the forward pass, in seconds.
        backward_s: Time of the backward pass, in seconds.
        activation_bytes: Size of the layer's output, which a cut after the layer has to send.
        parameter_bytes: Size of the layer's parameters.

    Raises:
        CostError: A value is negative or not finite.

    Example:
        >>> cost = LayerCost(forward_s=1, backward_s=2, activation_bytes=8, parameter_bytes=9)
        >>> LayerCost.from_json(cost.to_json()) == cost
        True
    """

    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check(name, getattr(self, name))

    def to_json(self) -> str:
        """Return the cost as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LayerCost":
        """Return the cost that ``to_json`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between two neighbouring stages, the same in both directions.

    Args:
        latency_s: Time from the last byte sent to the message being there, in seconds.
        bandwidth_bytes_per_s: Above 0; infinite means that size costs nothing.

    Raises:
        CostError: The latency is negative or not finite, or the bandwidth is not above 0.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        _check("latency_s", self.latency_s)
        if not self.bandwidth_bytes_per_s > 0:
            message = (
                f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s} is not allowed. Rule: above "
                "0. Remedy: leave it out for a link whose speed does not matter"
            )
            raise CostError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where measured costs come from: they hold for the same network on the same device only.

    Args:
        structure: Digest of the network's modules, parameters and settings.
        device: The device's name.
        dtype: Of the parameters.
        versions: Versions of what computes, by name.
    """

    structure: str = ""
    device: str = ""
    dtype: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def differences(self, other: "Origin") -> list[str]:
        """Return in words what is not the same in ``other``.

        Example:
            >>> Origin(device="a").differences(Origin(device="b"))
            ["device 'a' is now 'b'"]
        """
        names = ("structure", "device", "dtype", "versions")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} {a!r} is now {b!r}" for name, a, b in pairs if a != b]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of one training step, for each stage and micro-batch.

    Args:
        forward_s: Seconds of each Forward. Shape ``[num_stages][num_micro_batches]``.
        backward_s: Seconds of each Backward; the same shape.
        activation_bytes: Bytes from stage ``s`` to ``s + 1``. Shape
            ``[num_stages - 1][num_micro_batches]``. None: messages take no time on the wire.
        gradient_bytes: Bytes from stage ``s + 1`` back to ``s``; the same shape. None: as many as
            the activation, whose gradient it is.

    Raises:
        CostError: A value is negative or not finite, or a table has another shape; names the entry.

    Example:
        >>> costs = StepCosts(forward_s=[[1, 2]], backward_s=[[2, 4]])
        >>> costs.num_stages, costs.num_micro_batches
        (1, 2)
        >>> StepCosts.from_json(costs.to_json()) == costs
        True
    """

    forward_s: Table
    backward_s: Table
    activation_bytes: Table | None = None
    gradient_bytes: Table | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        micro_batches = len(self.forward_s[0]) if stages else 0
        if micro_batches == 0:
            message = (
                "forward_s is empty. Rule: one row a stage, and in it one number a micro-batch. "
                "Remedy: give them"
            )
            raise CostError(message)
        for name, num_rows in (
            ("forward_s", stages),
            ("backward_s", stages),
            ("activation_bytes", stages - 1),
            ("gradient_bytes", stages - 1),
        ):
            table = getattr(self, name)
            if table is not None:
                object.__setattr__(self, name, _table(name, table, num_rows, micro_batches))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        num_micro_batches: int,
        *,
        forward_s: float,
        backward_s: float,
        activation_bytes: float = 0,
    ) -> "StepCosts":
        """Return equal costs for all stages and micro-batches.

        Example:
            >>> StepCosts.uniform(2, 1, forward_s=1.0, backward_s=2.0).backward_s
            ((2.0,), (2.0,))
        """

        def fill(value: float, num_rows: int) -> Table:
            return ((value,) * num_micro_batches,) * num_rows

        return cls(
            forward_s=fill(forward_s, num_stages),
            backward_s=fill(backward_s, num_stages),
            activation_bytes=fill(activation_bytes, num_stages - 1) if activation_bytes else None,
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.forward_s[0])

    def to_json(self) -> str:
        """Return the costs as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StepCosts":
        """Return the costs that ``to_json`` wrote."""
        return cls(**json.loads(text))


def _table(name: str, table: Sequence[Sequence[float]], num_rows: int, num_columns: int) -> Table:
    """Return the table as tuples of Python floats, checked."""
    rows = tuple(tuple(map(float, row)) for row in table)
    if [len(row) for row in rows] != [num_columns] * num_rows:
        message = (
            f"{name} has rows of {[len(row) for row in rows]} entries, but forward_s has "
            f"{num_rows} rows of {num_columns}. Rule: one number for each stage and micro-batch. "
            "Remedy: give all of them"
        )
        raise CostError(message)
    for s, row in enumerate(rows):
        if min(row) >= 0 and sum(row) < math.inf:  # a nan makes the sum one, which is not less
            continue
        for i, value in enumerate(row):
            _check(f"{name}[{s}][{i}]", value)
    return rows
