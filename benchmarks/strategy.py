"""What a step costs beyond the executor's own: Lightning's loop, agreement, logs, the optimizer.

    python -m benchmarks.strategy                    # 2 and 4 stages, sleeping 20 ms and 40 ms
    python -m benchmarks.strategy --rounds 5 --steps 20

Each round runs the same stages twice in the same processes: as bare steps of the executor, and as
``Trainer.fit`` with the strategy, progress bar and a logged loss. A step is the time from one
batch's start to the next one's. ``ratio`` is Trainer / executor of the same round. ``Lightning's``
is what a step of plain Lightning on one device takes beyond its computation, with the same loader,
log, bar and optimizer, in all processes side by side: what the Trainer adds with any strategy.
``strategy's`` is the ratio without it. ``added cpu`` is how much more processor time the main
thread of the busiest rank takes for a step: unlike the step's time, it hardly depends on what else
runs on the machine.
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

from benchmarks.racing import table
from benchmarks.ranks import Ranks, run_ranks, spread
from benchmarks.stages import CASES, OurStep, Sleeping
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.runtime.mesh import MeshGroups

MICRO_BATCHES = 8
_SKIPPED = 5  # the first steps of a fit see whole batches, to learn about the loss
_CASE = CASES["sleep"]
_PAUSE_S = 0.020
_HEADER = (
    "stages", "executor ms", "Trainer ms", "ratio", "Lightning's ms", "strategy's", "added cpu ms",
)  # fmt: skip


class Sleepers(LightningModule):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

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


@dataclass(frozen=True, slots=True)
class Round:
    """A rank's steps in one round."""

    raw: Span  # of the executor
    trainer: Span  # of the Trainer, with the strategy
    computed: Span  # what a step of plain Lightning computes
    plain: Span  # a step of plain Lightning


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
    rows = [_HEADER]
    for stages in options.stages:
        every = run_ranks(_rounds, stages, options)
        # All ranks' steps are as long, since they wait for each other; not so their work.
        rows.append(_row(stages, list(zip(*every, strict=True))))
    print(table(rows))


def _row(stages: int, rounds: Sequence[Sequence[Round]]) -> tuple[str, ...]:
    raw_ms = [1e3 * ranks[0].raw.wall_s for ranks in rounds]
    trainer_ms = [1e3 * ranks[0].trainer.wall_s for ranks in rounds]
    plain_ms = [1e3 * (ranks[0].plain.wall_s - ranks[0].computed.wall_s) for ranks in rounds]
    both = list(zip(trainer_ms, raw_ms, strict=True))
    return (
        str(stages),
        spread(raw_ms, 1),
        spread(trainer_ms, 1),
        spread([t / r for t, r in both], 3),
        spread(plain_ms, 1),
        spread([(t - p) / r for (t, r), p in zip(both, plain_ms, strict=True)], 3),
        spread([max(1e3 * (r.trainer.cpu_s - r.raw.cpu_s) for r in ranks) for ranks in rounds], 1),
    )


def _rounds(groups: MeshGroups, report: Callable[[Any], None], options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stages = groups.mesh.num_stages
    schedule = lower(build_schedule("1f1b", stages, MICRO_BATCHES))
    bare = OurStep(_CASE, schedule, groups, _CASE.batch(MICRO_BATCHES))
    steps, rounds = options.steps, []
    for _ in range(options.rounds):
        times = _bare(bare, steps), _fit(stages, steps), _computed(stages, steps)
        rounds.append(Round(*times, _plain(stages, steps)))
    report(rounds)


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
    layers = [_CASE.stage(i, stages) for i in range(stages)]
    strategy = PipeSwiftStrategy(micro_batches=MICRO_BATCHES)
    return _trained(layers, steps, strategy=strategy, devices=stages, plugins=[Ranks()])


def _idle(stages: int) -> list[nn.Module]:
    """Return layers that sleep once a step, as long as a rank does at a time."""
    width = _CASE.sample[0]
    return [Sleeping(width, _PAUSE_S * (i == 0), 0.0) for i in range(stages)]


def _computed(stages: int, steps: int) -> Span:
    """Time the computation of a step of plain Lightning."""
    dist.barrier()
    net, batch = nn.Sequential(*_idle(stages)), _CASE.batch(MICRO_BATCHES)
    starts = []
    for _ in range(steps + 1):
        net.zero_grad(set_to_none=True)
        starts.append(_now())
        nn.functional.mse_loss(net(batch), batch).backward()
    return _median(starts)


def _plain(stages: int, steps: int) -> Span:
    dist.barrier()
    return _trained(_idle(stages), steps, strategy="auto", devices=1)


def _trained(layers: Sequence[nn.Module], steps: int, **options: Any) -> Span:
    torch.manual_seed(0)
    clock = _Clock()
    samples = MICRO_BATCHES * _CASE.samples
    data = torch.randn(samples * (steps + _SKIPPED + 1), *_CASE.sample)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock],
        **options,
    )
    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            trainer.fit(Sleepers(layers), DataLoader(data, batch_size=samples))
        finally:
            sys.stdout = stdout
    return _median(clock.starts[_SKIPPED:])


if __name__ == "__main__":
    main()
