"""The ranks' configurations are compared when the Trainer is set up."""

import logging

import pytest
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.jobs.same_config import SameConfig
from pipeswift_lightning.runtime.agreement import DisagreementError
from tests.helpers.modules import Regression, loader, stack, vectors
from tests.helpers.parity import let_go, make_trainer


def configured(width: int) -> DictConfig:
    OmegaConf.register_new_resolver("own_width", lambda: width, replace=True)
    return OmegaConf.create({"model": {"lr": 0.1, "width": "${own_width:}"}, "tags": ["a"]})


def fit(cfg: DictConfig) -> None:
    trainer = make_trainer(PipeSwiftStrategy(), max_steps=1, callbacks=[SameConfig(cfg)])
    trainer.fit(Regression(stack().double()), loader(vectors))
    let_go(trainer)


@pytest.mark.world_size(2)
def test_a_difference_is_an_error_on_every_rank_that_names_the_key() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("pipeswift_lightning.jobs.same_config")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fit(configured(3))
    fit(configured(3))
    assert records[0] == records[1]
    assert records[0].startswith(f"rank {dist.get_rank()}: configuration ")
    with pytest.raises(DisagreementError) as error:
        fit(configured(dist.get_rank()))
    assert "model.width: rank 0: 0; rank 1: 1" in str(error.value)
    assert "model.lr" not in str(error.value)
    assert "Remedy: start the ranks from one command" in str(error.value)
