"""The harness is itself tested: it must fail loudly, quickly, and name the culprit."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_ranks


def _rank_one_is_wrong() -> None:
    assert dist.get_rank() == 0, "rank one is wrong"
    dist.barrier()


def _rank_one_waits_for_ever() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    else:
        time.sleep(60)


def _rank_one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_root_cause_comes_first() -> None:
    with pytest.raises(AssertionError, match=r"ranks failed\n--- rank 1 \(failed\)"):
        run_ranks(_rank_one_is_wrong, 2, {})


def test_hang_shows_where_each_rank_stands() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)hung.*in _rank_one_waits_for_ever"):
        run_ranks(_rank_one_waits_for_ever, 2, {}, deadline_s=2)
    assert time.monotonic() - began < 8


def test_death_without_a_word_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"--- rank 1 \(failed, exit code -9\)"):
        run_ranks(_rank_one_is_killed, 2, {})


def _all_skip() -> None:
    pytest.skip("no link here")


def test_a_body_may_skip_its_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="no link here"):
        run_ranks(_all_skip, 2, {})


@pytest.mark.world_size(2, deadline_s=20)
@pytest.mark.parametrize("value", [3])
def test_the_marker_runs_the_body_in_every_rank(value: int, tmp_path: Path) -> None:
    rank = dist.get_rank()
    assert (dist.get_world_size(), value, torch.get_num_threads()) == (2, 3, 1)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == "2"
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.world_size(1)
def test_a_rank_may_have_children() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    assert child.exitcode == 0
