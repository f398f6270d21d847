"""What a layer costs for micro-batches of any shape, from measurements or from its FLOPs."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from pipeswift_lightning.plan.costs import CostError, Link, Origin, StepCosts
from pipeswift_lightning.plan.partition import Partition

__all__ = ["CostModel", "Fit", "LayerModel", "Measurement", "Shape", "TimeModel", "fit_time"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured time: ``batch`` samples of ``length`` tokens took ``seconds``."""

    batch: int
    length: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a micro-batch the time depends on.

    Args:
        tokens: Number of tokens, padding included.
        squares: Sum of the samples' squared lengths, which attention costs.

    Example:
        >>> Shape.packed([3, 4]), Shape.padded([3, 4])
        (Shape(tokens=7, squares=25), Shape(tokens=8, squares=32))
    """

    tokens: float
    squares: float

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Self:
        """Return the shape of samples one behind the other."""
        return cls(sum(lengths), sum(length * length for length in lengths))

    @classmethod
    def padded(cls, lengths: Sequence[int]) -> Self:
        """Return the shape of samples that are all as long as the longest."""
        return cls.packed([max(lengths)] * len(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds of one pass of a layer: ``fixed + batch * (linear * length + quadratic * length^2)``.

    Args:
        fixed_s: What it takes however small the micro-batch: launches, Python.
        token_s: Seconds a token.
        square_s: Seconds a squared length.

    Raises:
        CostError: A coefficient is negative or not finite.

    Example:
        >>> TimeModel(fixed_s=1.0, token_s=0.5).seconds(Shape.packed([4, 2]))
        4.0
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                message = (
                    f"{name}={value} makes no time. Rule: finite and 0 or more. Remedy: measure "
                    "the layer again, or fit the measurements with fit_time()"
                )
                raise CostError(message)

    def seconds(self, shape: Shape) -> float:
        """Return the time for a micro-batch."""
        return self.fixed_s + self.token_s * shape.tokens + self.square_s * shape.squares

    def plus(self, other: "TimeModel") -> "TimeModel":
        """Return the time of both, one after the other."""
        return TimeModel(
            fixed_s=self.fixed_s + other.fixed_s,
            token_s=self.token_s + other.token_s,
            square_s=self.square_s + other.square_s,
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, and the root mean square of its relative errors on the measurements."""

    model: TimeModel
    relative_error: float


def fit_time(measurements: Sequence[Measurement], *, quadratic: bool = True) -> Fit:
    """Return the model whose relative errors are least, none of its coefficients negative.

    Least squares of the relative errors, exact under the sign constraint: the best of the
    unconstrained fits to every subset of the three terms that comes out without a negative one.

    Args:
        measurements: At least one; several lengths are needed to tell the terms apart.
        quadratic: Whether squared lengths may cost something.

    Raises:
        CostError: There is none, or one is not above 0.

    Example:
        >>> points = [Measurement(b, n, 2.0 + b * (3 * n)) for b in (1, 2) for n in (1, 5)]
        >>> fit = fit_time(points)
        >>> round(fit.model.fixed_s, 6), round(fit.model.token_s, 6), fit.relative_error < 1e-9
        (2.0, 3.0, True)
    """
    for point in measurements:
        if not (0 < point.seconds < math.inf and point.batch > 0 and point.length > 0):
            message = (
                f"{point} cannot be fitted. Rule: batch, length and seconds above 0. Remedy: leave "
                "it out, or time more repetitions at once"
            )
            raise CostError(message)
    if not measurements:
        message = "no measurements to fit. Rule: at least one. Remedy: run the profiler first"
        raise CostError(message)
    terms = np.array([[1.0, p.batch * p.length, p.batch * p.length**2] for p in measurements])
    terms /= np.array([p.seconds for p in measurements])[:, None]
    scale = terms.max(axis=0)
    best_error, best = math.inf, np.zeros(3)
    num_terms = 3 if quadratic else 2
    for size in range(1, num_terms + 1):
        for which in itertools.combinations(range(num_terms), size):
            chosen = list(which)
            found = np.linalg.lstsq(
                terms[:, chosen] / scale[chosen], np.ones(len(terms)), rcond=None
            )[0]
            full = np.zeros(3)
            full[chosen] = found / scale[chosen]
            error = float(np.sqrt(np.mean((terms @ full - 1) ** 2)))
            # Fewer terms unless more are clearly better: so noise adds no term of its own.
            if found.min() >= 0 and error < best_error * (1 - 1e-6) - 1e-12:
                best_error, best = error, full
    fixed_s, token_s, square_s = best.tolist()
    return Fit(TimeModel(fixed_s=fixed_s, token_s=token_s, square_s=square_s), best_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """What one layer costs.

    Args:
        forward: Time of its forward.
        backward: Time of its backward.
        static_bytes: Parameters, gradients and optimiser state.
        output_bytes_per_token: What a cut after the layer sends for each token.
        activation_bytes_per_token: What it keeps of each token for its backward.
        recomputed_bytes_per_token: What it keeps if it is recomputed: its inputs.
        input_gradient: The part of the backward that gives the inputs' gradients, which the
            stage before waits for; the rest gives the weights'. None: it was not told apart.
    """

    forward: TimeModel
    backward: TimeModel
    static_bytes: float = 0.0
    output_bytes_per_token: float = 0.0
    activation_bytes_per_token: float = 0.0
    recomputed_bytes_per_token: float = 0.0
    input_gradient: TimeModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What the layers of a network cost, in the order of their calls.

    Args:
        layers: One for each layer.
        relative_error: By how much a predicted step may be off: a gain below it is none.
        link: The slowest link between neighbouring stages. None: it was not measured.
        origin: What was measured, and where. None: nothing was.
        overhead_s: What a stage takes for each Forward and each Backward besides its layers: to
            begin it, and to hand its messages over.

    Raises:
        CostError: There is no layer, or the error or the overhead is negative.

    Example:
        >>> model = CostModel.analytic(
        ...     [10] * 2, dim=4, flops_per_s=100.0, fixed_s=0.5, bytes_per_value=2
        ... )
        >>> model.layers[0].forward.seconds(Shape.packed([5]))  # 2 x 10 x 5 + 4 x 4 x 25 FLOPs
        5.5
        >>> CostModel.from_json(model.to_json()) == model
        True
    """

    layers: tuple[LayerModel, ...]
    relative_error: float = 0.0
    link: Link | None = None
    origin: Origin | None = None
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        sound = all(0 <= value < math.inf for value in (self.relative_error, self.overhead_s))
        if not self.layers or not sound:
            message = (
                f"{len(self.layers)} layers with relative_error={self.relative_error} and "
                f"overhead_s={self.overhead_s} make no cost model. Rule: a layer or more, the "
                "others 0 or more. Remedy: profile the network"
            )
            raise CostError(message)

    @classmethod
    def analytic(
        cls,
        parameters: Sequence[float],
        *,
        dim: int,
        flops_per_s: float,
        fixed_s: float = 0.0,
        bytes_per_value: int = 2,
    ) -> Self:
        """Return a transformer's costs from its FLOPs, to plan with before anything is measured.

        A forward takes 2 FLOPs for each parameter and token, and 4 ``dim`` for each pair of tokens
        of a sample; a backward twice that. The error is taken as a quarter.

        Args:
            parameters: Number of parameters of each layer; an embedding that only looks up has 0.
            dim: Width of the activations between the layers.
            flops_per_s: What a device really reaches; about 0.4 of its peak.
            fixed_s: Time of a pass however small the micro-batch.
            bytes_per_value: Size of a parameter and of an activation's element.
        """

        def layer(count: float) -> LayerModel:
            token_s, square_s = 2 * count / flops_per_s, (4 * dim / flops_per_s if count else 0.0)
            return LayerModel(
                forward=TimeModel(fixed_s=fixed_s, token_s=token_s, square_s=square_s),
                backward=TimeModel(fixed_s=fixed_s, token_s=2 * token_s, square_s=2 * square_s),
                static_bytes=count * (2 * bytes_per_value + 12),  # AdamW: two moments and a master.
                output_bytes_per_token=dim * bytes_per_value,
                activation_bytes_per_token=(16 if count else 1) * dim * bytes_per_value,
                recomputed_bytes_per_token=dim * bytes_per_value,
            )

        return cls(layers=tuple(map(layer, parameters)), relative_error=0.25)

    def stage_times(self, partition: Partition) -> list[tuple[TimeModel, TimeModel]]:
        """Return the forward and the backward of each stage."""
        stages = []
        for layers in partition.ranges:
            forward = backward = TimeModel()
            for k in layers:
                forward = forward.plus(self.layers[k].forward)
                backward = backward.plus(self.layers[k].backward)
            stages.append((forward, backward))
        return stages

    def step_costs(
        self,
        partition: Partition,
        shapes: Sequence[Shape],
        *,
        slowdown: Sequence[float] | None = None,
    ) -> StepCosts:
        """Return the costs of a step of micro-batches of these shapes.

        Args:
            partition: Layers of each stage.
            shapes: One for each micro-batch.
            slowdown: By how much each stage's device is slower.
        """
        slow = slowdown or [1.0] * partition.num_stages
        times = list(zip(self.stage_times(partition), slow, strict=True))
        more = self.overhead_s
        sent = [self.layers[k - 1].output_bytes_per_token for k in partition.starts[1:]]
        return StepCosts(
            forward_s=[[f.seconds(x) * by + more for x in shapes] for (f, _), by in times],  # type: ignore[arg-type]
            backward_s=[[b.seconds(x) * by + more for x in shapes] for (_, b), by in times],  # type: ignore[arg-type]
            activation_bytes=[[each * x.tokens for x in shapes] for each in sent]  # type: ignore[arg-type]
            if any(sent)
            else None,
        )

    def to_json(self) -> str:
        """Return the model as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the model that ``to_json`` wrote, or that of a profile.

        Raises:
            CostError: The text is no cost model.
        """
        try:
            data = json.loads(text)
            data = data.get("model", data)  # a profile has its model under this name
            parts = {"link": Link, "origin": Origin}
            for name, kind in parts.items():
                if data.get(name) is not None:
                    data[name] = kind(**data[name])
            return cls(**{**data, "layers": tuple(map(_layer, data["layers"]))})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = (
                f"this is no cost model: {error}. Rule: the JSON that CostModel.to_json() writes. "
                "Remedy: profile the network again"
            )
            raise CostError(message) from error


def _layer(data: Mapping[str, Any]) -> LayerModel:
    names = ("forward", "backward", "input_gradient")
    times = {name: TimeModel(**data[name]) for name in names if data.get(name) is not None}
    return LayerModel(**{**data, **times})
