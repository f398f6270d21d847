import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift_lightning.plan.microbatches import (
    MicroBatchError,
    MicroBatches,
    choose_num_micro_batches,
    sizes_for,
    split_batch_size,
)


@given(batch_size=st.integers(1, 99), data=st.data())
def test_even_split(batch_size: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, batch_size))
    sizes = split_batch_size(batch_size, m)
    assert (len(sizes), sum(sizes)) == (m, batch_size)
    assert sizes[0] - sizes[-1] <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
def test_a_smaller_batch_fills_in_order(sizes: list[int], data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, sum(sizes)))
    got = sizes_for(batch_size, sizes)
    assert sum(got) == batch_size
    assert list(got[:-1]) == sizes[: len(got) - 1]
    assert 1 <= got[-1] <= sizes[len(got) - 1]


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "want"), [(64, 1, 1), (64, 2, 8), (5, 2, 5), (1, 8, 1)]
)
def test_choice(batch_size: int, num_stages: int, want: int) -> None:
    assert choose_num_micro_batches(batch_size, num_stages) == want


def test_ranges_follow_each_other() -> None:
    micro_batches = MicroBatches((2, 1, 3))
    assert [i for samples in micro_batches.ranges for i in samples] == list(range(6))


@pytest.mark.parametrize("sizes", [(), (1, 0), (2, -1)])
def test_empty_micro_batches(sizes: tuple[int, ...]) -> None:
    with pytest.raises(MicroBatchError, match=r"Rule: 1 sample or more each\. Remedy: "):
        MicroBatches(sizes)


@pytest.mark.parametrize("m", [0, 4])
def test_impossible_split(m: int) -> None:
    with pytest.raises(MicroBatchError, match=f"cannot split 3 samples into {m} micro-batches"):
        split_batch_size(3, m)


@pytest.mark.parametrize("batch_size", [0, 4])
def test_sizes_that_do_not_fit(batch_size: int) -> None:
    with pytest.raises(
        MicroBatchError, match=f"hold 1 to 3 samples, but the batch has {batch_size}"
    ):
        sizes_for(batch_size, [2, 1])


def test_impossible_choice() -> None:
    with pytest.raises(MicroBatchError, match=r"num_stages=0 .*Rule: 1 or more\. Remedy: "):
        choose_num_micro_batches(4, 0)
