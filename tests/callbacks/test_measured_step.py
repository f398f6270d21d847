"""A run leaves what its steps cost, for predictions."""

import pytest
import torch.distributed as dist

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import StepRecord
from pipeswift_lightning.callbacks.measured_step import MeasuredStep
from pipeswift_lightning.plan.costs import StepCosts
from tests.helpers.modules import Regression, loader, stack, vectors
from tests.helpers.parity import let_go, lone_trainer, make_trainer


@pytest.mark.world_size(2)
def test_costs_of_each_stage_and_micro_batch_are_written(tmp_path) -> None:
    strategy = PipeSwiftStrategy(micro_batches=4, loss="per_sample")
    trainer = make_trainer(strategy, max_steps=4, callbacks=[StepRecord(tmp_path, window=2)])
    trainer.fit(Regression(stack().double()), loader(vectors))
    let_go(trainer)
    dist.barrier()
    measured = MeasuredStep.read(tmp_path)
    assert measured is not None
    costs = measured.costs
    assert (costs.num_stages, costs.num_micro_batches) == (2, 4)
    assert min(map(min, (*costs.forward_s, *costs.backward_s))) > 0
    assert measured.step_s > max(sum(row) for row in costs.forward_s)
    assert StepCosts.from_json((tmp_path / "step_costs.json").read_text()) == costs


def test_it_rests_where_there_is_no_pipeline(tmp_path) -> None:
    trainer = lone_trainer(
        "auto", precision="64-true", max_steps=1, callbacks=[StepRecord(tmp_path)]
    )
    trainer.fit(Regression(stack().double()), loader(vectors))
    assert MeasuredStep.read(tmp_path) is None
