"""What callbacks refuse where they are made, rather than in the middle of a training."""

import inspect
from functools import partial
from typing import Any

import pytest

from pipeswift_lightning.callbacks import (
    BubbleMonitor,
    JobReport,
    Rebalance,
    StepRecord,
    TimelineTrace,
    TopologyCheckpoint,
    VarianceMonitor,
)
from pipeswift_lightning.callbacks.pipeline import CallbackError

NAN = float("nan")
NO_COUNT = (0, -1, 2.5, 50.0, True, "50", NAN, [1])
COUNT_OR_NONE = (None, 1, 500)
NO_FLAG = (None, 1, "yes")
NO_PATH = (5, "", True, ["a"])
NO_TEXT = ("", 5, None)

# Of each argument, values that are wrong, and values that are right.
ARGUMENTS: list[tuple[Any, str, tuple[Any, ...], tuple[Any, ...]]] = [
    (BubbleMonitor, "every_n_steps", (*NO_COUNT, None), (1,)),
    (BubbleMonitor, "warn_above", (0.0, -1, 40, NAN, "0.5", True, None), (0.5, 1)),
    (BubbleMonitor, "prefix", NO_TEXT, ("b",)),
    (VarianceMonitor, "window", (*NO_COUNT, None), (1,)),
    (VarianceMonitor, "warn_above", (0, 1.0, NAN, "0.5", None), (0.05,)),
    (VarianceMonitor, "prefix", NO_TEXT, ("v",)),
    (partial(TimelineTrace, png=False), "every_n_steps", (*NO_COUNT, None), (1,)),
    (partial(TimelineTrace, png=False), "dirpath", NO_PATH, (None, "a")),
    (TimelineTrace, "png", NO_FLAG, (False,)),
    (partial(Rebalance, window=1), "every_n_steps", (*NO_COUNT, None), (1,)),
    (Rebalance, "window", (*NO_COUNT, None, 201), (1, 200)),
    (Rebalance, "threshold", (0, 1.0, NAN, "1", None), (0.5,)),
    (Rebalance, "kept_share", (-0.1, 1.1, NAN, "1", None), (0, 1, 0.5)),
    (Rebalance, "cool_down", (-1, 0.5, True, "1"), (None, 0)),
    (Rebalance, "prefix", NO_TEXT, ("r",)),
    (StepRecord, "dirpath", (*NO_PATH, None), ("a",)),
    (partial(StepRecord, "a"), "window", (*NO_COUNT, None), (1,)),
    (JobReport, "monitor", ("", 5), (None, "loss")),
    (JobReport, "dirpath", NO_PATH, (None, "a")),
    (JobReport, "every_n_steps", (*NO_COUNT, None), (1,)),
    (JobReport, "peak_flops", (0, -1.0, NAN, "1e12", True), (None, 1e12)),
    (TopologyCheckpoint, "dirpath", (*NO_PATH, None), ("a",)),
    (partial(TopologyCheckpoint, "a"), "every_n_steps", NO_COUNT, COUNT_OR_NONE),
    (partial(TopologyCheckpoint, "a"), "every_minutes", (0, -1.0, NAN, "1", True), (None, 0.5)),
    (partial(TopologyCheckpoint, "a"), "keep", NO_COUNT, COUNT_OR_NONE),
    (partial(TopologyCheckpoint, "a"), "asynchronous", NO_FLAG, (True, False)),
    (partial(TopologyCheckpoint, "a"), "signals", ("SIGUSR1", [10], 10, None), ((), ["SIGUSR1"])),
    (partial(TopologyCheckpoint, "a"), "watch_file", NO_FLAG, (True, False)),
]


def _made(make: Any) -> Any:
    return make.func if isinstance(make, partial) else make


@pytest.mark.parametrize(
    ("make", "name", "wrong", "right"),
    ARGUMENTS,
    ids=[f"{_made(a[0]).__name__}-{a[1]}" for a in ARGUMENTS],
)
def test_wrong_values_are_refused_and_right_ones_are_not(
    make: Any, name: str, wrong: tuple[Any, ...], right: tuple[Any, ...]
) -> None:
    for value in wrong:
        with pytest.raises(CallbackError) as refused:
            make(**{name: value})
        text = str(refused.value)
        assert f"{name}={value!r}" in text
        assert " Rule: " in text
        assert text.partition(" Remedy: ")[2]
    for value in right:
        make(**{name: value})


def test_all_arguments_are_listed_above_and_unknown_ones_are_refused() -> None:
    for kind in {_made(make) for make, *_ in ARGUMENTS}:
        listed = {name for make, name, *_ in ARGUMENTS if _made(make) is kind}
        assert listed == set(inspect.signature(kind).parameters)
        near = min(listed)[:-1]
        with pytest.raises(CallbackError, match=rf"\({near}=1\).*Rule: .* Remedy: did you mean "):
            kind(**{near: 1})
