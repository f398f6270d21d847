from typing import Any

import pytest

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.options import OptionError, PipelineOptions


def options(**kwargs: Any) -> PipelineOptions:
    return PipeSwiftStrategy(**kwargs).options


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"stages": 0}, "stages=0 is not allowed"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": "many"}, "micro_batches='many'"),
        ({"micro_batches": []}, r"micro_batches=\(\)"),
        ({"micro_batches": [2, 0]}, r"micro_batches=\(2, 0\)"),
        ({"partition": [1, 0]}, r"partition=\(1, 0\)"),
        ({"receive_window": 0}, "receive_window=0"),
        ({"recompute": -1}, "recompute=-1"),
        ({"recompute": [1, -1]}, r"recompute=\(1, -1\)"),
        ({"compile": True, "recompute": 2}, "compile=.* not set together with recompute"),
        ({"schedule": "1b1f"}, "did you mean '1f1b'"),
        ({"warm_up": 3.0}, r"must lie in \[1, 2\]"),
        ({"schedule": "gpipe", "warm_up": 2.0}, "warm_up=2.0 is a setting of 1f1b"),
    ],
)
def test_refused_at_once(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PipeSwiftStrategy(**kwargs)


def test_sizes() -> None:
    def sizes(total: int, *, smaller: bool = False, **kwargs: Any) -> tuple[int, ...]:
        return options(**kwargs).sizes(total, 2, may_be_smaller=smaller).sizes

    assert sizes(8, micro_batches=3) == (3, 3, 2)
    assert sizes(2, micro_batches=3, smaller=True) == (1, 1)
    assert sizes(64) == (8,) * 8
    assert sizes(8, micro_batches=[1, 4, 3]) == (1, 4, 3)
    assert sizes(3, micro_batches=[1, 4, 3], smaller=True) == (1, 2)
    with pytest.raises(OptionError, match="2 samples cannot be split into 3"):
        sizes(2, micro_batches=3)
    with pytest.raises(OptionError, match="hold 8 samples, but the batch has 9"):
        sizes(9, micro_batches=[1, 4, 3])


@pytest.mark.parametrize(
    "listed", [{"partition": [1, 2, 5]}, {"warm_up": [2, 2, 1]}, {"recompute": [1]}]
)
def test_lists_have_an_entry_for_each_stage(listed: dict[str, Any]) -> None:
    """Too long a partition once ended in an IndexError of a rank."""
    with pytest.raises(OptionError, match=r"Rule: one for each of the 2 stages. Remedy: list 2"):
        options(**listed).check_stages(2)
    options(**listed).check_stages(1)
