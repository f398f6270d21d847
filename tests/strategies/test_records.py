from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from pipeswift_lightning.runtime.absent import AbsentMode
from pipeswift_lightning.strategies.records import (
    LogRecord,
    merge_outputs,
    merge_records,
    recorded,
)


def record(name: str, value: Any, **options: Any) -> LogRecord:
    return LogRecord(name, torch.as_tensor(value), None, options)


@pytest.mark.parametrize(
    ("reduce_fx", "want"),
    [
        ("mean", 1.75),
        ("sum", 4.0),
        ("min", 1.0),
        ("max", 3.0),
        (torch.max, 3.0),
        (torch.mean, 1.5 + 0.25),
    ],
)
def test_reductions(reduce_fx: Any, want: float) -> None:
    records = [[record("a", v, reduce_fx=reduce_fx)] for v in (3.0, 1.0)]
    (merged,) = merge_records(records, [3, 5])
    assert merged.value == want
    assert merged.options["batch_size"] == 8


def test_a_given_batch_size_weighs_and_adds_up() -> None:
    records = [[record("a", 3.0, batch_size=1)], [record("a", 1.0, batch_size=3)]]
    (merged,) = merge_records(records, [4, 4])
    assert (merged.value, merged.options["batch_size"]) == (1.5, 4)


def test_keys_of_some_micro_batches_only() -> None:
    records = [[record("a", 1.0)], [record("b", 2.0), record("a", 2.0)], []]
    merged = merge_records(records, [1, 1, 1])
    assert [(m.name, float(m.value)) for m in merged if m.value is not None] == [
        ("a", 1.5),
        ("b", 2),
    ]


def test_integers_and_bools_become_numbers() -> None:
    merged = merge_records([[record("a", 1)], [record("a", 2)]], [1, 1])
    assert merged[0].value == 1.5


def test_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mean, sum, min, max .* Remedy: "):
        merge_records([[record("a", 1.0, reduce_fx="median")]], [1])


def test_calls_are_collected_not_made() -> None:
    module = LightningModule()
    with recorded(module) as records:
        module.log("a", torch.tensor(1.0, requires_grad=True), True)
        module.log_dict({"b": 2, "c": 3.0}, on_epoch=True)
        with pytest.raises(TypeError, match="log_dict"):
            module.log("d", {"e": 1.0})  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="another stage computes"):
            module.log("f", torch.ones((), device="meta"))
    assert [r.name for r in records] == ["a", "b", "c"]
    assert records[0].options["prog_bar"] is True
    assert records[0].value is not None
    assert not records[0].value.requires_grad
    assert "log" not in vars(module)


def test_a_value_that_stands_for_an_absent_one_is_collected() -> None:
    module, weight = LightningModule(), torch.nn.Parameter(torch.ones(()))
    absent, arrived = torch.ones((), device="meta"), torch.tensor(2.0)
    mode = AbsentMode(torch.device("cpu"), absent_parameters=False)
    mode.resolve = {id(absent): arrived}
    with recorded(module) as records, mode:
        module.log("a", absent)
        module.log("b", arrived)
        arrived.add_(1)  # what is logged is as it was
        mode.absent_parameters = True  # as in the first look, where all are in this process
        with pytest.raises(RuntimeError, match="another stage computes"):
            module.log("c", weight)
    assert [float(r.value) for r in records if r.value is not None] == [2.0, 2.0]


def test_outputs() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "y": torch.ones(2, 3), "n": 1, "k": torch.tensor(2)},
        {"loss": torch.tensor(4.0), "y": torch.zeros(1, 3), "n": 2, "k": torch.tensor(5)},
    ]
    merged = merge_outputs(outputs, [2, 1])
    assert (merged["loss"], merged["n"], merged["k"]) == (2.0, 2, 5)
    assert merged["y"].tolist() == [[1] * 3, [1] * 3, [0] * 3]
