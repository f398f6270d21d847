"""What may be trimmed of a batch: nothing that could matter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeswift_lightning.runtime.formed import form_batches, in_data_order
from pipeswift_lightning.runtime.lengths import (
    LengthError,
    SessionError,
    find_lengths,
    told_lengths,
    told_sessions,
)
from pipeswift_lightning.runtime.packed import PackedBatch, pack_samples
from pipeswift_lightning.runtime.padding import PaddingSeen

LENGTHS = (3, 1, 5, 2)
WIDEST = 6


def padded(**more: Tensor) -> dict[str, Any]:
    mask = torch.arange(WIDEST) < torch.tensor(LENGTHS)[:, None]
    ids = torch.arange(1, 1 + mask.numel()).view_as(mask) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), **more}


def test_all_kinds_of_tensors_are_trimmed_together() -> None:
    mask = padded()["attention_mask"].bool()
    batch = padded(
        labels=padded()["input_ids"].masked_fill(~mask, -100),
        features=torch.randn(4, WIDEST, 2) * mask[..., None],
        seen=mask[:, None, None, :] & torch.ones(WIDEST, WIDEST).tril().bool(),
        bias=torch.zeros(4, 1, WIDEST, WIDEST).masked_fill(~mask[:, None, None, :], -1e9),
        position_ids=torch.arange(WIDEST).expand(4, WIDEST),
        kind=torch.arange(4),
        table=torch.zeros(3, 2),
    )
    found = find_lengths(batch)
    assert found is not None
    assert found.lengths == LENGTHS
    first, second = form_batches(batch, [[1, 3], [0, 2]], found)
    assert {name: tuple(x.shape) for name, x in first.items()} == {
        "input_ids": (2, 2),
        "attention_mask": (2, 2),
        "labels": (2, 2),
        "features": (2, 2, 2),
        "seen": (2, 1, 2, 2),
        "bias": (2, 1, 2, 2),
        "position_ids": (2, 2),
        "kind": (2,),
        "table": (3, 2),
    }
    assert first["kind"].tolist() == [1, 3]
    assert second["input_ids"].tolist()[0] == [1, 2, 3, 0, 0]


REFUSED: dict[str, dict[str, Any]] = {
    "padded in front": {"attention_mask": padded()["attention_mask"].flip(1)},
    "no mask": {"input_ids": torch.ones(4, WIDEST), "attention_mask": None},
    "true at padding": {"attention_mask": 1 - padded()["attention_mask"]},
    "a row without tokens": {"attention_mask": torch.zeros(4, WIDEST, dtype=torch.long)},
    "something else there": {"other": torch.randn(4, WIDEST)},
    "as many features": {"features": torch.zeros(4, WIDEST, WIDEST)},
    "as many classes": {"image": torch.zeros(4, 3, WIDEST)},
    "a table of positions": {"table": torch.zeros(1, WIDEST)},
    "tokens see padding": {"seen": torch.rand(4, 1, WIDEST, WIDEST) > 0.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_trimmed_that_could_matter(name: str) -> None:
    assert find_lengths(padded(**REFUSED[name])) is None


def one_short(target: list[list[int]]) -> dict[str, Tensor]:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return {"src": mask * 5, "mask": mask, "tgt": torch.tensor(target)}


def test_a_lone_cell_is_padding_once_another_batch_says_the_same() -> None:
    seen = PaddingSeen()
    batches = [one_short([[1, 2, 3], [4, 5, last]]) for last in (0, 0, 6, 0)]
    assert [find_lengths(batch, seen) is not None for batch in batches] == [False, True] + 2 * [
        False
    ]
    resumed = PaddingSeen()
    resumed.load_state(seen.state())
    assert find_lengths(batches[0], resumed) is None
    assert find_lengths({**batches[0], "tgt": torch.zeros(2)}, resumed) is not None


def test_labels_beyond_the_mask_are_kept() -> None:
    labels = torch.full((4, WIDEST), -100)
    labels[1, 4] = 7
    found = find_lengths(padded(labels=labels))
    assert found is not None
    assert found.lengths == (3, 5, 5, 2)


def test_what_a_module_tells_has_to_fit_its_batch() -> None:
    batch = padded()
    with pytest.raises(LengthError, match=r"for a batch of 4 samples. Rule: .* Remedy: "):
        told_lengths(batch, [1, 2], {})
    with pytest.raises(LengthError, match=r"length_dims names 'ids'.* Rule: .* Remedy: "):
        told_lengths(batch, LENGTHS, {"ids": 1})
    with pytest.raises(LengthError, match=r"\[0\]. Rule: "):
        told_lengths(batch, LENGTHS, {"input_ids": 0})


@pytest.mark.parametrize("wrong", [torch.zeros(3), ["a", "b"], [[1], [2], [3], [4]], None])
def test_sessions_that_do_not_fit_their_batch_are_refused(wrong: Any) -> None:
    with pytest.raises(SessionError, match=r"(?s) for a batch of 4 samples. Rule: .* Remedy: "):
        told_sessions(wrong, 4)


@settings(max_examples=50)
@given(data=st.data())
def test_any_formation_holds_each_sample_once(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(4)))
    cut = data.draw(st.integers(1, 3))
    samples = [order[:cut], order[cut:]]
    batch = padded()
    parts = form_batches(batch, samples, find_lengths(batch))
    for part, ids in zip(parts, samples, strict=True):
        longest = max(LENGTHS[i] for i in ids)
        assert torch.equal(part["input_ids"], batch["input_ids"][ids][:, :longest])
    firsts = torch.cat([part["input_ids"][:, 0] for part in parts])
    assert torch.equal(in_data_order(firsts, samples), batch["input_ids"][:, 0])


def test_packed_samples_come_out_as_they_went_in() -> None:
    rows = [{"ids": torch.arange(n), "y": n} for n in LENGTHS]
    batch = pack_samples(rows)
    assert isinstance(batch, PackedBatch)
    part = form_batches(batch, [[2, 0], [3, 1]])[0]
    assert part["ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (part["y"].tolist(), part["lengths"].tolist()) == ([5, 3], [5, 3])


def test_a_sample_of_unequal_tensors_is_not_packed() -> None:
    with pytest.raises(ValueError, match=r"tensors of \[1, 2\] rows. Rule: .* Remedy: "):
        pack_samples([{"a": torch.zeros(2), "b": torch.zeros(1)}])
