"""The schedules by name. A new one is a file here and a line in the table."""

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from pipeswift_lightning.plan.instructions import Schedule, ScheduleError
from pipeswift_lightning.plan.schedules.forward_only import forward_only
from pipeswift_lightning.plan.schedules.gpipe import gpipe
from pipeswift_lightning.plan.schedules.one_f_one_b import one_f_one_b

__all__ = [
    "SCHEDULES",
    "ScheduleBuilder",
    "build_schedule",
    "forward_only",
    "gpipe",
    "one_f_one_b",
]


class ScheduleBuilder(Protocol):
    """Makes the compute-only schedule of any number of stages and micro-batches."""

    def __call__(
        self, num_stages: int, num_micro_batches: int, *, order: Sequence[int] | None = None
    ) -> Schedule:
        """Return the schedule; see ``gpipe`` for the arguments."""
        ...


SCHEDULES: Mapping[str, ScheduleBuilder] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "forward_only": forward_only}
)


def build_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    warm_up: Sequence[int] | float | None = None,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule called ``name``, compute-only.

    Args:
        name: A key of ``SCHEDULES``.
        num_stages: 1 or more.
        num_micro_batches: 1 or more.
        warm_up: Depth of the warm-up, for ``1f1b`` alone; see ``one_f_one_b``.
        order: ``order[position] = micro-batch id``; None keeps 0, 1, 2, ...

    Raises:
        ScheduleError: No schedule has that name, or it has no warm-up to set.

    Example:
        >>> build_schedule("1f1b", 4, 8) == one_f_one_b(4, 8)
        True
        >>> build_schedule("1b1f", 4, 8)
        Traceback (most recent call last):
        pipeswift_lightning.plan.instructions.ScheduleError: schedule '1b1f' is not known. \
Rule: one of gpipe, 1f1b, forward_only. Remedy: did you mean '1f1b'?
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else "choose one of these"
        rule = f"Rule: one of {', '.join(SCHEDULES)}"
        message = f"schedule {name!r} is not known. {rule}. Remedy: {hint}"
        raise ScheduleError(message)
    if name == "1f1b":
        return one_f_one_b(num_stages, num_micro_batches, warm_up=warm_up, order=order)
    if warm_up is not None:
        message = (
            f"warm_up={warm_up} is given, but the schedule is {name!r}. Rule: it is a setting of "
            "1f1b. Remedy: leave warm_up out, or choose 1f1b"
        )
        raise ScheduleError(message)
    return SCHEDULES[name](num_stages, num_micro_batches, order=order)
