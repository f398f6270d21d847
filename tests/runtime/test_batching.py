import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from pipeswift_lightning.runtime.batching import (
    BatchError,
    batch_checksum,
    batch_signature,
    describe_batch,
    num_samples,
    split_batch,
)

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: Any
    names: list[str]
    derived: int = dataclasses.field(init=False, default=3)


X = torch.arange(5)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (X, [X[:2], X[2:]]),
        ([X, X], [[X[:2], X[:2]], [X[2:], X[2:]]]),
        (Pair(X, "a"), [Pair(X[:2], "a"), Pair(X[2:], "a")]),
        (
            {"x": X, "n": None, "k": 3},
            [{"x": X[:2], "n": None, "k": 3}, {"x": X[2:], "n": None, "k": 3}],
        ),
        ([X, list("abcde")], [[X[:2], ["a", "b"]], [X[2:], ["c", "d", "e"]]]),
        ([X, torch.ones(3)], [[X[:2], torch.ones(3)], [X[2:], torch.ones(3)]]),
        ([X, torch.tensor(1)], [[X[:2], torch.tensor(1)], [X[2:], torch.tensor(1)]]),
        (OrderedDict(x=X), [OrderedDict(x=X[:2]), OrderedDict(x=X[2:])]),
        ([X.numpy()], [[X.numpy()[:2]], [X.numpy()[2:]]]),
    ],
    ids=["tensor", "list", "namedtuple", "dict", "strings", "whole", "0-dim", "ordered", "numpy"],
)
def test_splitting(batch: Any, parts: list[Any]) -> None:
    found = split_batch(batch, [2, 3])
    assert [type(part) for part in found] == [type(part) for part in parts]
    for a, b in zip(found, parts, strict=True):
        assert batch_checksum(a) == batch_checksum(b)
        assert batch_signature(a) == batch_signature(b)


def test_dataclasses_and_mappings_of_other_kinds() -> None:
    first, second = split_batch(Record({"x": X}, list("abcde")), [2, 3])
    assert first.x["x"].tolist() == [0, 1]
    assert (second.names, second.derived) == (["c", "d", "e"], 3)
    a, b = split_batch(UserDict(ids=X), [2, 3])
    assert isinstance(a, UserDict)
    assert b["ids"].tolist() == [2, 3, 4]


def test_one_micro_batch_is_the_batch_itself() -> None:
    batch = {"anything": object()}
    assert split_batch(batch, [4]) == [batch]


def test_errors() -> None:
    with pytest.raises(BatchError, match="no tensor with a sample dim"):
        num_samples({"x": torch.tensor(1)})
    with pytest.raises(BatchError, match="sum to 4, but the batch has 5"):
        split_batch(X, [2, 2])
    with pytest.raises(BatchError, match=r"holds a object.*split_batch\(batch, sizes\)"):
        split_batch([X, object()], [2, 3])


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"x": x}, lambda x: Record(x, []), UserDict]
)
def test_signatures_tell_shapes_and_dtypes_apart(wrap: Any) -> None:
    def signature(x: Any) -> Any:
        return batch_signature(wrap({"x": x} if wrap is UserDict else x))

    assert signature(torch.zeros(2, 3)) == signature(torch.ones(2, 3))
    assert signature(torch.zeros(2, 3)) != signature(torch.zeros(2, 4))
    assert signature(torch.zeros(2, 3)) != signature(torch.zeros(2, 3).double())
    assert hash(signature(np.zeros(2))) is not None


def test_checksums_see_every_tensor() -> None:
    a, b = torch.randn(3), torch.randn(3).to(torch.bfloat16)
    other = b.clone()
    other[1] += 1
    assert batch_checksum([a, Record(b, [])]) == batch_checksum([a.clone(), Record(b.clone(), [])])
    assert batch_checksum([a, Record(b, [])]) != batch_checksum([a, Record(other, [])])
    large = torch.zeros(1 << 20)
    assert batch_checksum(large) != batch_checksum(large + 1)
    assert batch_checksum(torch.zeros(0)) == 0


def test_a_batch_in_words() -> None:
    batch = Record((torch.zeros(2, 3), None), ["a"])
    assert describe_batch(batch) == (
        "Record{'x': (float32[2, 3], NoneType), 'names': (str), 'derived': int}"
    )
