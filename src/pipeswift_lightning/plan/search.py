"""Choose partition, micro-batches, order, warm-up and schedule by the step time they predict.

For each number of micro-batches the plans that keep the data's order and those that do not are
simulated (see ``candidates``). The fastest wins, with two rules: a plan that reorders must gain
more than the prediction may be off, and what does not fit into memory is out. First come, first
served under 1F1B and GPipe is always among the candidates: the choice is never predicted worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeswift_lightning.plan.bottleneck import PartitionError
from pipeswift_lightning.plan.candidates import Candidate, plans
from pipeswift_lightning.plan.microbatches import MicroBatchError
from pipeswift_lightning.plan.workload import Workload

__all__ = ["Choice", "Rejected", "choose_plan", "numbers_to_try"]

Failures: TypeAlias = dict[str, PartitionError | MicroBatchError]

_SWEEP_EVALUATIONS = 2000  # Of each search while numbers of micro-batches are compared.
_STAGE_MULTIPLES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plan that was not chosen.

    Args:
        name: What it was.
        step_s: Predicted makespan; None if it cannot run.
        reason: Why it was not chosen.
    """

    name: str
    step_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan to run, and what it was chosen from.

    Args:
        chosen: The plan.
        plain: The fastest plan of equal runs of samples, first come, first served, standard 1F1B
            (or the first schedule asked for): what a strategy runs that knows no costs.
        rejected: All others, the fastest first.
        sweep: Best predicted step time of each number of micro-batches that can run.
    """

    chosen: Candidate
    plain: Candidate
    rejected: tuple[Rejected, ...]
    sweep: tuple[tuple[int, float], ...]


def numbers_to_try(batch_size: int, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches among which the costs decide.

    Example:
        >>> numbers_to_try(20, num_stages=4), numbers_to_try(5, num_stages=1)
        ((4, 8, 12, 16, 20), (1, 2, 3, 4, 5))
    """
    numbers = {min(batch_size, num_stages * by) for by in _STAGE_MULTIPLES}
    return tuple(sorted(numbers))


def choose_plan(
    workload: Workload,
    *,
    num_micro_batches: int | Sequence[int] | None = None,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    evaluations: int | None = None,
) -> Choice:
    """Return the plan with the least predicted step time.

    Args:
        workload: What has to be planned.
        num_micro_batches: Number of micro-batches, or those to choose from. None takes
            ``numbers_to_try``. The fixed cost of a layer in the cost model keeps them from running
            away.
        schedules: Schedules to choose from.
        evaluations: Budget of each search, for a plan that must not take long. None: what each
            takes by itself, and once more for the best number of micro-batches. With a budget,
            only the first schedule is searched, and of the others the plain plan is compared.

    Raises:
        PartitionError: Nothing fits into memory.
        MicroBatchError: There are fewer samples than micro-batches, or ``max_tokens`` is too small.

    Example:
        >>> from pipeswift_lightning.plan.cost_model import CostModel
        >>> measured = CostModel.analytic([10] * 4, dim=2, flops_per_s=1e3)
        >>> model = replace(measured, relative_error=0.01)
        >>> lengths = (9, 1, 1, 5, 3, 1, 1, 7)
        >>> choice = choose_plan(Workload(model=model, lengths=lengths, num_stages=2))
        >>> choice.chosen.step_s <= min(other.step_s for other in choice.rejected)
        True
    """
    numbers = _numbers(workload, num_micro_batches)
    candidates: list[Candidate] = []
    failures: Failures = {}
    quick = evaluations
    if quick is None and len(numbers) > 1:
        quick = _SWEEP_EVALUATIONS
    for m in numbers:
        for name in schedules:
            plain_only = evaluations is not None and name != schedules[0]
            candidates += plans(
                workload, name, m, evaluations=quick, failures=failures, plain=plain_only
            )
    if not candidates:
        raise next(iter(failures.values()))
    if quick is not None and evaluations is None:
        candidates += _searched_longer(workload, _choose(candidates, workload))
    chosen = _choose(candidates, workload)
    plain = min(
        (c for c in candidates if c.is_plain and c.schedule_name == schedules[0]),
        key=lambda c: c.step_s,
        default=min(candidates, key=lambda c: (c.reorders, -c.step_s)),
    )
    return Choice(
        chosen,
        plain,
        _rejections(candidates, chosen, failures, workload.model.relative_error),
        _sweep(numbers, candidates),
    )


def _searched_longer(workload: Workload, best: Candidate) -> list[Candidate]:
    m = len(best.formation.samples)
    found = plans(workload, best.schedule_name, m, evaluations=None, failures={})
    return [replace(x, name=f"{x.name}, searched longer") for x in found if x.reorders]


def _numbers(workload: Workload, wanted: int | Sequence[int] | None) -> tuple[int, ...]:
    if workload.sizes is not None:
        return (len(workload.sizes),)
    if wanted is None:
        return numbers_to_try(len(workload.lengths), workload.num_stages)
    return (wanted,) if isinstance(wanted, int) else tuple(sorted(set(wanted)))


def _sweep(
    numbers: Sequence[int], candidates: Sequence[Candidate]
) -> tuple[tuple[int, float], ...]:
    steps = dict.fromkeys(numbers, math.inf)
    for candidate in candidates:
        m = len(candidate.formation.samples)
        steps[m] = min(steps[m], candidate.step_s)
    return tuple((m, step_s) for m, step_s in steps.items() if step_s < math.inf)


def _choose(candidates: Sequence[Candidate], workload: Workload) -> Candidate:
    """Return the fastest, unless it reorders for less than the prediction may be off.

    An order that was asked for is kept, whatever it gains, wherever micro-batches may be ordered.
    """
    asked = [c for c in candidates if c.order == workload.order] or candidates
    if workload.order != "searched":
        return min(asked, key=lambda c: (c.step_s, c.reorders, c.name))
    fastest = min(candidates, key=lambda c: (c.step_s, c.reorders, c.name))
    in_order = [c for c in candidates if not c.reorders]
    if not in_order:
        return fastest
    plain = min(in_order, key=lambda c: (c.step_s, c.name))
    error = workload.model.relative_error
    return fastest if fastest.step_s < plain.step_s * (1 - error) else plain


def _rejections(
    candidates: Sequence[Candidate],
    chosen: Candidate,
    failures: Failures,
    error: float,
) -> tuple[Rejected, ...]:
    rejected = []
    for other in sorted(candidates, key=lambda c: (c.step_s, c.name)):
        if other is chosen:
            continue
        change = other.step_s / chosen.step_s - 1 if chosen.step_s else 0.0
        if change < 0 and chosen.order not in ("searched", "fifo"):
            reason = f"{-change:.1%} faster, but {chosen.order} was asked for"
        elif change < 0:
            reason = f"reorders for {-change:.1%}, within the prediction's error of {error:.1%}"
        else:
            reason = f"{change:.1%} slower"
        rejected.append(Rejected(other.name, other.step_s, reason))
    rejected += [Rejected(name, None, str(failure)) for name, failure in failures.items()]
    return tuple(rejected)
