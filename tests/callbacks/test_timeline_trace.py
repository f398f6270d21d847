import gzip
import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pipeswift_lightning.callbacks import (
    BubbleMonitor,
    JobReport,
    Rebalance,
    TimelineTrace,
    VarianceMonitor,
)
from pipeswift_lightning.drawing import DrawingError
from tests.callbacks.sleepers import Sleeps, train
from tests.helpers.modules import Regression, loaders, stack, vectors
from tests.helpers.parity import RecordingLogger, fit
from tests.helpers.strict_logger import StrictLogger

NUMBERS = {
    "bubble/predicted",
    "bubble/stage_1",
    "bubble/stage_1_busy_s",
    "job/share_training",
    "memory/stage_0_bytes",
    "rebalance/step_s",
    "throughput/samples_per_s",
    "train/loss",
    "variance/step_mean_s",
}


class ImageLogger(RecordingLogger):
    """Takes images as W&B's logger does."""

    def __init__(self) -> None:
        super().__init__()
        self.images = []

    def log_image(self, key, images, step=None) -> None:
        self.images.append((key, images[0].shape, step))


def test_matplotlib_is_asked_for_at_the_start_or_not_at_all(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawingError, match=r"pipeswift-lightning\[plot\].*png=False"):
        TimelineTrace()
    assert TimelineTrace(png=False).png is False


def test_without_a_pipeline_it_rests(tmp_path) -> None:
    trace = TimelineTrace(every_n_steps=1, dirpath=tmp_path, png=False)
    fit(lambda: Regression(stack()), loaders(vectors), "auto", callbacks=[trace], max_epochs=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=90)
def test_pictures_and_numbers_of_a_run(tmp_path) -> None:
    images, strict = ImageLogger(), StrictLogger()
    board = TensorBoardLogger(tmp_path, name="board", version="")
    csv = CSVLogger(tmp_path, name="csv", version="")
    callbacks = [
        TimelineTrace(every_n_steps=2, dirpath=tmp_path),
        JobReport(dirpath=tmp_path, every_n_steps=2, peak_flops=1e12),
        BubbleMonitor(every_n_steps=2, warn_above=1.0),
        VarianceMonitor(window=4),
        Rebalance(every_n_steps=4, window=4, threshold=0.9),
    ]
    train(Sleeps(factors=(0.5, 0.5)), callbacks, steps=5, logger=[csv, images, board, strict])
    if dist.get_rank() != 0:
        assert images.images == []
        return
    assert strict.names() >= NUMBERS
    assert strict.parameters["job/plan/stages"] == "2"
    folder = Path(tmp_path) / "timelines"
    ends = (".html", ".png", ".trace.json.gz")
    assert sorted(p.name for p in folder.iterdir()) == [
        f"step_{step:06}{end}" for step in (2, 4) for end in ends
    ]
    ((key, shape, step), _) = images.images
    assert (key, len(shape), step) == ("timeline", 3, None)
    written = list((Path(tmp_path) / "board").glob("events*"))
    assert any(b"timeline" in path.read_bytes() for path in written)
    trace = json.loads(gzip.decompress((folder / "step_000004.trace.json.gz").read_bytes()))
    measured = [r for r in trace["traceEvents"] if r["ph"] == "X" and r["pid"] == 0]
    computed = [(r["tid"], r["name"]) for r in measured if r["cat"] in ("forward", "backward")]
    assert sorted(computed) == [(s, f"{k}{i}") for s in (0, 1) for k in "BF" for i in range(4)]
    assert {r["args"].get("samples") for r in measured if r["args"]["micro_batch"] == 0} == {1}
    assert not any("tokens" in r["args"] for r in measured)  # its samples are no sequences
    assert {"data_wait", "optimizer", "receive_wait"} <= {r["cat"] for r in measured}
    assert "Sleeper, step 4" in (folder / "step_000004.html").read_text()
