import pickle
from dataclasses import replace

import torch

from pipeswift_lightning.runtime.failure import FailureReport, PipelineFailure, describe_exception

REPORT = FailureReport(
    rank=2,
    stage=1,
    micro_batch=3,
    doing="Backward of micro-batch 3",
    cause="ValueError: expected 7 tokens",
    detail="Traceback (most recent call last): ...",
    reporter=0,
    batch="training batch 17 of epoch 0 (global step 17)",
    seen_while="waiting for the gradient of micro-batch 3 from rank 2",
)


def test_the_message_says_what_where_and_what_to_do() -> None:
    assert REPORT.message().splitlines() == [
        "Pipeline stopped: rank 2 (stage 1, micro-batch 3) failed: ValueError: expected 7 tokens",
        "  doing:   Backward of micro-batch 3, in training batch 17 of epoch 0 (global step 17)",
        "  seen by: rank 0, waiting for the gradient of micro-batch 3 from rank 2",
        "  do:      Mend the error below; the other ranks only stopped because of it. Then restart "
        "from the last checkpoint.",
        "Traceback (most recent call last): ...",
    ]


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(REPORT, stage=None, micro_batch=None, batch="", reporter=2, detail="")
    assert bare.message().splitlines()[:2] == [
        "Pipeline stopped: rank 2 failed: ValueError: expected 7 tokens",
        "  doing:   Backward of micro-batch 3",
    ]
    assert len(bare.message().splitlines()) == 3


def test_reports_and_failures_travel() -> None:
    assert FailureReport.from_json(REPORT.to_json().encode()) == REPORT
    failure = pickle.loads(pickle.dumps(PipelineFailure(REPORT)))
    assert (failure.report, str(failure)) == (REPORT, REPORT.message())


def test_an_exception_without_text_is_named_by_its_type() -> None:
    cause, detail = describe_exception(MemoryError())
    assert (cause, detail) == ("MemoryError", "MemoryError\n")


def test_only_the_users_frames_are_told_and_the_line_that_raised() -> None:
    layer = torch.nn.Linear(2, 2)
    try:
        layer(torch.ones(3))
    except RuntimeError as error:
        _, detail = describe_exception(error)
    frames = [line for line in detail.splitlines() if line.startswith("  File")]
    assert len(frames) == 2  # this file, and torch's line that raised; not _call_impl and so on
    assert __file__ in frames[0]
    assert "functional.py" in frames[1] or "linear.py" in frames[1]
