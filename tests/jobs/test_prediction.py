"""A member's step, predicted from others' measurements."""

import pytest
from omegaconf import DictConfig, OmegaConf

from pipeswift_lightning.callbacks.measured_step import MeasuredStep
from pipeswift_lightning.jobs.prediction import PipelineShape, StepPredictor
from pipeswift_lightning.plan.costs import StepCosts


def member(
    stages: int, micro_batches: object, schedule: str = "1f1b", **more: object
) -> DictConfig:
    return OmegaConf.create(
        {
            "strategy": {
                "stages": stages,
                "micro_batches": micro_batches,
                "schedule": schedule,
                "warm_up": None,
            },
            "trainer": {"devices": "${strategy.stages}"},
            "data": {"batch_size": 16},
            **more,
        }
    )


def learned(folder, *members: tuple[int, int, float]) -> StepPredictor:
    """Members with a fixed cost of 0.01 s a micro-batch and stage, and work of 1 s + 2 s."""
    predictor = StepPredictor()
    for number, (p, m, step_s) in enumerate(members):
        forward_s = 1 / (p * m) + 0.01
        costs = StepCosts.uniform(p, m, forward_s=forward_s, backward_s=2 / (p * m))
        MeasuredStep(step_s, costs).write(folder / str(number))
        predictor.learn(member(p, m), folder / str(number))
    return predictor


def test_nothing_is_known_at_first(tmp_path) -> None:
    predictor = StepPredictor()
    predictor.learn(member(2, 4), tmp_path)  # it wrote nothing
    assert predictor.predict(member(2, 4)) is None
    assert predictor.best_measured_s(member(2, 4)) is None


def test_closed_form_of_equal_stages(tmp_path) -> None:
    """From one member all work is taken to be divisible: (m + p - 1) rounds of W / (p m)."""
    predictor = learned(tmp_path, (2, 4, 2.5))
    work_s = 3 + 2 * 4 * 0.01
    for schedule in ("1f1b", "gpipe", "auto"):  # without costs, auto is 1F1B
        predicted = predictor.predict(member(4, 8, schedule))
        assert predicted == pytest.approx((8 + 3) * work_s / 32)
    assert predictor.best_measured_s(member(4, 2)) == 2.5


def test_two_numbers_of_micro_batches_show_the_fixed_cost(tmp_path) -> None:
    predictor = learned(tmp_path, (2, 4, 2.5), (2, 8, 2.0))
    work_s = 3 + 2 * 16 * 0.01
    assert predictor.predict(member(2, 16)) == pytest.approx(17 * work_s / 32)
    assert predictor.best_measured_s(member(4, 2)) == 2.0


def test_one_stage_is_predicted_from_one_stage_alone(tmp_path) -> None:
    """A stage without cuts was once predicted from cut ones: 72 ms, where it took 41."""
    assert learned(tmp_path, (2, 4, 2.5)).predict(member(1, 4)) is None
    both = learned(tmp_path, (2, 4, 2.5), (1, 4, 3.1))
    alone = learned(tmp_path, (1, 4, 3.1))
    assert both.predict(member(1, 4)) == alone.predict(member(1, 4)) == pytest.approx(3.04)
    assert alone.predict(member(2, 4)) == pytest.approx(5 * 3.04 / 8)  # safe: it lacks the cuts


def test_other_models_and_impossible_members_are_not_predicted(tmp_path) -> None:
    predictor = learned(tmp_path, (2, 4, 2.5))
    assert predictor.predict(member(2, 4, model={"dim": 9})) is None
    assert predictor.predict(member(2, 4, "no_such_schedule")) is None


def test_a_member_is_compared_with_its_own_kind(tmp_path) -> None:
    """A small batch's short step once pruned the large ones, which train more in a second."""
    small, large = ({"data": {"batch_size": size}} for size in (8, 32))
    predictor = StepPredictor()
    for number, (kind, step_s) in enumerate(((small, 0.0625), (large, 0.218))):
        costs = StepCosts.uniform(2, 4, forward_s=step_s / 20, backward_s=step_s / 10)
        MeasuredStep(step_s, costs).write(tmp_path / str(number))
        predictor.learn(member(2, 4, **kind), tmp_path / str(number))
    assert predictor.best_measured_s(member(2, 8, **small)) == 0.0625
    assert predictor.best_measured_s(member(2, 8, **large)) == 0.218
    predicted_s = predictor.predict(member(2, 8, **large))
    assert predicted_s is not None
    assert 0.0625 * 1.25 < predicted_s < 0.218


def test_a_learning_rate_is_no_other_kind_but_other_work_is(tmp_path) -> None:
    def model(lr: float, dim: int = 8) -> dict:
        return {"dim": dim, "optimizer": {"lr": lr, "weight_decay": lr}}

    predictor = StepPredictor()
    costs = StepCosts.uniform(2, 4, forward_s=0.1, backward_s=0.2)
    MeasuredStep(2.5, costs).write(tmp_path)
    predictor.learn(member(2, 4, model=model(0.1)), tmp_path)
    assert predictor.predict(member(2, 4, model=model(0.2))) is not None
    assert predictor.best_measured_s(member(2, 4, model=model(0.2))) == 2.5
    for other in (member(2, 4, model=model(0.1, dim=9)), member(2, 4, model=model(0.1))):
        other.strategy.compile = other.model.dim == 8
        assert predictor.predict(other) is None
        assert predictor.best_measured_s(other) is None


@pytest.mark.parametrize(("micro_batches", "number"), [(6, 6), ([1, 2, 3], 3), ("auto", 8)])
def test_shape_of_a_configuration(micro_batches, number) -> None:
    shape = PipelineShape.of(member(2, micro_batches))
    assert shape is not None
    assert (shape.num_stages, shape.num_micro_batches) == (2, number)


def test_plain_lightning_has_no_shape() -> None:
    cfg = OmegaConf.create({"strategy": {"_args_": ["auto"]}, "trainer": {"devices": 1}})
    assert PipelineShape.of(cfg) is None
