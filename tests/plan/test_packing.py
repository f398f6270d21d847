import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.formation import form_to_targets
from pipeswift_lightning.plan.microbatches import MicroBatchError
from pipeswift_lightning.plan.packing import StageRates, pack
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import makespan_s


def simulated(loads, rates: StageRates) -> float:
    costs = StepCosts(
        forward_s=np.outer(rates.forward, loads) + rates.fixed_forward_s,
        backward_s=np.outer(rates.backward, loads) + rates.fixed_backward_s,
    )
    schedule = one_f_one_b(len(rates.forward), len(loads))
    return makespan_s(schedule, costs, link=Link(latency_s=rates.latency_s))


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), n=st.integers(2, 6), m=st.integers(1, 3))
def test_few_samples_are_formed_nearly_as_well_as_can_be(seed: int, n: int, m: int) -> None:
    m = min(m, n)
    random = np.random.default_rng(seed)
    costs = random.integers(1, 20, n).tolist()
    rates = StageRates(
        forward=(1.0, 1.5),
        backward=(2.0, 3.0),
        fixed_forward_s=0.5,
        fixed_backward_s=1.0,
        latency_s=0.25,
    )
    packed = pack(costs, evaluator_for("1f1b", 2, m), rates)
    assert packed.makespan_s == pytest.approx(simulated(packed.formation.loads(costs), rates))
    best = min(
        simulated(np.bincount(of, weights=costs, minlength=m), rates)
        for of in itertools.product(range(m), repeat=n)
        if len(set(of)) == m
    )
    # A local search: of 1,500 such cases 20 missed the optimum, by 2 % at most.
    assert best * (1 - 1e-9) <= packed.makespan_s <= 1.05 * best


def test_forming_with_the_simulator_beats_balance() -> None:
    costs = np.random.default_rng(0).lognormal(6, 0.9, 64).round().tolist()
    rates = StageRates(forward=(1,) * 4, backward=(2,) * 4)
    packed = pack(costs, evaluator_for("1f1b", 4, 16), rates)
    balanced = form_to_targets(costs, [sum(costs) / 16] * 16).loads(costs)
    assert packed.makespan_s < 0.95 * simulated(balanced, rates)
    to_longest = simulated([len(costs) / 16 * max(costs)] * 16, rates)
    assert packed.makespan_s < 0.5 * to_longest
    assert packed.makespan_s > 3 * sum(costs)  # The work of one stage.


def test_tokens_bound_each_micro_batch() -> None:
    costs = np.random.default_rng(1).integers(1, 100, 40).tolist()
    rates = StageRates(forward=(1,) * 3, backward=(2,) * 3)
    limit = 1.15 * sum(costs) / 8
    packed = pack(costs, evaluator_for("1f1b", 3, 8), rates, max_tokens=limit, evaluations=4000)
    assert max(packed.formation.loads(costs)) <= limit
    assert len(packed.formation.samples) == 8
    with pytest.raises(MicroBatchError, match=r"fits none of 8 micro-batches\. Rule: at most"):
        pack(costs, evaluator_for("1f1b", 3, 8), rates, max_tokens=sum(costs) / 9)


def test_a_larger_budget_is_never_worse() -> None:
    costs = np.random.default_rng(2).lognormal(size=50).tolist()
    rates = StageRates(forward=(1,) * 4, backward=(2,) * 4)
    evaluator = evaluator_for("1f1b", 4, 10)
    values = [pack(costs, evaluator, rates, evaluations=n).makespan_s for n in (0, 1000, 8000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]
