import os
import signal

from pipeswift_lightning.runtime.progress import NeighbourProgress, Progress
from tests.helpers.distributed import fork_server


def _mark_and_die(pipe) -> None:
    progress = Progress()
    fd = progress.share()
    pipe.send(fd)
    pipe.recv()
    progress.step, progress.batch = 7, "training batch 6"
    progress.mark("Backward", stage=2, micro_batch=3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_mark_of_a_killed_process_can_be_read() -> None:
    here, there = fork_server().Pipe()
    process = fork_server().Process(target=_mark_and_die, args=(there,))
    process.start()
    neighbour = NeighbourProgress(process.pid, here.recv())
    here.send("go")
    process.join()
    stamp = neighbour.stamp(beat=5)
    assert (stamp.stage, stamp.micro_batch, stamp.doing) == (2, 3, "Backward")
    assert (stamp.step, stamp.waiting_for, stamp.beat) == (7, None, 5)
    assert stamp.batch == "training batch 6"


def test_long_words_are_cut_and_a_half_character_is_dropped() -> None:
    progress = Progress()
    progress.mark("é" * 150)
    fd = progress.share()
    assert fd is not None
    assert NeighbourProgress(os.getpid(), fd).stamp(beat=0).doing == "é" * 100


def test_a_mark_counts_as_a_move() -> None:
    progress = Progress(stage=1)
    progress.mark("waiting", waiting_for=0)
    progress.mark("waiting", waiting_for=0)
    assert (progress.moves, progress.stage) == (2, 1)
