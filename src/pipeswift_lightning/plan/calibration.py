"""By how much the stages of steps that ran took longer than their costs had said.

Layers are profiled one micro-batch at a time, with nothing else in memory. In a step several are in
flight, other stages use the same machine, and messages come and go: a stage computes somewhat
slower throughout. One factor for each stage catches that.
"""

from collections.abc import Sequence

from pipeswift_lightning.plan.costs import StepCosts

__all__ = ["FIRST", "WINDOW", "counts", "differ", "is_due", "slowdown_of"]

FIRST = 8  # steps; the first of them allocate and warm up
WINDOW = 5  # steps that count each time
_LEAST = 0.02  # change of a factor below which plans stay as they are


def slowdown_of(
    busy_s: float,
    costs: StepCosts,
    stage: int,
    *,
    planned_with: Sequence[float] | None = None,
    overhead_s: float = 0.0,
) -> float:
    """Return by how much a stage was slower than its layers' costs.

    Args:
        busy_s: Seconds that it computed in a step.
        costs: What the step was planned with.
        stage: The stage.
        planned_with: Factor of each stage that is in these costs; None: none is.
        overhead_s: What is in each cost besides the layers, and is no computation.

    Example:
        >>> costs = StepCosts(forward_s=[[1.0, 2.0]], backward_s=[[2.0, 3.0]])
        >>> slowdown_of(9.0, costs, 0)
        1.125
        >>> slowdown_of(9.0, costs, 0, planned_with=[1.25])
        1.40625
    """
    each = (*costs.forward_s[stage], *costs.backward_s[stage])
    expected_s = sum(each) - overhead_s * len(each)
    if not expected_s > 0 or not busy_s > 0:
        return 1.0  # no layers, or layers without costs: nothing to scale
    return busy_s / expected_s * (planned_with[stage] if planned_with else 1.0)


def differ(now: Sequence[float] | None, found: Sequence[float]) -> bool:
    """Whether factors are far enough from those in use to plan anew.

    Example:
        >>> differ(None, (1.01, 0.99)), differ((1.2, 1.2), (1.2, 1.3))
        (False, True)
    """
    return any(
        abs(new / old - 1.0) > _LEAST
        for old, new in zip(now or [1.0] * len(found), found, strict=True)
    )


def is_due(steps: int, first: int = FIRST) -> bool:
    """Whether it is time, after so many steps, to put together what stages have found.

    That is after the first 8 steps, and whenever their number has doubled: what the profile missed
    shows at once, what changes in a run is followed, and the cost goes to nothing. It follows from
    the number of steps alone, so that all ranks of a pipeline come to it together.

    Args:
        steps: Number of steps.
        first: After how many it is time for the first time; a power of two, 8 or more.

    Example:
        >>> [steps for steps in range(100) if is_due(steps)]
        [8, 16, 32, 64]
    """
    return steps >= first and steps.bit_count() == 1


def counts(step: int, first: int = FIRST) -> bool:
    """Whether a step, counted from 1, is among those that are looked at.

    Args:
        step: The step.
        first: As in `is_due`.

    Example:
        >>> [step for step in range(1, 18) if counts(step)]
        [4, 5, 6, 7, 8, 12, 13, 14, 15, 16]
    """
    due = max(first, 1 << (step - 1).bit_length())
    return due - step < WINDOW
