"""What the monitors cost of a step.

    python -m benchmarks.callbacks                   # 4 stages, sleeping 20 ms and 40 ms
    python -m benchmarks.callbacks --stages 2 --steps 200

The time that each callback spends in its hooks is measured within the run, on every rank, so other
load on the machine moves it little. ``step`` is the hooks' median in a step without a report,
``report`` the median with one (gathering, and drawing on rank 0), ``share`` both together over the
whole run, of the slowest rank. Reports and pictures come every 50 steps, windows have 100.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from benchmarks.ranks import Ranks, run_ranks
from benchmarks.stages import CASES
from benchmarks.strategy import MICRO_BATCHES, Sleepers
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import BubbleMonitor, JobReport, TimelineTrace, VarianceMonitor
from pipeswift_lightning.runtime.mesh import MeshGroups

HOOKS = ("on_train_batch_start", "on_train_batch_end")
MONITORS: dict[str, tuple[int, Callable[[], Callback]]] = {
    "JobReport": (50, lambda: JobReport(every_n_steps=50)),
    "BubbleMonitor": (50, lambda: BubbleMonitor(every_n_steps=50)),
    "VarianceMonitor": (100, lambda: VarianceMonitor(window=100)),
    "TimelineTrace": (50, lambda: TimelineTrace(every_n_steps=50)),
}


class Stopwatch:
    """Adds up, step by step, what the hooks of one callback take."""

    def __init__(self, callback: Callback) -> None:
        self.steps_s: list[float] = []
        for name in HOOKS:
            setattr(callback, name, self._timed(name, getattr(callback, name)))

    def _timed(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            hook(*args)
            if name == HOOKS[0]:
                self.steps_s.append(0.0)
            self.steps_s[-1] += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    every = run_ranks(_fit, options.stages, options)
    total_s = max(total for total, _ in every)
    print(
        f"{options.stages} stages, {options.steps} steps of {1e3 * total_s / options.steps:.0f} ms"
    )
    print("callback          step us  report ms    share")
    for name, (period, _) in MONITORS.items():
        rows = [times[name] for _, times in every]
        quiet = [s for row in rows for i, s in enumerate(row) if (i + 1) % period]
        loud = [s for row in rows for i, s in enumerate(row) if (i + 1) % period == 0]
        share = max(map(sum, rows)) / total_s
        report = f"{1e3 * statistics.median(loud):9.1f}" if loud else "        -"
        print(f"{name:16}  {1e6 * statistics.median(quiet):7.0f}  {report}  {share:7.3%}")


def _fit(
    groups: MeshGroups,  # noqa: ARG001 -- the strategy makes its own
    report: Callable[[Any], None],
    options: argparse.Namespace,
) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks = {name: make() for name, (_, make) in MONITORS.items()}
    watches = {name: Stopwatch(callback) for name, callback in callbacks.items()}
    case = CASES["sleep"]
    samples = MICRO_BATCHES * case.samples
    trainer = Trainer(
        strategy=PipeSwiftStrategy(micro_batches=MICRO_BATCHES, loss="per_sample"),
        accelerator="cpu",
        devices=options.stages,
        plugins=[Ranks()],
        max_steps=options.steps,
        logger=CSVLogger(Path.cwd(), name="csv", version=""),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=list(callbacks.values()),
    )
    torch.manual_seed(0)
    data = torch.randn(samples * options.steps, *case.sample)
    start = time.perf_counter()
    layers = [case.stage(i, options.stages) for i in range(options.stages)]
    trainer.fit(Sleepers(layers), DataLoader(data, batch_size=samples))
    total_s = time.perf_counter() - start
    report((total_s, {name: watch.steps_s for name, watch in watches.items()}))


if __name__ == "__main__":
    main()
