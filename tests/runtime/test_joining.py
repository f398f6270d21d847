"""Outputs of micro-batches become one, and gradients are shared out again."""

import pickle

import pytest
import torch

from pipeswift_lightning.runtime.joining import join_outputs
from pipeswift_lightning.runtime.network_call import CutError


def test_rows_are_joined_scalars_averaged_and_gradients_shared_out() -> None:
    parts = [
        {"x": torch.full((n, 2), float(n), requires_grad=True), "aux": torch.tensor(float(n))}
        for n in (2, 1)
    ]
    joined = join_outputs(parts, [2, 1], "net")
    value = joined.fill(joined.tensors)
    assert value["x"].tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
    assert value["aux"].item() == pytest.approx(5 / 3)
    assert joined.wanted == (True, False)
    tensors, gradients = joined.shares(1, [torch.arange(6.0).reshape(3, 2), None])
    assert tensors[0] is parts[1]["x"]
    assert gradients[0].tolist() == [[4.0, 5.0]]


def test_scalars_count_by_given_weights_and_not_at_all_by_zero() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(float("nan"))]
    joined = join_outputs(losses, [1, 1], "net", weights=[1.0, 0.0])
    assert joined.tensors[0].item() == 1.0
    assert [g.item() for g in joined.shares(0, [torch.tensor(3.0)])[1]] == [3.0]


def test_one_micro_batch_needs_no_rows() -> None:
    part = torch.ones(5, requires_grad=True)
    joined = join_outputs([(part, "kept")], [3], "net")
    assert joined.fill(joined.tensors)[1] == "kept"
    assert joined.tensors[0].data_ptr() != part.data_ptr()
    assert joined.shares(0, [torch.arange(5.0)])[1][0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_cannot_be_joined_is_refused_where_it_is_used_and_may_travel() -> None:
    outputs = [{"x": torch.zeros(n, 1), "cache": torch.zeros(7, n)} for n in (2, 3)]
    value = join_outputs(outputs, [2, 3], "net")
    cache = value.fill(value.tensors)["cache"]
    assert pickle.loads(pickle.dumps(cache)) == cache
    assert cache != join_outputs(outputs[::-1], [3, 2], "net").leaves[0]
    for use in (lambda: cache + 1, lambda: cache.sum(), lambda: torch.relu(cache)):
        with pytest.raises(CutError, match=r"shapes \[\[7, 2\], \[7, 3\]\]"):
            use()
    with pytest.raises(CutError, match=r"net returned \[1, 2\]"):
        join_outputs([1, 2], [1, 1], "net")


@pytest.mark.parametrize("shape", [(), (2,)])
def test_what_another_stage_has_kept_is_refused_by_its_own_reason(shape: tuple[int, ...]) -> None:
    absent = torch.empty(shape, device="meta")
    joined = join_outputs([(torch.ones(2, 1), absent)] * 2, [2, 2], "self.net")
    output = joined.fill(joined.tensors)
    assert output[0].shape == (4, 1)
    with pytest.raises(CutError, match=r"value of another stage.* Rule: .*attribute.* Remedy: "):
        output[1] * 2
