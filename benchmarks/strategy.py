"""What a step costs beyond the executor's own: Lightning's loop, agreement, logs, the optimizer.

    python -m benchmarks.strategy                    # 2 and 4 stages, sleeping 20 ms and 40 ms
    python -m benchmarks.strategy --rounds 5 --steps 20

Each round runs the same stages twice in the same processes: as bare steps of the executor, and as
``Trainer.fit`` with the strategy, progress bar and a logged loss. A step is the time from one
batch's start to the next one's. ``ratio`` is Trainer / executor of the same round. ``added cpu`` is
how much more processor time the main thread of the busiest rank takes for a step: unlike the step's
time, it hardly depends on what else runs on the machine.
"""

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.ranks import Ranks, run_ranks, spread
from benchmarks.stages import CASES, OurStep
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.runtime.mesh import MeshGroups

MICRO_BATCHES = 8
_SKIPPED = 5  # the first steps of a fit see whole batches, to learn about the loss
_CASE = CASES["sleep"]


class Sleepers(LightningModule):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(_CASE.stage(i, stages) for i in range(stages)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 -- Lightning's
        loss = nn.functional.mse_loss(self.net(batch), batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True, slots=True)
class Span:
    """One step on one rank, from the start of its batch to that of the next one's."""

    wall_s: float
    cpu_s: float  # of the main thread


class _Clock(Callback):
    def __init__(self) -> None:
        self.starts: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:  # noqa: ARG002 -- likewise
        self.starts.append(_now())


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _median(starts: Sequence[tuple[float, float]]) -> Span:
    steps = list(pairwise(starts))
    return Span(
        statistics.median(after[0] - before[0] for before, after in steps),
        statistics.median(after[1] - before[1] for before, after in steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    print(
        "stages  executor ms            Trainer ms             ratio                 added cpu ms"
    )
    for stages in options.stages:
        every = run_ranks(_rounds, stages, options)
        # All ranks' steps are as long, since they wait for each other; not so their work.
        rounds = list(zip(*every, strict=True))
        raw_ms = [1e3 * ranks[0][0].wall_s for ranks in rounds]
        trainer_ms = [1e3 * ranks[0][1].wall_s for ranks in rounds]
        ratios = [t / r for t, r in zip(trainer_ms, raw_ms, strict=True)]
        added_ms = [max(1e3 * (t.cpu_s - r.cpu_s) for r, t in ranks) for ranks in rounds]
        print(
            f"{stages:6}  {spread(raw_ms, 1):21}  {spread(trainer_ms, 1):21}  "
            f"{spread(ratios, 3):20}  {spread(added_ms, 1)}",
            flush=True,
        )


def _rounds(groups: MeshGroups, report: Callable[[Any], None], options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stages = groups.mesh.num_stages
    schedule = lower(build_schedule("1f1b", stages, MICRO_BATCHES))
    bare = OurStep(_CASE, schedule, groups, _CASE.batch(MICRO_BATCHES))
    report(
        [(_bare(bare, options.steps), _fit(stages, options.steps)) for _ in range(options.rounds)]
    )


def _bare(bare: OurStep, steps: int) -> Span:
    bare.run()
    starts = []
    for _ in range(steps + 1):
        bare.prepare()
        dist.barrier()
        starts.append(_now())
        bare.run()
    return _median(starts)


def _fit(stages: int, steps: int) -> Span:
    torch.manual_seed(0)
    clock = _Clock()
    samples = MICRO_BATCHES * _CASE.samples
    data = torch.randn(samples * (steps + _SKIPPED + 1), *_CASE.sample)
    trainer = Trainer(
        strategy=PipeSwiftStrategy(micro_batches=MICRO_BATCHES),
        accelerator="cpu",
        devices=stages,
        plugins=[Ranks()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            trainer.fit(Sleepers(stages), DataLoader(data, batch_size=samples))
        finally:
            sys.stdout = stdout
    return _median(clock.starts[_SKIPPED:])


if __name__ == "__main__":
    main()
