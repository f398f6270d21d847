"""What the strategy refuses at once, and what its options mean."""

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.option_arguments import OPTION_ARGUMENTS
from pipeswift_lightning.strategies.options import OptionError, PipelineOptions

NAN = float("nan")
NO_COUNT = ("two", 2.0, True, 0, -1, NAN, [2], b"2", {})
NO_FLAG = ("yes", 1, 0, None, [True])
NO_LIST = (7.5, (), [], {}, [1, 0], [1.0], [True], ["1"], "1,2", {1: 2}, {1, 2})
WRONG: dict[str, tuple[Any, ...]] = {
    "stages": NO_COUNT,
    "micro_batches": (0, 2.5, True, "many", "Auto", [2.5], *NO_LIST),
    "schedule": ("1b1f", "1F1B", "forward_only", 1, None, ["gpipe"]),
    "warm_up": (0.5, 3.0, NAN, True, "1", [1, 2], *NO_LIST),
    "network": (5, "", [], [""], ["a", 5], {"a": 1}, True),
    "partition": (7, True, "halves", [[1]], *NO_LIST),
    "loss": ("per-sample", "", None, 1, ["auto"]),
    "loss_weight": ("token", "", None, 1),
    "weights": (5, "", ["a"], True, b"a"),
    "dynamic_shapes": NO_FLAG,
    "receive_window": NO_COUNT,
    "recompute": ("yes", -1, 2.0, None, NAN, [], [1, -1], [True], [1.0], {}),
    "compile": (3, "", None, 1, {1: 2}, ["inductor"]),
    "costs": (1, "", True, ["a"], 2.5),
    "trim": ("never", 1, 0, None, "", []),
    "memory_limit": ("1GB", 0, -1.0, NAN, True, [], [1, 0], ["1"], {}),
    "order": ("hil", "", None, 1, ["hill"]),
    "buckets": (0, 2.5, True, "many", *NO_LIST),
    "silence_s": ("x", 0, -1, 0.1, NAN, float("inf"), None, True, timedelta(seconds=9)),
    "process_group_backend": ("glo", "", 5, True, "cpu:gloo,cuda:ncl"),
    "timeout": (30, None, "1h", timedelta(0), timedelta(seconds=-1)),
    "cluster_environment": ("slurm", 5),
    "checkpoint_io": ("file", 5),
    "precision_plugin": ("16-mixed", 16),
}


def options(**kwargs: Any) -> PipelineOptions:
    return PipeSwiftStrategy(**kwargs).options


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_or_value_is_refused_by_name(name: str) -> None:
    """Once, many were accepted, and others ended in errors of whatever computed with them."""
    for value in WRONG[name]:
        with pytest.raises(OptionError) as refused:
            PipeSwiftStrategy(**{name: value})
        text = str(refused.value)
        assert text.startswith(f"PipeSwiftStrategy({name}={value!r}) is not allowed. Rule: "), text
        assert f"Rule: {name} is " in text
        assert text.partition(" Remedy: ")[2]


def test_every_argument_is_looked_at() -> None:
    """But for two that only the Trainer gives."""
    known = set(inspect.signature(PipeSwiftStrategy).parameters)
    assert known - {"accelerator", "parallel_devices"} == OPTION_ARGUMENTS.keys() == WRONG.keys()


RIGHT: dict[str, tuple[Any, ...]] = {
    "stages": (None, 2, np.int64(2)),
    "micro_batches": (None, "auto", 4, np.int32(4), [1, 2], (3,), range(1, 3)),
    "warm_up": (None, 1, 1.5, 2.0, [3, 2, 2], np.float64(1.5)),
    "network": (None, "self", ["a", "b"], ("a",)),
    "partition": (None, "uniform", [1, 2], (3, 1)),
    "weights": (None, "folder", Path("folder")),
    "receive_window": (None, 1),
    "recompute": (True, False, 0, 2, [0, 1]),
    "compile": (True, False, "eager", {}, {"backend": "eager"}),
    "costs": (None, "measure", Path("costs.json")),
    "trim": (True, False, "auto"),
    "memory_limit": (None, 1, 16e9, [1e9, 2], float("inf")),
    "silence_s": (0.5, 60, 1e6),
    "process_group_backend": (None, "gloo", "nccl", "cpu:gloo,cuda:nccl"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_values_are_accepted(name: str) -> None:
    for value in RIGHT[name]:
        PipeSwiftStrategy(**{name: value})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"schedule": "1b1f"}, "Remedy: did you mean '1f1b'"),
        ({"loss": "persample"}, "Remedy: did you mean 'per_sample'"),
        ({"compile": True, "recompute": 2}, "compile=.* not allowed together.*Rule: .*Remedy: "),
        ({"schedule": "gpipe", "warm_up": 2.0}, "warm_up=2.0 .* schedule='gpipe'.*Rule: .*Remedy:"),
        (
            {"micro_batch": 4},
            r"\(micro_batch=4\): there is no such argument.*Remedy: .* micro_batches",
        ),
        ({"stage": 4}, "Remedy: did you mean stages?"),
        ({"xyz": 4}, "Remedy: leave it out"),
    ],
)
def test_refused_at_once(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        PipeSwiftStrategy(**kwargs)


def test_arguments_have_names_and_the_signature_shows_them() -> None:
    with pytest.raises(OptionError, match=r"Remedy: .* PipeSwiftStrategy\(stages=4\)"):
        PipeSwiftStrategy(4)  # type: ignore[misc]
    kinds = {p.kind for p in inspect.signature(PipeSwiftStrategy).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


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
