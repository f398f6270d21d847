from types import SimpleNamespace

import pytest
import torch

from pipeswift_lightning.jobs.objective import ObjectiveError, objective

REPORT = {"job_completion_s": 3.5, "step_s": {"median": 0.25}, "strategy": "X", "queue_s": None}
TRAINER = SimpleNamespace(
    callback_metrics={"val/loss": torch.tensor(1.5), "bad": torch.tensor(float("nan"))},
    callbacks=[SimpleNamespace(), SimpleNamespace(report=REPORT)],
)


@pytest.mark.parametrize(
    ("name", "value"),
    [("val/loss", 1.5), ("job_completion_s", 3.5), ("step_s.median", 0.25), (None, None)],
)
def test_metrics_and_numbers_of_reports(name, value) -> None:
    assert objective(TRAINER, name) == value


@pytest.mark.parametrize(("name", "why"), [("val/los", "is not there"), ("bad", "is nan")])
def test_what_is_not_there_is_an_error_that_lists_what_is(name, why) -> None:
    with pytest.raises(ObjectiveError, match=f"{why}.*job_completion_s.*val/loss"):
        objective(TRAINER, name)
