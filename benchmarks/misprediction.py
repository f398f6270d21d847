"""How much of an order's gain stays if the costs were predicted wrongly.

    python -m benchmarks.misprediction
    python -m benchmarks.misprediction --error 0.2 --batches 50

Batches of samples of lognormal lengths are packed into micro-batches as they come. Orders are
searched with costs that are off by a normal relative error, for each micro-batch on each stage by
itself, and simulated with the true ones. The gain is over first come, first served; a row gives the
share of it that stays, over all batches together and in the worst quarter of them.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from benchmarks.racing import table
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s

HEADINGS = ("stages", "micro-batches", "method", "gain", "stays", "worst quarter")


@dataclass(frozen=True, slots=True)
class Kept:
    """What an order gains by exact costs, and by wrong ones; relative to first come, first served.

    Attributes:
        exact: Of each batch.
        wrong: Of each batch.
    """

    exact: np.ndarray
    wrong: np.ndarray

    @property
    def share(self) -> float:
        return float(self.wrong.sum() / self.exact.sum())

    @property
    def worst_quarter(self) -> float:
        worst = np.argsort(self.wrong / self.exact)[: max(1, len(self.exact) // 4)]
        return float(self.wrong[worst].sum() / self.exact[worst].sum())


def kept(
    stages: int, micro_batches: int, method: str, *, error: float, batches: int, seed: int = 0
) -> Kept:
    """Order random batches by costs that are off by ``error``; see above."""
    random = np.random.default_rng([seed, stages, micro_batches])
    evaluator = evaluator_for("1f1b", stages, micro_batches)
    exact, wrong = [], []
    for _ in range(batches):
        lengths = np.minimum(random.lognormal(np.log(128), 0.7, 4 * micro_batches), 512)
        weights = lengths.reshape(micro_batches, 4).sum(1)
        true = _costs(np.tile(weights, (stages, 1)))
        off = 1 + error * np.clip(random.standard_normal((stages, micro_batches)), -3, 3)
        plain = _step_s(true, range(micro_batches))
        for costs, gains in ((true, exact), (_costs(weights * off), wrong)):
            order = find_order(evaluator, costs, method=method, evaluations=2000).order
            gains.append(1 - _step_s(true, order) / plain)
    return Kept(np.array(exact), np.array(wrong))


def _costs(weights: np.ndarray) -> StepCosts:
    return StepCosts(forward_s=weights.tolist(), backward_s=(2 * weights).tolist())


def _step_s(costs: StepCosts, order) -> float:
    schedule = build_schedule("1f1b", costs.num_stages, costs.num_micro_batches, order=order)
    return makespan_s(schedule, costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--error", type=float, default=0.1, help="relative, of each cost")
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    rows = [HEADINGS]
    for stages, micro_batches in ((2, 8), (4, 8), (4, 16), (8, 16), (8, 32)):
        for method in ("searched", "hill"):
            found = kept(
                stages, micro_batches, method, error=options.error, batches=options.batches
            )
            rows.append(
                (
                    str(stages),
                    str(micro_batches),
                    method,
                    f"{found.exact.mean():.1%}",
                    f"{found.share:.0%}",
                    f"{found.worst_quarter:.0%}",
                )
            )
    print(table(rows))


if __name__ == "__main__":
    main()
