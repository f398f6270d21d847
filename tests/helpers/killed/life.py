"""One life of a training that is killed over and over; as a script, the life that it is given.

Every rank writes a journal: a line an optimizer step with digests of the batch that it saw, its
loss, its parameters and its optimizer's state. So each step that any life of the run has made, kept
or lost, is compared with the same step of a run that nobody killed, bit by bit.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.runtime.process import ProcessIdentity
from tests.helpers.killed.deaths import PHASES
from tests.helpers.modules import Base
from tests.helpers.parity import quiet
from tests.helpers.resuming import Everything, shuffled


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process group's part of a run.

    Attributes:
        folder: Where ranks write; the checkpoints are in ``saves/`` in it.
        phase: In which phase of a save to die, a key of ``PHASES``; empty for none.
        rank: Who dies there.
        at: In which save of this life (from 0).
    """

    folder: str
    steps: int
    devices: int = 2
    keep: int | None = 3
    asynchronous: bool = True
    phase: str = ""
    rank: int = 0
    at: int = 1

    @property
    def saves(self) -> Path:
        return Path(self.folder) / "saves"


class Steady(Everything):
    """Keeps learning: a plateau would bring the rate to nought in a long run."""

    configure_optimizers = Base.configure_optimizers


class Journal(Callback):
    """Writes what each step saw and made; a line is written at once, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._loss: Any = None

    def on_train_start(self, trainer, module) -> None:
        path = self._folder / f"journal{trainer.global_rank}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write("resumed", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        state = [
            value
            for parameter in trainer.optimizers[0].state.values()
            for _, value in sorted(parameter.items())
        ]
        made = [digest(x) for x in (batch, outputs, _local(module), state)]
        self._write(str(trainer.global_step), trainer.current_epoch, *made)

    def on_train_end(self, trainer, module) -> None:
        os.close(self._file)

    def _write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def _local(module: Any) -> list[Tensor]:
    return [p for p in (*module.parameters(), *module.buffers()) if not p.is_meta]


def digest(value: Any) -> str:
    """A digest of every bit of the tensors in ``value``."""
    total = blake2b(digest_size=8)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            total.update(leaf.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def live(life: Life) -> None:
    """Train, from the newest whole checkpoint if there is one."""
    quiet()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (Path(life.folder) / f"pid{rank}").write_text(ProcessIdentity.current().to_json())
    if life.phase and rank == life.rank:
        PHASES[life.phase](life.at)
    saves = TopologyCheckpoint(
        life.saves, every_n_steps=1, keep=life.keep, asynchronous=life.asynchronous
    )
    trainer = Trainer(
        strategy=PipeSwiftStrategy(micro_batches=2, silence_s=60.0),
        accelerator="cpu",
        devices=life.devices,
        max_steps=life.steps,
        precision="64-true",
        callbacks=[saves, Journal(Path(life.folder))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Steady().double()
    trainer.fit(module, *shuffled(), ckpt_path=TopologyCheckpoint.latest(life.saves))
    final = Path(life.folder) / f"final{rank}.tmp"
    torch.save(module.state_dict(), final)
    final.rename(final.with_suffix(".pt"))


def leave_with_the_witness() -> None:
    """End this process when the one that watches is gone, whatever ended that."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:  # the others are rank 0's, and how they end is under test
        leave_with_the_witness()
    live(Life(**json.loads(sys.argv[1])))
