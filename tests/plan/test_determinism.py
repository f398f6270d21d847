"""Every rank must find the same plan from the same costs, with no word between them."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from pipeswift_lightning.plan.bottleneck import StageProblem
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.joint_partition import StepShape, simulated_partition
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.orders.warm_up import find_order_and_warm_up
from pipeswift_lightning.plan.packing import StageRates, pack
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import make_plan

PACKAGE = Path(__file__).parents[2] / "src" / "pipeswift_lightning"

# An empty package stands in for ours, which imports Lightning: that takes seconds.
CODE = f"""
import sys, types
parent = types.ModuleType("pipeswift_lightning")
parent.__path__ = [{str(PACKAGE)!r}]
sys.modules["pipeswift_lightning"] = parent
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_determinism
print(test_determinism.everything())
"""


def everything() -> str:
    random = np.random.default_rng(0)
    costs = [
        StepCosts(forward_s=forward, backward_s=2 * forward)
        for forward in (random.lognormal(size=(4, m)) for m in (20, 9, 6))
    ]
    rates = StageRates(forward=(1,) * 3, backward=(2,) * 3)
    problem = StageProblem(costs_s=random.lognormal(size=40), num_stages=6)
    found = [
        find_order(evaluator_for("1f1b", 4, 20), costs[0], evaluations=3000),
        find_order(evaluator_for("1f1b", 4, 9), costs[1]),
        find_order_and_warm_up(costs[2], [6, 5, 4, 2]),
        pack(random.lognormal(size=30), evaluator_for("1f1b", 3, 8), rates, evaluations=3000),
        simulated_partition(problem, evaluator_for("1f1b", 6, 4), StepShape(scales=(1, 2, 3, 1))),
        make_plan(partition=Partition((0, 3), 5), micro_batches=MicroBatches((2, 2, 2, 1))).digest,
    ]
    return "\n".join(map(repr, found))


def test_another_process_finds_the_same() -> None:
    there = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"PYTHONHASHSEED": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == everything() + "\n"
