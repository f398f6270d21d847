import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift_lightning.plan.bottleneck import (
    LayerMemory,
    PartitionError,
    StageProblem,
    solve_starts,
)
from pipeswift_lightning.plan.partition import best_partition, uniform_partition

few = st.integers(0, 9).map(float)


@st.composite
def problems(draw) -> StageProblem:
    n = draw(st.integers(1, 8))
    stages = draw(st.integers(1, min(n, 4)))

    def values(size: int, one=few) -> list[float]:
        return draw(st.lists(one, min_size=size, max_size=size))

    memory = None
    if draw(st.booleans()):
        memory = LayerMemory(
            static_bytes=values(n),
            activation_bytes=values(n),
            in_flight=[stages - r for r in range(stages)],
            capacity_bytes=values(stages, st.integers(5, 60)),
            recomputed_bytes=(1,) * n,
        )
    return StageProblem(
        costs_s=values(n),
        num_stages=stages,
        slowdown=draw(st.none() | st.just(values(stages, st.sampled_from([1, 1.25, 2])))),
        cut_s=draw(st.none() | st.just(values(n))),
        forbidden_cuts=draw(st.sets(st.integers(0, 9), max_size=3)),
        memory=memory,
    )


def admissible(problem: StageProblem) -> list[tuple[int, ...]]:
    n = len(problem.costs_s)
    found = []
    for cuts in itertools.combinations(range(1, n), problem.num_stages - 1):
        starts = (0, *cuts)
        capacity = problem.memory.capacity_bytes if problem.memory else ()
        fits = all(b <= c for b, c in zip(problem.stage_bytes(starts), capacity, strict=True))
        if fits and not problem.forbidden_cuts & set(cuts):
            found.append(starts)
    return found


@settings(max_examples=120)
@given(problem=problems())
def test_is_the_best_of_all_partitions(problem: StageProblem) -> None:
    options = admissible(problem)
    if not options:
        with pytest.raises(PartitionError, match=r"do not fit the memory|cuts forbidden"):
            solve_starts(problem)
        return
    starts = solve_starts(problem)
    assert starts in options
    best = min(map(problem.bottleneck_s, options))
    assert problem.bottleneck_s(starts) == pytest.approx(best, rel=1e-9)


@given(problem=problems(), scale=st.sampled_from([0.5, 4.0]))
def test_does_not_depend_on_the_unit_of_time(problem: StageProblem, scale: float) -> None:
    scaled = replace(
        problem,
        costs_s=tuple(scale * c for c in problem.costs_s),
        cut_s=None if problem.cut_s is None else tuple(scale * c for c in problem.cut_s),
    )
    if admissible(problem):
        assert solve_starts(scaled) == solve_starts(problem)


@given(problem=problems())
def test_more_memory_is_never_worse(problem: StageProblem) -> None:
    if admissible(problem):
        free = replace(problem, memory=None)
        bound = problem.bottleneck_s(solve_starts(problem))
        assert free.bottleneck_s(solve_starts(free)) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["lognormal", "few heavy", "unequal"])
def test_a_thousand_layers_on_64_stages_take_half_a_second_at_most(kind: str) -> None:
    random = np.random.default_rng(0)
    costs = random.lognormal(size=1000)
    if kind == "few heavy":
        costs = np.where(random.random(1000) < 0.01, 1000.0, 0.01)
    slowdown = random.choice([1, 1.5, 2], 64) if kind == "unequal" else None
    cut_s = random.uniform(0, 10, 1000) if kind == "unequal" else None
    problem = StageProblem(costs_s=costs, num_stages=64, slowdown=slowdown, cut_s=cut_s)
    begun = time.process_time()
    starts = solve_starts(problem)
    assert time.process_time() - begun < 0.5
    even = uniform_partition(1000, 64).starts
    assert problem.bottleneck_s(starts) <= problem.bottleneck_s(even)


FULL = LayerMemory(
    static_bytes=(2**30,) * 4,
    activation_bytes=(2**29,) * 4,
    in_flight=(2, 1),
    capacity_bytes=(3 * 2**30, 3 * 2**30),
    recomputed_bytes=(2**20,) * 4,
)


def test_says_which_stage_is_too_full_and_what_would_help() -> None:
    problem = StageProblem(costs_s=(1.0,) * 4, num_stages=2, memory=FULL)
    with pytest.raises(PartitionError) as failure:
        solve_starts(problem)
    message = str(failure.value)
    assert "4 layers do not fit the memory of 2 stages" in message
    assert "3.0 GiB  too much" in message
    assert "Rule: static + in flight x each <= device on every stage" in message
    remedies = message.rpartition("the cheapest first: ")[2].split("; or ")
    assert remedies == [
        "make micro-batches 2 times smaller (and 2 times as many)",
        "recompute the layers in backward (recompute=True)",
        "use 3 stages",
    ]


def test_each_remedy_helps() -> None:
    half = replace(FULL, activation_bytes=(2**28,) * 4)
    recomputed = replace(FULL, activation_bytes=FULL.recomputed_bytes)
    for memory in (half, recomputed):
        problem = StageProblem(costs_s=(1.0,) * 4, num_stages=2, memory=memory)
        assert best_partition(problem).starts == (0, 2)
    deeper = replace(FULL, in_flight=(3, 2, 1), capacity_bytes=(3 * 2**30,) * 3)
    problem = StageProblem(costs_s=(1.0,) * 4, num_stages=3, memory=deeper)
    assert best_partition(problem).starts == (0, 1, 2)


def test_a_layer_too_large_for_any_device() -> None:
    memory = replace(FULL, capacity_bytes=(2**20, 2**20))
    problem = StageProblem(costs_s=(1.0,) * 4, num_stages=2, memory=memory)
    with pytest.raises(PartitionError, match="take devices with more memory"):
        solve_starts(problem)


def test_too_many_forbidden_cuts() -> None:
    problem = StageProblem(costs_s=(1.0,) * 3, num_stages=2, forbidden_cuts={1, 2})
    with pytest.raises(PartitionError, match=r"2 cuts forbidden. Rule: 1 cuts are needed"):
        solve_starts(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slowdown": (1.0,)}, "slowdown has 1 entries. Rule: one for each of the 2 stages"),
        ({"slowdown": (1.0, 0.0)}, r"slowdown=.*Rule: above 0 each"),
        ({"cut_s": (0.0,)}, "cut_s has 1 entries. Rule: one for each of the 4 layers"),
        ({"cut_s": (0.0, -1.0, 0.0, 0.0)}, r"cut_s\[1\]=-1.0 .*Rule: finite, and 0 or more"),
        ({"memory": replace(FULL, in_flight=(1,))}, "in_flight has 1 entries"),
    ],
)
def test_what_makes_no_problem(change, message) -> None:
    with pytest.raises(PartitionError, match=message):
        StageProblem(**{"costs_s": (1.0,) * 4, "num_stages": 2, **change})


@given(stages=st.integers(1, 9), more=st.integers(0, 20))
def test_uniform_stages_differ_by_a_layer_at_most(stages: int, more: int) -> None:
    sizes = [len(layers) for layers in uniform_partition(stages + more, stages).ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
