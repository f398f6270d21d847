import pytest

from pipeswift_lightning.plan.clocks import align
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Timeline


def test_clocks_of_hosts_are_brought_together() -> None:
    costs = StepCosts.uniform(4, 6, forward_s=1.0, backward_s=2.0)
    true = simulate(one_f_one_b(4, 6), costs, link=Link(latency_s=0.25))
    ahead_s = {"a": 0.0, "b": 5000.0, "c": -77.0}
    hosts = ["a", "a", "b", "c"]
    seen = Timeline.merge(
        Timeline(tuple(e for e in true.events if e.stage == s), 4).shifted(ahead_s[host])
        for s, host in enumerate(hosts)
    )
    aligned = align(seen, hosts)
    assert [e.start_s for e in aligned.events] == pytest.approx([e.start_s for e in true.events])
    assert aligned.bubble_ratio == pytest.approx(true.bubble_ratio)


def test_one_host_has_one_clock_whatever_its_links_are_like() -> None:
    costs = StepCosts.uniform(2, 4, forward_s=1.0, backward_s=2.0, activation_bytes=1)
    seen = simulate(one_f_one_b(2, 4), costs, link=Link(latency_s=0.5))
    assert align(seen, ["a", "a"]) is seen
