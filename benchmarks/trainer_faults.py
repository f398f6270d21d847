"""Kill and stop ranks of a Trainer that trains over 4 stages, many times.

    python -m benchmarks.trainer_faults --repeats 20 --silence-s 2
    python -m benchmarks.trainer_faults --repeats 5 --launcher   # real scripts, ten times slower

Each run strikes another rank, place and micro-batch. A hang is a process that was still there when
time was up, a wrong name a survivor whose error does not name the rank, stage and micro-batch that
were struck: there must be none of both. Times are from the strike to the last survivor's exit.
"""

import argparse
import statistics

from tests.helpers.casts import launch, perform
from tests.helpers.faults import Ending
from tests.helpers.scenario import Scenario

PLACES = ("forward", "backward")
DEVICES = 4
LIMIT_S = 60.0


def scenario(action: str, run: int, silence_s: float) -> Scenario:
    return Scenario(
        fault=PLACES[run // DEVICES % len(PLACES)],
        action=action,
        rank=run % DEVICES,
        micro_batch=run // 2 % 4,
        devices=DEVICES,
        options={"silence_s": silence_s},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--silence-s", type=float, default=2.0)
    parser.add_argument("--launcher", action="store_true")
    options = parser.parse_args()
    columns = ("fault", "runs", "min s", "median s", "max s", "hangs", "misnamed")
    print("".join(f"{column:>10}" for column in columns))
    for action in ("kill", "stop"):
        scenes = [scenario(action, i, options.silence_s) for i in range(options.repeats)]
        runs = [_play(scene, launcher=options.launcher) for scene in scenes]
        print(_row(action, scenes, runs), flush=True)


def _play(scene: Scenario, *, launcher: bool) -> list[Ending]:
    return launch(scene, limit_s=LIMIT_S)[1] if launcher else perform(scene, limit_s=LIMIT_S)


def _row(action: str, scenes: list[Scenario], runs: list[list[Ending]]) -> str:
    last_s = [max(ending.after_s for ending in run) for run in runs]
    hangs = sum(ending.after_s == float("inf") for run in runs for ending in run)
    misnamed = sum(
        f"rank {scene.rank} (stage {scene.rank}, micro-batch {scene.micro_batch}) failed"
        not in ending.said
        for scene, run in zip(scenes, runs, strict=True)
        for r, ending in enumerate(run)
        if r != scene.rank
    )
    times = (min(last_s), statistics.median(last_s), max(last_s))
    return (
        f"{action:>10}{len(runs):>10}"
        + "".join(f"{t:>10.2f}" for t in times)
        + f"{hangs:>10}{misnamed:>10}"
    )


if __name__ == "__main__":
    main()
