"""Bring the events of several hosts onto one clock."""

from collections.abc import Sequence
from dataclasses import replace

from pipeswift_lightning.plan.timeline import Timeline
from pipeswift_lightning.plan.transfers import transfers

__all__ = ["align"]


def align(timeline: Timeline, hosts: Sequence[str]) -> Timeline:
    """Return the timeline on the clock of the first stage's host.

    Between neighbours on different hosts, the fastest message forth and the fastest back are taken
    to have been equally long on their way (as NTP does): half of what seems to be the difference is
    the clocks'. Stages of one host are not moved against each other.

    Args:
        timeline: Of one training step, a rank a stage, each on its own host's clock.
        hosts: The host of each stage; equal names mean one clock.
    """
    if len(set(hosts)) == 1:
        return timeline
    fastest_s: dict[tuple[int, int], float] = {}
    for transfer in transfers(timeline):
        link = transfer.made.stage, transfer.used.stage
        took_s = transfer.used.start_s - transfer.made.end_s
        fastest_s[link] = min(took_s, fastest_s.get(link, took_s))
    ahead_s = [0.0]
    for stage in range(1, len(hosts)):
        forth_s, back_s = fastest_s.get((stage - 1, stage)), fastest_s.get((stage, stage - 1))
        same = hosts[stage] == hosts[stage - 1]
        if same or forth_s is None or back_s is None:
            ahead_s.append(ahead_s[-1])
        else:
            ahead_s.append(ahead_s[-1] + (forth_s - back_s) / 2)
    events = tuple(
        replace(e, start_s=e.start_s - ahead_s[e.stage], end_s=e.end_s - ahead_s[e.stage])
        for e in timeline.events
    )
    return Timeline(events, timeline.num_ranks)
