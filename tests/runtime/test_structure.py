"""Walks of nested arguments agree with torch's pytrees."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pipeswift_lightning.runtime.structure import leaves_of, mapped, refilled

Point = namedtuple("Point", "x y")


class Counted(int):
    """A leaf of a type that no walk knows."""


VALUES = [
    None,
    torch.Size([2, 3]),
    (),
    ((1, [2, (3,)]), {"b": 4, "a": None}),
    {"point": Point(1, [2]), "ordered": OrderedDict(z=1, a=(2, 3))},
    [defaultdict(list, {"k": [1, 2]}), Counted(3), range(2), "ab", {1, 2}],
    (torch.return_types.max((7, 8)), slice(1, 2), b"x", torch.float32, torch.device("cpu")),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_walks_agree_with_pytrees(value: object) -> None:
    leaves, spec = tree_flatten(value)
    assert leaves_of(value) == leaves
    assert refilled(value, leaves) == value
    numbered = list(range(len(leaves)))
    assert refilled(value, numbered) == tree_unflatten(numbered, spec)
    changed = mapped(_length, value)
    assert changed == tree_map(_length, value)
    assert type(changed) is type(tree_map(_length, value))


def _length(leaf: object) -> int:
    return len(repr(leaf))


def test_tensors_are_leaves() -> None:
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(1))
    leaves = leaves_of(({"x": x}, [weight]))
    assert leaves[0] is x
    assert leaves[1] is weight


@dataclass(frozen=True, slots=True)
class State:
    """What a network may hand from layer to layer; no pytree knows it."""

    x: object
    parts: list[object]
    calls: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.calls.append(1)  # a copy is no new one


def test_dataclasses_that_hold_tensors_are_walked_by_their_fields() -> None:
    x = torch.ones(2)
    state = State(x, [2, {"a": 3}])
    value = OrderedDict(first=(state, 5))
    leaves = leaves_of(value)
    assert leaves[0] is x
    assert leaves[1:] == [2, 3, 1, 5]
    changed = refilled(value, [x + 1, *"bcde"])["first"][0]
    assert changed.x.tolist() == [2.0, 2.0]
    assert (changed.parts, changed.calls) == (["b", {"a": "c"}], ["d"])
    assert mapped(lambda leaf: leaf + 1, state).parts == [3, {"a": 4}]
    assert (state.x is x, state.parts, state.calls) == (True, [2, {"a": 3}], [1])
    assert leaves_of(State) == [State], "the type itself is a leaf"


def test_dataclasses_without_tensors_stay_what_they_are() -> None:
    config, held = State(1, []), State(None, [])
    config.parts.append(config)
    held.parts.append([held, torch.ones(1)])
    assert leaves_of([config, 2]) == [config, 2]
    assert mapped(lambda leaf: leaf, [config])[0] is config
    assert refilled([config], [config])[0] is config
    with pytest.raises(RecursionError):  # a value that holds itself, and tensors, has no end
        leaves_of(held)
