"""Random schedules of every kind, for property tests."""

from hypothesis import strategies as st

from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.schedules import SCHEDULES, build_schedule

__all__ = ["compute_schedules"]


@st.composite
def compute_schedules(
    draw: st.DrawFn, *, max_stages: int = 8, max_micro_batches: int = 24
) -> Schedule:
    """Any known schedule, in any order, with any warm-up that 1F1B allows."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    num_stages = draw(st.integers(1, max_stages))
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    order = draw(st.none() | st.permutations(range(num_micro_batches)))
    warm_up = None
    if name == "1f1b":
        depth = st.integers(1, num_micro_batches)
        depths = st.lists(depth, min_size=num_stages, max_size=num_stages)
        falling = depths.map(lambda d: sorted(d, reverse=True))
        warm_up = draw(st.none() | st.floats(1.0, 2.0) | falling)
    return build_schedule(name, num_stages, num_micro_batches, warm_up=warm_up, order=order)
