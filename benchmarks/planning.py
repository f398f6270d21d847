"""Solve planning instances, and say how long each took.

Usage:
    python benchmarks/planning.py DIR

``DIR`` holds one JSON object a file. Prints one JSON line a file, ordered by name::

    {"id": "...", "solution": {...}, "seconds": 0.004}

``seconds`` is the processor time of this process for the solution alone: no start, no reading.
Times in the files may have any unit. ``P`` is the number of stages (stage ``r`` on rank ``r``),
``m`` that of the micro-batches, ``n`` that of the layers. By ``type``:

``partition`` -> ``{"starts"}``: the first layer of each stage, so that the slowest is fastest.
    ``layer_time[n]``; ``device_slowdown[P]``, optional. ``cut_bytes[n or n + 1]``, ``bandwidth``,
    ``latency``, optional: a cut before layer ``k`` costs both of its sides ``cut_bytes[k] /
    bandwidth + latency``. ``layer_static_mem[n]``, ``layer_act_mem[n]``, ``inflight[P]``,
    ``mem_cap[P]``, optional: ``sum(static) + inflight * sum(act) <= cap`` on every stage.
    ``forbidden_cuts``, optional: layers before which no cut may lie.
``joint_partition`` -> ``{"starts"}``, for the least simulated makespan of 1F1B.
    ``layer_time[n]``, ``mb_scale_percent[m]``, ``backward_ratio``, ``warm[P]``, ``latency``,
    ``overlap``: a forward of micro-batch ``j`` takes the layers' time by the scale.
``ordering`` -> ``{"order"}``: ``order[position] = micro-batch``, for the least makespan of 1F1B.
    ``F[P][m]``, ``B[P][m]``: forward and backward times. ``warm[P]``: depths of the warm-up.
    ``bytes[P - 1][m]`` and ``bandwidth``, optional; ``latency``, ``overlap``. ``sessions[m]``,
    optional: micro-batches of one session keep their order.
``joint_order_warm`` -> ``{"order", "warm"}``: depths at most ``inflight_limit[P]``, never rising.
    Otherwise as ``ordering``.
``formation`` -> ``{"assignment", "order"}``: packed micro-batches, none empty, in standard 1F1B.
    ``sample_cost[N]``: a micro-batch's forward takes the sum on each stage, its backward twice.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeswift_lightning.plan.bottleneck import LayerMemory, StageProblem
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.evaluator import evaluator_for
from pipeswift_lightning.plan.joint_partition import StepShape, simulated_partition
from pipeswift_lightning.plan.orders import find_order
from pipeswift_lightning.plan.orders.warm_up import find_order_and_warm_up
from pipeswift_lightning.plan.packing import StageRates, pack
from pipeswift_lightning.plan.partition import best_partition

Instance = dict[str, Any]


def partition(instance: Instance) -> Instance:
    return {"starts": list(best_partition(_problem(instance)).starts)}


def joint_partition(instance: Instance) -> Instance:
    stages, m = instance["P"], instance["m"]
    shape = StepShape(
        scales=tuple(percent / 100 for percent in instance["mb_scale_percent"]),
        backward_ratio=instance["backward_ratio"],
        link=_link(instance),
        overlap=instance.get("overlap", True),
    )
    evaluator = evaluator_for("1f1b", stages, m, warm_up=instance.get("warm"))
    return {"starts": list(simulated_partition(_problem(instance), evaluator, shape)[0].starts)}


def ordering(instance: Instance) -> Instance:
    found = find_order(
        evaluator_for("1f1b", instance["P"], instance["m"], warm_up=instance.get("warm")),
        _costs(instance),
        link=_link(instance),
        overlap=instance.get("overlap", True),
        sessions=instance.get("sessions"),
    )
    return {"order": list(found.order)}


def joint_order_warm(instance: Instance) -> Instance:
    found = find_order_and_warm_up(
        _costs(instance),
        instance["inflight_limit"],
        link=_link(instance),
        overlap=instance.get("overlap", True),
        sessions=instance.get("sessions"),
    )
    return {"order": list(found.order), "warm": list(found.warm_up)}


def formation(instance: Instance) -> Instance:
    stages, m = instance["P"], instance["m"]
    packed = pack(
        instance["sample_cost"],
        evaluator_for("1f1b", stages, m),
        StageRates(forward=(1.0,) * stages, backward=(2.0,) * stages),
    )
    return {"assignment": list(packed.formation.assignment), "order": list(range(m))}


SOLVERS: dict[str, Callable[[Instance], Instance]] = {
    "partition": partition,
    "joint_partition": joint_partition,
    "ordering": ordering,
    "joint_order_warm": joint_order_warm,
    "formation": formation,
}


def _problem(instance: Instance) -> StageProblem:
    layers = len(instance["layer_time"])
    cut_s, memory = None, None
    if "cut_bytes" in instance:
        bandwidth, latency = instance["bandwidth"], instance.get("latency", 0.0)
        cut_s = tuple(size / bandwidth + latency for size in instance["cut_bytes"][:layers])
    if "mem_cap" in instance:
        memory = LayerMemory(
            static_bytes=instance["layer_static_mem"],
            activation_bytes=instance["layer_act_mem"],
            in_flight=instance["inflight"],
            capacity_bytes=instance["mem_cap"],
        )
    return StageProblem(
        costs_s=tuple(instance["layer_time"]),
        num_stages=instance["P"],
        slowdown=instance.get("device_slowdown"),
        cut_s=cut_s,
        forbidden_cuts=frozenset(instance.get("forbidden_cuts", ())),
        memory=memory,
    )


def _costs(instance: Instance) -> StepCosts:
    return StepCosts(
        forward_s=instance["F"], backward_s=instance["B"], activation_bytes=instance.get("bytes")
    )


def _link(instance: Instance) -> Link:
    bandwidth = instance.get("bandwidth", float("inf"))
    return Link(latency_s=instance.get("latency", 0.0), bandwidth_bytes_per_s=bandwidth)


def main(folder: str) -> None:
    for path in sorted(Path(folder).glob("*.json")):
        instance = json.loads(path.read_text())
        solve = SOLVERS[instance["type"]]
        begun = time.process_time()
        solution = solve(instance)
        seconds = time.process_time() - begun
        print(
            json.dumps({"id": instance["id"], "solution": solution, "seconds": seconds}), flush=True
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
