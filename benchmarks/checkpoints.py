"""How long training stands still for a checkpoint in shards, written at once or in a thread.

    python -m benchmarks.checkpoints --rounds 7
    python -m benchmarks.checkpoints --saves 100    # one after each step, in a thread

One fit over a pipeline. Its steps come in windows, each of one kind, in turn: without a save, with
one at once, and with one in a thread, after the window's first step. "call" is how long the save's
call takes, the copying included; "window" is how much longer than the median window without a save:
it includes what the writing thread takes from the training. Times are rank 0's;
medians with quartiles.

Deaths during saves: PIPESWIFT_KILLS=200 pytest tests/runtime/test_checkpoint_directory.py -k kills
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory
from pipeswift_lightning.runtime.sharded_state import read_table, read_tensors

KINDS = ("none", "at once", "in a thread")
LAYERS, SAMPLES = 8, 64
LIMIT_S = 500.0


class Wide(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Windows(Callback):
    """Saves after the first step of each window, and times both."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.calls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.windows: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.start_s = 0.0

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, batch_idx) -> None:
        window, step = divmod(batch_idx, self.steps)
        kind = KINDS[window % len(KINDS)]
        if step == 0:
            self.start_s = time.perf_counter()
            if kind != "none":
                trainer.strategy.save_sharded(
                    self.folder, fresh=False, asynchronous=kind == "in a thread", keep=1
                )
            self.calls[kind].append(time.perf_counter() - self.start_s)
        if step == self.steps - 1:
            trainer.strategy.finish_saves()  # else its end falls into the next window
            self.windows[kind].append(time.perf_counter() - self.start_s)


def measure(folder: Path, width: int, rounds: int, steps: int) -> None:
    windows = Windows(folder / "saves", steps)
    num = (rounds + 1) * len(KINDS) * steps * SAMPLES
    data = DataLoader(TensorDataset(torch.zeros(num, 1).expand(num, width)), SAMPLES)
    strategy = PipeSwiftStrategy(micro_batches=4, loss="per_sample")
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[windows], precision="32-true")
    trainer.fit(Wide(width), data)
    if trainer.global_rank:
        return
    size = sum(p.stat().st_size for p in (folder / "saves").glob("*/*.distcp"))
    plain = statistics.median(windows.windows["none"][1:])
    print(f"{size / 1e6:.0f} MB a checkpoint; a step takes {plain / (steps - 1):.3f} s")
    print(f"{'save':>12}{'call, ms':>24}{'window, ms':>24}")
    for kind in KINDS[1:]:
        extra = [took - plain for took in windows.windows[kind][1:]]
        print(f"{kind:>12}{_row(windows.calls[kind][1:])}{_row(extra)}", flush=True)


class Calls(Callback):
    """Saves in a thread after each step, and times the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[float] = []

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, _batch_idx) -> None:
        began = time.perf_counter()
        trainer.strategy.save_sharded(self.folder, fresh=False, asynchronous=True, keep=2)
        self.calls.append(time.perf_counter() - began)


def save_on_and_on(folder: Path, width: int, saves: int) -> None:
    """Each save waits for the one before, so a call takes longer here than where steps are long."""
    calls = Calls(folder / "saves")
    data = DataLoader(TensorDataset(torch.zeros(1, 1).expand(saves * SAMPLES, width)), SAMPLES)
    strategy = PipeSwiftStrategy(micro_batches=4, loss="per_sample")
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[calls], precision="32-true")
    began = time.perf_counter()
    trainer.fit(Wide(width), data)
    took = time.perf_counter() - began
    if trainer.global_rank:
        return
    newest = CheckpointDirectory(folder / "saves").newest()
    assert newest is not None
    assert newest.name == f"step{saves}"
    size = sum(p.stat().st_size for p in newest.glob("*.distcp"))
    read_tensors(newest, {n: torch.empty(s, dtype=d) for n, (d, s) in read_table(newest).items()})
    print(f"{len(calls.calls)} saves of {size / 1e6:.0f} MB in {took:.0f} s; the last one is whole")
    print(f"{'call, ms':>12}{_row(calls.calls)}, at most {1e3 * max(calls.calls):.0f}", flush=True)


def _row(seconds: list[float]) -> str:
    low, middle, high = (1e3 * s for s in statistics.quantiles(seconds, n=4, method="inclusive"))
    return f"{f'{middle:.0f} [{low:.0f}, {high:.0f}]':>24}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--saves", type=int, default=0, help="so many in a row, and nothing else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"folder": Path(folder), "width": options.width}
        if options.saves:
            kwargs["saves"] = options.saves
            run_ranks(save_on_and_on, options.ranks, kwargs, deadline_s=10 * options.saves)
        else:
            kwargs |= {"rounds": options.rounds, "steps": options.steps}
            run_ranks(measure, options.ranks, kwargs, deadline_s=LIMIT_S)


if __name__ == "__main__":
    main()
