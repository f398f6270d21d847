"""How much memory a rank takes to resume from a checkpoint in one file, mapped or read whole.

    python -m benchmarks.one_file --ranks 4

The module is built on the meta device, so that each rank holds its stage alone. "peak" is the most
resident memory between the start of `fit` and the end of the first step, above that at the start,
as a share of the file: what the process allocates, and the pages of the file that it has touched.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import lone_trainer, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.checkpoints import Wide
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies import state_strategy

SAMPLES = 8


class OnMeta(Wide):
    """The same, without data until its stage is known."""

    def __init__(self, width: int) -> None:
        super().__init__(1)
        self.net: Any = None
        self.width = width

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Wide(self.width).net


class Peak(Callback):
    """Notes the peak once the first step is done."""

    peak_bytes = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak_bytes = self.peak_bytes or _resident("VmHWM")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _data(width: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(1, 1).expand(2 * SAMPLES, width)), SAMPLES)


def resume(folder: Path, width: int, *, mapped: bool) -> None:
    if not mapped:
        state_strategy.can_map = lambda *_: False  # type: ignore[assignment]
    file, peak = folder / "whole.ckpt", Peak()
    strategy = PipeSwiftStrategy(micro_batches=2, loss="per_sample")
    trainer = make_trainer(strategy, max_steps=2, callbacks=[peak], precision="32-true")
    module, data = OnMeta(width), _data(width)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    trainer.fit(module, data, ckpt_path=str(file))
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak.peak_bytes - before)
    if dist.get_rank() == 0:
        size = file.stat().st_size
        how = "mapped" if mapped else "read whole"
        shares = ", ".join(f"{p / size:.2f}" for p in peaks)
        print(f"{how:>12}: {size / 1e6:.0f} MB in the file; peak of each rank {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        trainer = lone_trainer("auto", max_steps=1)
        trainer.fit(Wide(options.width), _data(options.width))
        trainer.save_checkpoint(Path(name) / "whole.ckpt")
        for mapped in (True, False):
            kwargs = {"folder": Path(name), "width": options.width, "mapped": mapped}
            run_ranks(resume, options.ranks, kwargs, deadline_s=300)


if __name__ == "__main__":
    main()
