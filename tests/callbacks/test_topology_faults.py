"""What goes wrong while a checkpoint is written ends all ranks, says why, and loses nothing."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory, CheckpointError
from pipeswift_lightning.runtime.failure import PipelineFailure
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Transformer, loaders, tokens
from tests.helpers.parity import fit


def _fill_the_disk() -> None:
    """From now on, no tensor finds any room."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    filesystem._write_item = full  # type: ignore[assignment]


class Fills(TopologyCheckpoint):
    """Rank 1's disk is full from the third save on."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if (trainer.global_step, trainer.global_rank) == (3, 1):
            _fill_the_disk()
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def _train(folder: Path, *, asynchronous: bool) -> None:
    saves = Fills(folder, every_n_steps=1, asynchronous=asynchronous)
    kwargs: dict[str, Any] = {"max_epochs": 20, "callbacks": [saves]}
    make = lambda: Language(Transformer()).double()  # noqa: E731
    try:
        fit(make, loaders(tokens), PipeSwiftStrategy(silence_s=60.0), **kwargs)
    except (CheckpointError, PipelineFailure) as error:
        said = f"{type(error).__name__}: {error}"
        (folder / f"said{os.environ['RANK']}").write_text(said)
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in a thread"])
def test_a_full_disk_of_one_rank_ends_all_and_loses_nothing(
    tmp_path: Path, *, asynchronous: bool
) -> None:
    kwargs = {"folder": tmp_path, "asynchronous": asynchronous}
    run_ranks(_train, 2, kwargs, deadline_s=100)
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert "rank 1: [Errno 28] No space left on device" in said, said
    newest = CheckpointDirectory(tmp_path).newest()
    # In a thread, the second save may still be writing when the disk is full.
    assert newest in [tmp_path / "step2", *([tmp_path / "step1"] if asynchronous else [])]
