"""Kill and stop ranks of a running pipeline, many times; show how long the others take to leave.

    python -m benchmarks.faults --repeats 10 --world-size 4 --silence-s 2

A hang is a process that was still there when time was up: there must be none.
"""

import argparse
import signal
import statistics

from tests.helpers.faults import Actor, Ending, Scene, play, send_self, strike_in_step


def kill(actor: Actor) -> None:
    actor.run_pipeline(100_000, strike_in_step(actor, send_self(signal.SIGKILL)))


def stop(actor: Actor) -> None:
    actor.run_pipeline(100_000, strike_in_step(actor, send_self(signal.SIGSTOP)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--silence-s", type=float, default=2.0)
    options = parser.parse_args()
    bodies = {"kill -9": kill, "stop": stop}
    columns = ("fault", "rank", "store", "min s", "median s", "max s", "hangs", "misnamed")
    print("".join(f"{column:>10}" for column in columns))
    for fault, body in bodies.items():
        for store in ("tcp", "file"):
            for victim in range(options.world_size):
                scene = Scene(
                    body=body,
                    world_size=options.world_size,
                    store=store,
                    silence_s=options.silence_s,
                    victim=victim,
                    limit_s=options.silence_s + 15,
                )
                runs = [play(scene) for _ in range(options.repeats)]
                print(_row(fault, victim, store, runs), flush=True)


def _row(fault: str, victim: int, store: str, runs: list[list[Ending]]) -> str:
    hangs = sum(ending.code is None for run in runs for ending in run)
    # A stopped rank must be gone as well; a killed one is gone at once.
    last_s = [max(ending.after_s for ending in run) for run in runs]
    name = f"rank {victim} (stage {victim}, micro-batch 3) failed"
    misnamed = sum(
        name not in ending.said for run in runs for r, ending in enumerate(run) if r != victim
    )
    times = (min(last_s), statistics.median(last_s), max(last_s))
    return (
        f"{fault:>10}{victim:>10}{store:>10}"
        + "".join(f"{t:>10.2f}" for t in times)
        + (f"{hangs:>10}{misnamed:>10}")
    )


if __name__ == "__main__":
    main()
