"""What was measured of a network's layers, and the cost model that it gives."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np

from pipeswift_lightning.plan.cost_model import (
    CostModel,
    LayerModel,
    Measurement,
    TimeModel,
    fit_time,
)
from pipeswift_lightning.plan.costs import CostError, Link, Origin

__all__ = ["CostProfile", "HeldOut", "LayerProfile", "LayerSample", "fit_link", "slowest_link"]

_LEAST_S = 1e-9  # A clock's tick: nothing can be fitted to no time at all.
_FEWEST = 4  # Shapes with which one can be held out, and the rest still tell three terms apart.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """What one layer took of one micro-batch: medians over the repetitions.

    Args:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward, gradients of inputs and weights.
        input_gradient_s: Seconds of a backward that gives the inputs' gradients only.
        output_bytes: What a cut after the layer sends.
        input_bytes: What reaches the layer from those before it.
        saved_bytes: What autograd keeps of it for its backward, parameters not counted, nor what
            a layer before it has kept already.
    """

    forward_s: float
    backward_s: float
    input_gradient_s: float = 0.0
    output_bytes: int = 0
    input_bytes: int = 0
    saved_bytes: int = 0

    @property
    def weight_gradient_s(self) -> float:
        """The part of the backward that can wait: the weights' gradients, in seconds."""
        return max(0.0, self.backward_s - self.input_gradient_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """What was measured of one layer, with the code that runs on its stage after it.

    Args:
        name: The layer's name in its module.
        parameter_bytes: Of its parameters.
        gradient_bytes: Of those that are trained.
        optimizer_bytes: Of the optimizer's state for them.
        samples: One for each shape.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    samples: tuple[LayerSample, ...]

    @property
    def static_bytes(self) -> int:
        """What the layer takes whether a micro-batch is there or not."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The whole network's time for shapes that the fit had not seen.

    Attributes:
        shapes: Pairs (samples, tokens of each).
        measured_s: Forward and backward. Shape ``[len(shapes)]``.
        predicted_s: The same, by a fit to the other shapes.
    """

    shapes: tuple[tuple[int, int], ...]
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted less measured, each as a share of the measured."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return tuple(predicted / measured - 1 for predicted, measured in pairs)

    @property
    def relative_error(self) -> float:
        """Root mean square of the errors; 0 if there are none."""
        return float(np.sqrt(np.mean(np.square(self.errors)))) if self.shapes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Measured costs of a network's layers, in the order of their calls.

    Args:
        shapes: Pairs (samples, tokens of each) of the micro-batches that were measured.
        layers: One for each layer, each with a sample for each shape.
        origin: What was measured, and where.
        link: The slowest link between neighbouring stages. None: it was not measured.
        overhead_s: Of a Forward or a Backward, besides the layers; see `CostModel`.

    Raises:
        CostError: There are no layers or shapes, or a layer lacks a shape.

    Example:
        >>> sample = LayerSample(forward_s=1.0, backward_s=2.0, output_bytes=8, saved_bytes=16)
        >>> layer = LayerProfile(
        ...     name="0", parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8, samples=(sample,)
        ... )
        >>> profile = CostProfile(shapes=((1, 2),), layers=(layer,))
        >>> profile.model().layers[0].output_bytes_per_token
        4.0
        >>> CostProfile.from_json(profile.to_json()) == profile
        True
    """

    shapes: tuple[tuple[int, int], ...]
    layers: tuple[LayerProfile, ...]
    origin: Origin = field(default_factory=Origin)
    link: Link | None = None
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple((int(b), int(n)) for b, n in self.shapes))
        object.__setattr__(self, "layers", tuple(self.layers))
        if not 0 <= self.overhead_s < math.inf:
            message = (
                f"overhead_s={self.overhead_s} makes no profile. Rule: finite and 0 or more. "
                "Remedy: profile the network again"
            )
            raise CostError(message)
        numbers = {len(layer.samples) for layer in self.layers}
        if not self.shapes or numbers != {len(self.shapes)}:
            message = (
                f"{len(self.layers)} layers with {sorted(numbers)} samples make no profile of "
                f"{len(self.shapes)} shapes. Rule: a layer and a shape or more, one sample a layer "
                "and shape. Remedy: profile the network again"
            )
            raise CostError(message)

    def model(self) -> CostModel:
        """Return the fitted costs; their error is that of shapes which a fit had not seen."""
        return CostModel(
            layers=tuple(self._layer_model(layer) for layer in self.layers),
            relative_error=self.relative_error,
            link=self.link,
            origin=self.origin,
            overhead_s=self.overhead_s,
        )

    @property
    def relative_error(self) -> float:
        """By how much a predicted time may be off.

        That of shapes held out; with too few of them, that of the fit itself.
        """
        return (self.held_out() if self.can_hold_out else self._compared(())).relative_error

    @property
    def can_hold_out(self) -> bool:
        """Whether there are enough shapes to fit to some and to predict others."""
        return len(set(self.shapes)) >= _FEWEST

    def held_out(self) -> HeldOut:
        """Predict each shape from all others, the smallest and the largest excepted.

        Those two are needed: a plan asks for shapes between them.
        """
        if not self.can_hold_out:
            return HeldOut((), (), ())
        tokens = [b * n for b, n in self.shapes]
        ends = {tokens.index(min(tokens)), tokens.index(max(tokens))}
        return self._compared([i for i in range(len(tokens)) if i not in ends])

    def _compared(self, unseen: Sequence[int]) -> HeldOut:
        """Predict these shapes, each from the others; all shapes from all, if none is named."""
        chosen = unseen or range(len(self.shapes))
        shapes, measured, predicted = [], [], []
        for i in chosen:
            b, n = self.shapes[i]
            kept = [j for j in range(len(self.shapes)) if not unseen or self.shapes[j] != (b, n)]
            times = [
                self._fitted(layer, kept, which)
                for layer in self.layers
                for which in (_forward_s, _backward_s)
            ]
            shapes.append((b, n))
            measured.append(
                max(
                    _LEAST_S,
                    sum(x.samples[i].forward_s + x.samples[i].backward_s for x in self.layers),
                )
            )
            predicted.append(
                sum(t.fixed_s + b * (t.token_s * n + t.square_s * n * n) for t in times)
            )
        return HeldOut(tuple(shapes), tuple(measured), tuple(predicted))

    def _fitted(
        self, layer: LayerProfile, kept: Sequence[int], which: Callable[[LayerSample], float]
    ) -> TimeModel:
        seconds = [which(layer.samples[j]) for j in kept]
        if max(seconds) <= 0:  # A frozen layer has no backward.
            return TimeModel()
        points = [
            Measurement(*self.shapes[j], max(_LEAST_S, s))
            for j, s in zip(kept, seconds, strict=True)
        ]
        return fit_time(points).model

    def _layer_model(self, layer: LayerProfile) -> LayerModel:
        every = range(len(self.shapes))
        tokens = [b * n for b, n in self.shapes]

        def most(sizes: Sequence[int]) -> float:
            # Attention may keep squares of the length: the worst shape is the safe one.
            return max(size / number for size, number in zip(sizes, tokens, strict=True))

        return LayerModel(
            forward=self._fitted(layer, every, _forward_s),
            backward=self._fitted(layer, every, _backward_s),
            input_gradient=self._fitted(layer, every, lambda sample: sample.input_gradient_s),
            static_bytes=layer.static_bytes,
            output_bytes_per_token=most([x.output_bytes for x in layer.samples]),
            activation_bytes_per_token=most([x.saved_bytes for x in layer.samples]),
            recomputed_bytes_per_token=most([x.input_bytes for x in layer.samples]),
        )

    def with_link(self, link: Link | None, overhead_s: float = 0.0) -> Self:
        """Return the same costs, with what it takes to go from stage to stage."""
        return replace(self, link=link, overhead_s=overhead_s)

    def to_json(self) -> str:
        """Return a JSON object: the fitted ``model``, and the ``profile`` that it comes from."""
        parts = {"model": json.loads(self.model().to_json()), "profile": asdict(self)}
        return json.dumps(parts, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the profile that ``to_json`` wrote.

        Raises:
            CostError: The text is no profile.
        """
        try:
            data = json.loads(text)["profile"]
            return cls(
                shapes=data["shapes"],
                layers=tuple(map(_layer, data["layers"])),
                origin=Origin(**data["origin"]),
                link=None if data["link"] is None else Link(**data["link"]),
                overhead_s=data.get("overhead_s", 0.0),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = (
                f"this is no profile: {error}. Rule: the JSON that CostProfile.to_json() writes. "
                "Remedy: delete the file, and the network is profiled again"
            )
            raise CostError(message) from error


def _layer(data: Mapping[str, Any]) -> LayerProfile:
    samples = tuple(LayerSample(**sample) for sample in data["samples"])
    return LayerProfile(**{**data, "samples": samples})


def _forward_s(sample: LayerSample) -> float:
    return sample.forward_s


def _backward_s(sample: LayerSample) -> float:
    return sample.backward_s


def fit_link(points: Sequence[tuple[int, float]]) -> Link:
    """Return the link on which messages take most nearly these times.

    Least squares of the relative errors; neither the latency nor the time a byte is negative.

    Args:
        points: Pairs (bytes, seconds), of two sizes or more to tell both terms apart.

    Raises:
        CostError: There is none, or one is not above 0.

    Example:
        >>> link = fit_link([(8, 1e-4 + 8e-9), (10**6, 1e-4 + 1e-3)])
        >>> round(link.latency_s * 1e6), round(link.bandwidth_bytes_per_s / 1e6)
        (100, 1000)
    """
    # A message is a micro-batch of one sample, which is as long as it has bytes; its time has no
    # square in it.
    model = fit_time([Measurement(1, *point) for point in points], quadratic=False).model
    per_byte_s = model.token_s
    return Link(
        latency_s=model.fixed_s,
        bandwidth_bytes_per_s=1 / per_byte_s if per_byte_s > 0 else math.inf,
    )


def slowest_link(links: Sequence[Link]) -> Link | None:
    """Return a link that is no faster than any of these in any respect; ``None`` for none."""
    if not links:
        return None
    return Link(
        latency_s=max(link.latency_s for link in links),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in links),
    )
