import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.formation import (
    Formation,
    bucket_lengths,
    form_in_order,
    form_padded,
    form_to_targets,
    tapered_targets,
)
from pipeswift_lightning.plan.microbatches import MicroBatchError

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def runs(n: int, m: int):
    """Every way to cut n things into m runs."""
    for cuts in itertools.combinations(range(1, n), m - 1):
        yield list(itertools.pairwise((0, *cuts, n)))


@given(values=lengths, data=st.data())
def test_in_order_the_costliest_run_is_cheapest(values, data) -> None:
    m = data.draw(st.integers(1, len(values)))
    formation = form_in_order(values, m)
    assert [i for part in formation.samples for i in part] == list(range(len(values)))
    best = min(max(sum(values[a:b]) for a, b in cut) for cut in runs(len(values), m))
    assert max(formation.loads(values)) == best


@given(values=st.lists(st.integers(1, 30), min_size=2, max_size=7), m=st.integers(1, 2))
def test_equal_targets_balance_within_four_thirds(values, m) -> None:
    formation = form_to_targets(values, [sum(values) / m] * m)
    best = min(
        max(np.bincount(of, weights=values, minlength=m))
        for of in itertools.product(range(m), repeat=len(values))
    )
    assert len(formation.samples) == m
    assert max(formation.loads(values)) <= 4 / 3 * best


def test_tapered_targets_give_light_ends() -> None:
    targets = tapered_targets(8, start=2, end=2, least=0.5)
    loads = form_to_targets([1.0] * 80, (targets * 80).tolist()).loads([1.0] * 80)
    assert loads[0] < loads[1] < loads[3]
    assert loads[7] < loads[6] < loads[4]


@given(values=lengths, data=st.data())
def test_no_micro_batch_passes_its_tokens(values, data) -> None:
    m = data.draw(st.integers(1, len(values)))
    limit = -(-sum(values) // m) + max(values)  # So that each sample finds room somewhere.
    formation = form_to_targets([1.0] * len(values), [0] * m, tokens=values, max_tokens=limit)
    assert max(formation.loads(values)) <= limit
    assert len(formation.samples) == m


def padded_value(values, parts, stages: int) -> float:
    costs = [len(part) * max(values[i] for i in part) for part in parts]
    return sum(costs) + (stages - 1) * max(costs)


@settings(max_examples=60)
@given(values=lengths, data=st.data())
def test_padded_micro_batches_are_the_best_runs_of_sorted_samples(values, data) -> None:
    m = data.draw(st.integers(1, len(values)))
    stages = data.draw(st.integers(1, 4))
    formation = form_padded(values, m, num_stages=stages)
    ranked = sorted(range(len(values)), key=lambda i: (values[i], i))
    best = min(
        padded_value(values, [ranked[a:b] for a, b in cut], stages) for cut in runs(len(ranked), m)
    )
    value = padded_value(values, formation.samples, stages)
    assert best <= value <= 1.05 * best  # The limits on the largest are a grid.
    if stages == 1:
        assert value == best


def test_padding_wants_similar_lengths() -> None:
    random = np.random.default_rng(0)
    values = random.lognormal(6, 1, 64).astype(int).tolist()
    formation = form_padded(values, 16, num_stages=4)
    to_longest = 64 * max(values)
    padded = sum(len(part) * max(values[i] for i in part) for part in formation.samples)
    assert padded < 0.5 * to_longest


def test_padded_cost_may_be_anything() -> None:
    flat = form_padded([1, 1, 8, 8], 2, cost=lambda counts, _: counts**2)
    assert flat.sizes == (2, 2)
    with pytest.raises(MicroBatchError, match=r"4 samples do not fit 2 padded micro-batches"):
        form_padded([1, 1, 8, 8], 2, max_tokens=8)
    assert form_padded([1, 1, 8, 8], 3, max_tokens=8).sizes == (2, 1, 1)


@given(values=lengths, buckets=st.integers(1, 4), multiple=st.sampled_from([1, 4]))
def test_buckets_bound_the_number_of_shapes(values, buckets, multiple) -> None:
    padded = bucket_lengths(values, buckets, multiple=multiple)
    assert len(set(padded)) <= buckets
    assert all(p >= v and p % multiple == 0 for p, v in zip(padded, values, strict=True))
    rounded = [-(-v // multiple) * multiple for v in values]
    options = [
        sum(min(top for top in tops if top >= v) for v in rounded)
        for k in range(1, buckets + 1)
        for tops in itertools.combinations(sorted(set(rounded)), min(k, len(set(rounded))))
        if max(tops) == max(rounded)
    ]
    assert sum(padded) == min(options)


@pytest.mark.parametrize("samples", [((),), ((0,), (0,)), ((0, 2),), ()])
def test_each_sample_once(samples) -> None:
    with pytest.raises(MicroBatchError, match=r"Rule: each sample 0, 1, \.\.\. once"):
        Formation(samples)


def test_reordered() -> None:
    formation = Formation.of([2, 0, 1, 0])
    assert formation.samples == ((1, 3), (2,), (0,))
    assert formation.reordered([2, 0, 1]).samples == ((0,), (1, 3), (2,))
    assert formation.assignment == (2, 0, 1, 0)


@pytest.mark.parametrize("form", [form_in_order, form_padded])
def test_more_micro_batches_than_samples(form) -> None:
    with pytest.raises(MicroBatchError, match=r"cannot form 3 micro-batches of 2 samples\. Rule"):
        form([1, 1], 3)


def test_no_buckets() -> None:
    with pytest.raises(MicroBatchError, match="num_buckets=0"):
        bucket_lengths([1], 0)
