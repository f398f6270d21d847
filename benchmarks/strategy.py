"""What a step costs beyond the executor's own: Lightning's loop, agreement, logs, the optimizer.

    python -m benchmarks.strategy                    # 2 and 4 stages, sleeping 20 ms and 40 ms
    python -m benchmarks.strategy --rounds 5 --steps 20

Each round runs the same stages twice in the same processes: as bare steps of the executor, and as
``Trainer.fit`` with the strategy, progress bar and a logged loss. A step of the Trainer is the time
from one batch's start to the next one's. ``ratio`` is Trainer / executor of the same round.
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.stages import CASES, OurStep
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups

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


class _Clock(Callback):
    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:  # noqa: ARG002 -- likewise
        self.starts.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        pairs = zip(self.starts[_SKIPPED:], self.starts[_SKIPPED + 1 :], strict=False)
        return [after - before for before, after in pairs]


class Ranks(ClusterEnvironment):
    """The processes that this benchmark has started."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    print("stages  executor ms              Trainer ms               ratio")
    for stages in options.stages:
        raw_s, trainer_s = _spawn(stages, options)
        ratios = [t / r for t, r in zip(trainer_s, raw_s, strict=True)]
        print(
            f"{stages:6}  {_spread([1e3 * s for s in raw_s], 1):23}  "
            f"{_spread([1e3 * s for s in trainer_s], 1):23}  {_spread(ratios, 3)}"
        )


def _spawn(stages: int, options: argparse.Namespace) -> Any:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(r, stages, folder, options, results))
            for r in range(stages)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(1)
        return results.get()


def _rank_main(
    rank: int, stages: int, folder: str, options: argparse.Namespace, results: Any
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.chdir(folder)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), stages),
        rank=rank,
        world_size=stages,
        timeout=timedelta(seconds=60),
    )
    groups = MeshGroups.create(Mesh.of(world_size=stages, num_stages=stages), rank)
    groups.warm(torch.device("cpu"))
    schedule = lower(build_schedule("1f1b", stages, MICRO_BATCHES))
    bare = OurStep(_CASE, schedule, groups, _CASE.batch(MICRO_BATCHES))
    raw_s, trainer_s = [], []
    for _ in range(options.rounds):
        raw_s.append(_bare_s(bare, options.steps))
        trainer_s.append(_trainer_s(stages, options.steps))
    if rank == 0:
        results.put((raw_s, trainer_s))
    dist.destroy_process_group()


def _bare_s(bare: OurStep, steps: int) -> float:
    bare.run()
    times = []
    for _ in range(steps):
        bare.prepare()
        dist.barrier()
        start = time.perf_counter()
        bare.run()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _trainer_s(stages: int, steps: int) -> float:
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
    return statistics.median(clock.steps_s())


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


if __name__ == "__main__":
    main()
