import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.cost_model import CostModel, Shape, TimeModel
from pipeswift_lightning.plan.costs import CostError, Link, Origin
from pipeswift_lightning.plan.profile import (
    CostProfile,
    LayerProfile,
    LayerSample,
    fit_link,
    slowest_link,
)

SHAPES = tuple((b, n) for b in (1, 2, 4) for n in (64, 256, 512))
seconds = st.floats(1e-6, 1.0)
models = st.builds(
    lambda a, b, c: TimeModel(fixed_s=a, token_s=b / 1e3, square_s=c / 1e6),
    seconds,
    seconds,
    seconds,
)


def profile_of(*layers: tuple[TimeModel, TimeModel], off: float = 1.0) -> CostProfile:
    def sample(forward: TimeModel, backward: TimeModel, shape: tuple[int, int]) -> LayerSample:
        b, n = shape
        each = Shape.padded([n] * b)
        factor = off if shape == SHAPES[4] else 1.0
        return LayerSample(
            forward_s=factor * forward.seconds(each),
            backward_s=factor * backward.seconds(each),
            saved_bytes=b * n * n,
            output_bytes=b * n * 4,
        )

    return CostProfile(
        shapes=SHAPES,
        layers=[
            LayerProfile(
                name=str(k),
                parameter_bytes=4,
                gradient_bytes=2,
                optimizer_bytes=1,
                samples=tuple(sample(*times, shape) for shape in SHAPES),
            )
            for k, times in enumerate(layers)
        ],
        origin=Origin(structure="x", device="d", dtype="float32", versions={"torch": "2"}),
        link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9),
    )


@settings(max_examples=8, deadline=None)
@given(forward=models, backward=models)
def test_exact_times_are_predicted_where_they_were_not_seen(forward, backward) -> None:
    profile = profile_of((forward, backward), (backward, TimeModel()))
    held_out = profile.held_out()
    assert held_out.shapes == SHAPES[1:-1]
    assert max(map(abs, held_out.errors)) < 1e-3
    assert profile.relative_error < 1e-3
    model = profile.model()
    assert model.layers[1].backward == TimeModel()  # a frozen layer has none
    assert CostModel.from_json(profile.to_json()) == model == CostModel.from_json(model.to_json())
    assert CostProfile.from_json(profile.to_json()) == profile
    assert (model.link, model.origin) == (profile.link, profile.origin)


def test_a_shape_that_is_off_shows_in_its_own_error() -> None:
    time = TimeModel(fixed_s=1e-3, token_s=1e-5)
    held_out = profile_of((time, time), off=1.25).held_out()
    errors = dict(zip(held_out.shapes, held_out.errors, strict=True))
    assert errors[SHAPES[4]] == pytest.approx(1 / 1.25 - 1, abs=0.01)
    assert 0.2 / math.sqrt(7) < held_out.relative_error < 0.15


def test_the_worst_shape_decides_on_bytes() -> None:
    time = TimeModel(fixed_s=1e-3)
    layer = profile_of((time, time)).model().layers[0]
    assert layer.activation_bytes_per_token == 512  # squares, at the longest shape
    assert (layer.output_bytes_per_token, layer.static_bytes) == (4, 7)


def test_few_shapes_have_the_error_of_the_fit() -> None:
    samples = [LayerSample(forward_s=s, backward_s=1.0) for s in (1.0, 3.0)]
    layer = LayerProfile(
        name="", parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, samples=tuple(samples)
    )
    profile = CostProfile(shapes=[(1, 8), (1, 8)], layers=[layer])
    assert not profile.can_hold_out
    assert profile.held_out().shapes == ()
    assert 0.1 < profile.relative_error < 0.6


def test_no_profile() -> None:
    with pytest.raises(CostError, match=r"0 layers with \[\] samples make no profile"):
        CostProfile(shapes=[(1, 2)], layers=[])
    for text in ("", "[]", "{}", '{"profile": {"shapes": [[1, 2]]}}'):
        with pytest.raises(CostError, match="this is no profile"):
            CostProfile.from_json(text)


@settings(max_examples=15, deadline=None)
@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e11))
def test_links_are_fitted(latency, rate) -> None:
    points = [(size, latency + size / rate) for size in (8, 1 << 16, 1 << 21, 1 << 26)]
    link = fit_link(points)
    for size, time in points:
        predicted = link.latency_s + size / link.bandwidth_bytes_per_s
        assert predicted == pytest.approx(time, rel=1e-6)
    assert slowest_link([link, Link(latency_s=1.0)]) == Link(
        latency_s=1.0, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
    )
    assert slowest_link([]) is None
