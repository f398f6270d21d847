"""What goes wrong on the rank that plans is told to all ranks."""

import pytest
import torch.distributed as dist

from pipeswift_lightning.strategies.cost_source import from_rank_zero


class UnsendableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail(error: Exception) -> None:
    assert dist.get_rank() == 0
    raise error


@pytest.mark.world_size(2, deadline_s=60)
def test_any_error_of_the_first_rank_is_raised_on_all() -> None:
    with pytest.raises(KeyError, match="mask") as found:
        from_rank_zero(lambda: fail(KeyError("mask")))
    assert "rank 0" in "".join(found.value.__notes__)
    expected = UnsendableError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(expected, match="1 and 2"):
        from_rank_zero(lambda: fail(UnsendableError(1, 2)))
    assert from_rank_zero(lambda: 3) == 3
