"""One rank tells the others an object, short or long."""

import pytest
import torch
import torch.distributed as dist

from pipeswift_lightning.runtime.announcement import Expected, announce, tell

_TENSORS = {
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 3, dtype=torch.int32),
    "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "long": torch.arange(5000),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.world_size(2)
def test_objects_of_any_length_arrive() -> None:
    source = dist.get_rank() == 1
    for length in (0, 1, 4000, 4100, 10_000):  # around the first message's length
        value = ("x" * length, [length]) if source else "what others give is ignored"
        assert announce(value, 1, None) == ("x" * length, [length])
    given = {"loss": torch.ones(2, requires_grad=True) * 2, **_TENSORS} if source else None
    told = announce(given, 1, None)
    assert told["loss"].tolist() == [2.0, 2.0]
    assert told["loss"].requires_grad is source, "only the source keeps its history"
    for name, tensor in _TENSORS.items():
        assert told[name].dtype == tensor.dtype, name
        assert torch.equal(told[name].to_dense(), tensor.to_dense()), name
    told["scalar"].add_(1)  # what arrives may be written to


@pytest.mark.world_size(3)
def test_what_is_expected_comes_while_others_are_busy() -> None:
    rank = dist.get_rank()
    for turn in range(3):
        expected = None if rank == 1 else Expected(1, None)
        if expected is None:
            tell(("loss", turn), None)  # ends, though nobody asks for the value yet
        dist.barrier()
        assert expected is None or expected.value() == ("loss", turn)
