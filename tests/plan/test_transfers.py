import pytest

from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline
from pipeswift_lightning.plan.transfers import transfers


def test_every_message_of_a_schedule_is_found_with_the_links_latency() -> None:
    costs = StepCosts.uniform(3, 4, forward_s=1.0, backward_s=2.0)
    found = transfers(simulate(one_f_one_b(3, 4), costs, link=Link(latency_s=0.25)))
    assert len(found) == 2 * 2 * 4
    assert sum(t.is_gradient for t in found) == 8
    for t in found:
        step = -1 if t.is_gradient else 1
        assert t.used.stage - t.made.stage == step
        assert t.used.micro_batch == t.made.micro_batch
        assert t.used.start_s >= t.made.end_s + 0.25
    waited = [t.transit_s for t in found if t.transit_s is not None]
    assert waited
    assert waited == pytest.approx([0.25] * len(waited))


def test_nobody_knows_how_long_a_message_took_that_was_not_waited_for() -> None:
    made = Event(0, 0, 0, EventKind.FORWARD, 0.0, 1.0)
    wait = Event(1, 1, 0, EventKind.RECEIVE_WAIT, 1.5, 1.75)  # came late itself
    used = Event(1, 1, 0, EventKind.FORWARD, 1.75, 2.0)
    (transfer,) = transfers(Timeline((made, wait, used), 2))
    assert transfer.transit_s is None
