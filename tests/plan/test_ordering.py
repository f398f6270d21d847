import pytest

from pipeswift_lightning.plan.ordering import OrderError, micro_batch_order


@pytest.mark.parametrize("order", [[], [0, 0], [1, 2], [0, 1, 2]])
def test_an_order_is_a_permutation(order: list[int]) -> None:
    with pytest.raises(OrderError, match=r"must name each micro-batch 0\.\.1 once"):
        micro_batch_order(order, 2)


def test_a_step_needs_a_micro_batch() -> None:
    with pytest.raises(OrderError, match="num_micro_batches=0 must be 1 or more"):
        micro_batch_order(None, 0)
