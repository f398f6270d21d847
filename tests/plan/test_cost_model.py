from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.cost_model import (
    CostModel,
    LayerModel,
    Measurement,
    Shape,
    TimeModel,
    fit_time,
)
from pipeswift_lightning.plan.costs import CostError
from pipeswift_lightning.plan.partition import Partition

seconds = st.floats(1e-6, 1.0)


def points(model: TimeModel, noise: float = 0.0) -> list[Measurement]:
    random = np.random.default_rng(0)
    return [
        Measurement(
            b, n, model.seconds(Shape.padded([n] * b)) * float(np.exp(noise * random.normal()))
        )
        for b in (1, 2, 4, 8)
        for n in (64, 256, 512, 1024, 2048)
    ]


@settings(max_examples=40)
@given(fixed=seconds, token=seconds, square=seconds)
def test_exact_measurements_give_their_model_back(fixed, token, square) -> None:
    truth = TimeModel(fixed_s=fixed, token_s=token / 1e3, square_s=square / 1e6)
    fit = fit_time(points(truth))
    assert fit.relative_error < 1e-5
    shape = Shape.packed([300, 700, 1500])
    assert fit.model.seconds(shape) == pytest.approx(truth.seconds(shape), rel=1e-3)


def test_noise_shows_in_the_error_and_leaves_no_coefficient_negative() -> None:
    truth = TimeModel(fixed_s=1e-3, token_s=2e-6)
    fit = fit_time(points(truth, noise=0.05))
    assert 0.02 < fit.relative_error < 0.08
    assert min(fit.model.fixed_s, fit.model.token_s, fit.model.square_s) >= 0
    shape = Shape.padded([512] * 4)
    assert fit.model.seconds(shape) == pytest.approx(truth.seconds(shape), rel=0.05)


def test_a_falling_time_needs_a_negative_term_and_gets_none() -> None:
    fit = fit_time([Measurement(1, 10, 2.0), Measurement(1, 20, 1.0)])
    assert fit.model.token_s == fit.model.square_s == 0
    assert fit.model.fixed_s == pytest.approx(1.2)  # Least (x/2 - 1)^2 + (x - 1)^2.


@pytest.mark.parametrize(
    ("measurements", "message"),
    [([], "no measurements"), ([Measurement(1, 8, 0.0)], r"seconds=0\.0\) cannot be fitted")],
)
def test_what_cannot_be_fitted(measurements, message) -> None:
    with pytest.raises(CostError, match=message):
        fit_time(measurements)


def test_step_costs_add_the_layers_of_each_stage() -> None:
    layers = tuple(
        LayerModel(
            forward=TimeModel(fixed_s=1, token_s=k),
            backward=TimeModel(square_s=k),
            output_bytes_per_token=10 * k,
        )
        for k in (1, 2, 3)
    )
    shapes = [Shape.packed([2, 1]), Shape.padded([2, 1])]
    costs = CostModel(layers=layers).step_costs(Partition((0, 2), 3), shapes, slowdown=[1, 2])
    assert costs.forward_s == ((2 + 3 * 3, 2 + 3 * 4), (2 * (1 + 3 * 3), 2 * (1 + 3 * 4)))
    assert costs.backward_s == ((3 * 5, 3 * 8), (2 * 3 * 5, 2 * 3 * 8))
    assert costs.activation_bytes == ((20 * 3, 20 * 4),)


def test_round_trip() -> None:
    model = CostModel.analytic([0, 1e6, 1e6, 5e5], dim=64, flops_per_s=1e12)
    assert CostModel.from_json(model.to_json()) == model
    assert model.layers[0].forward.seconds(Shape.packed([100])) == 0


@pytest.mark.parametrize("text", ["", "[]", '{"layers": [{"forward": 1}]}', '{"layers": []}'])
def test_no_cost_model(text: str) -> None:
    with pytest.raises(CostError, match=r"no cost model|make no cost model"):
        CostModel.from_json(text)


def test_negative_times() -> None:
    with pytest.raises(CostError, match=r"token_s=-1 makes no time\. Rule: finite"):
        TimeModel(token_s=-1)


def test_an_overhead_counts_once_for_each_pass_whatever_the_device() -> None:
    model = CostModel.analytic([10] * 4, dim=4, flops_per_s=100.0)
    partition, shapes = Partition((0, 1), 4), [Shape.packed([5]), Shape.packed([2, 3])]
    plain = model.step_costs(partition, shapes, slowdown=[1.0, 2.0])
    more = replace(model, overhead_s=0.25).step_costs(partition, shapes, slowdown=[1.0, 2.0])
    for name in ("forward_s", "backward_s"):
        for before, after in zip(getattr(plain, name), getattr(more, name), strict=True):
            assert after == pytest.approx([s + 0.25 for s in before])
    assert more.activation_bytes == plain.activation_bytes
    known = replace(model, overhead_s=0.25)
    assert CostModel.from_json(known.to_json()) == known
    with pytest.raises(CostError, match=r"overhead_s=-1"):
        replace(model, overhead_s=-1.0)
