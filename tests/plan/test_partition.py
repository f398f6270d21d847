import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.partition import (
    Partition,
    PartitionError,
    explicit_partition,
    solve_partition,
)


def brute_force(costs: list[float], num_stages: int) -> tuple[float, tuple[int, ...]]:
    """Try every first stage; min() keeps the earliest split of equal ones."""
    if num_stages == 1:
        return sum(costs), (0,)
    options = []
    for end in range(1, len(costs) - num_stages + 2):
        rest_s, rest = brute_force(costs[end:], num_stages - 1)
        options.append((max(sum(costs[:end]), rest_s), (0, *(end + start for start in rest))))
    return min(options, key=lambda option: option[0])


@given(costs=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9), data=st.data())
def test_is_optimal_and_ties_go_to_the_earliest_split(costs, data) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    assert solve_partition(costs, num_stages).starts == brute_force(costs, num_stages)[1]


@pytest.mark.parametrize("num_stages", [0, 3])
def test_rejects_impossible_stage_counts(num_stages: int) -> None:
    with pytest.raises(PartitionError, match=f"cannot split 2 layers into {num_stages} stages"):
        solve_partition([1.0, 1.0], num_stages)


@pytest.mark.parametrize("cost_s", [-1.0, float("inf"), float("nan")])
def test_rejects_impossible_costs(cost_s: float) -> None:
    with pytest.raises(PartitionError, match=rf"costs_s\[1\]={cost_s} .*Rule: finite.*Remedy: "):
        solve_partition([1.0, cost_s], 2)


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_explicit_counts_and_starts_agree(counts: list[int]) -> None:
    partition = explicit_partition(sum(counts), layers_per_stage=counts)
    assert [len(layers) for layers in partition.ranges] == counts
    assert partition == explicit_partition(sum(counts), starts=partition.starts)
    for stage, layers in enumerate(partition.ranges):
        assert all(partition.stage_of(layer) == stage for layer in layers)
    assert partition.num_stages == len(counts)


@pytest.mark.parametrize("counts", [[2, 2], [5, 0], [6, -1], [], [1, 1, 1, 1, 1, 1]])
def test_counts_that_do_not_fit(counts: list[int]) -> None:
    with pytest.raises(PartitionError, match=r"partition=.* 5 layers|cannot split 5 layers"):
        explicit_partition(5, layers_per_stage=counts)


@pytest.mark.parametrize("starts", [(), (1, 2), (0, 0), (0, 5), (0, 3, 2)])
def test_starts_that_do_not_fit(starts: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match="do not split 5 layers"):
        explicit_partition(5, starts=starts)


def test_one_way_to_say_it() -> None:
    with pytest.raises(PartitionError, match=r"Rule: one of them\. Remedy: "):
        explicit_partition(5)
    with pytest.raises(PartitionError, match=r"Rule: one of them\. Remedy: "):
        explicit_partition(5, starts=[0], layers_per_stage=[5])


def test_no_such_layer() -> None:
    with pytest.raises(PartitionError, match=r"layer 5 .*Rule: one of 0\.\.4\. Remedy: "):
        Partition((0,), 5).stage_of(5)
