"""Which folders count as checkpoints, and that no death in a save makes one that is not whole."""

import json
import os
import pickle
import random
import shutil
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeswift_lightning.runtime.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
    find_whole,
    what_is_missing,
)
from pipeswift_lightning.runtime.sharded_state import (
    load_small,
    read_table,
    read_tensors,
    save_small,
)
from pipeswift_lightning.strategies.shard_saver import Shard, ShardSaver
from tests.helpers.distributed import fork_server

KILLS = int(os.environ.get("PIPESWIFT_KILLS", "8"))
SIZE = 2000
TOPOLOGY = {"small_files": ["rank0.pt"]}


def _save(saver: ShardSaver, folder: Path, step: int, *, asynchronous: bool = False) -> None:
    """Save tensors that say which step they are of; two ranks share one of them."""
    rank = dist.get_rank()
    box = [CheckpointDirectory(folder).begin(step, 2) if rank == 0 else None]
    dist.broadcast_object_list(box)
    names = [f"own{r}" for r in range(dist.get_world_size())] + ["both"]
    tensors = {name: torch.full((SIZE,), float(step)) for name in (names[rank], "both")}
    files = {f"rank{rank}.pt": save_small({"step": step})}
    assert box[0] is not None
    shard = Shard(box[0], tensors, files, TOPOLOGY, names)
    if asynchronous:
        saver.begin(shard)
        for tensor in tensors.values():
            tensor.zero_()  # as a hook may
    else:
        saver.save(shard)


def _check(path: Path) -> int:
    """Return the step that every byte of a checkpoint is of."""
    step: int = load_small(path / "rank0.pt")["step"]
    targets = {name: torch.zeros(shape) for name, (_, shape) in read_table(path).items()}
    read_tensors(path, targets)
    assert "both" in targets
    for name, tensor in targets.items():
        assert (tensor == step).all(), name
    return step


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = ShardSaver(timedelta(seconds=30), torch.device("cpu"))
    yield saver
    saver.close()
    dist.destroy_process_group()


def test_saves_are_named_kept_and_found(alone: ShardSaver, tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path / "none").newest() is None
    for step in (5, 10, 10):  # a run that went back and came by again
        _save(alone, tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step10", "step10-v1"]
    assert (tmp_path / "LATEST").read_text() == "step10-v1\n"
    newest = tmp_path / "step10-v1"
    assert find_whole(tmp_path) == find_whole(tmp_path / "LATEST") == find_whole(newest) == newest
    assert find_whole(tmp_path / "step10") == tmp_path / "step10"
    assert find_whole(tmp_path / "LATEST" / "no") is None
    (tmp_path / "plain.ckpt").write_text("")
    assert find_whole(tmp_path / "plain.ckpt") is None


def test_what_is_not_whole_is_not_taken(alone: ShardSaver, tmp_path: Path) -> None:
    for step in (1, 2):
        _save(alone, tmp_path, step)
    data = tmp_path / "step2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step2 is passed over: __0_0.distcp has .* bytes of"):
        assert find_whole(tmp_path) == tmp_path / "step1"
    with pytest.raises(CheckpointError, match=r"step2 is no whole .* bytes of .*Rule: .*Remedy: "):
        find_whole(tmp_path / "step2")
    shutil.rmtree(tmp_path / "step1")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        find_whole(tmp_path)
    (tmp_path / "step3.tmp").mkdir()
    with pytest.raises(CheckpointError, match="never finished"):
        find_whole(tmp_path / "step3.tmp")


def test_foreign_files_and_a_stale_pointer_are_left_alone(
    alone: ShardSaver, tmp_path: Path
) -> None:
    """Once, a save removed every folder `step*.tmp`, and fell over files of that name."""
    for name in ("step7", "step8.tmp", "steps", "step1.txt"):
        (tmp_path / name).write_text("mine")
    for name in ("step-notes.tmp", "step9"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 7):
        _save(alone, tmp_path, step)
    assert find_whole(tmp_path) == tmp_path / "step7-v1"
    (tmp_path / "step7-v1" / "notes").write_text("mine")
    assert find_whole(tmp_path) == tmp_path / "step7-v1"
    (tmp_path / "LATEST").write_text("step77\n")
    assert find_whole(tmp_path / "LATEST") == tmp_path / "step7-v1"
    described = json.loads((tmp_path / "step7-v1" / "topology.json").read_text())
    for damaged in ([], {**described, "files": [1]}, {"files": {}}, "no"):
        (tmp_path / "step7-v1" / "topology.json").write_text(json.dumps(damaged))
        assert find_whole(tmp_path) == tmp_path / "step2"
    mine = {"step7", "step8.tmp", "steps", "step1.txt", "step-notes.tmp", "step9"}
    assert mine <= {p.name for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_whole(tmp_path / "step7-v1")


def test_a_name_that_no_rank_holds_is_missed(alone: ShardSaver, tmp_path: Path) -> None:
    commit = CheckpointDirectory(tmp_path).begin(1, None)
    shard = Shard(commit, {"a": torch.zeros(1)}, {}, {}, ["a", "b"])
    with pytest.raises(CheckpointError, match="the ranks together hold no b"):
        alone.save(shard)
    assert list(tmp_path.iterdir()) == []


@dataclass
class _Bomb:
    target: str

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))


def test_reading_executes_nothing(alone: ShardSaver, tmp_path: Path) -> None:
    bomb = _Bomb(str(tmp_path / "executed"))
    with pytest.raises(pickle.UnpicklingError):
        save_small({"state": bomb})
    _save(alone, tmp_path, 1)
    (tmp_path / "step1" / ".metadata").write_bytes(pickle.dumps(bomb))
    with pytest.raises(CheckpointError, match=r"names posix.mkdir. Rule: .* executes nothing"):
        read_table(tmp_path / "step1")
    (tmp_path / "step1" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"metadata cannot be read: .*Rule: .*Remedy: "):
        read_table(tmp_path / "step1")
    torch.save({"state": bomb}, tmp_path / "rank0.pt")
    with pytest.raises(CheckpointError, match=r"rank0.pt cannot be read: .*Rule: .*Remedy: "):
        load_small(tmp_path / "rank0.pt")
    assert not Path(bomb.target).exists()


# -- deaths -----------------------------------------------------------------------------------


def _die_at(call: int, folder: str, calls: "Synchronized[int]") -> None:
    """Save three steps, and in the last die at one of the calls that change the disk."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = ShardSaver(timedelta(seconds=30), torch.device("cpu"))
    for step in (1, 2):
        _save(saver, Path(folder), step)
    for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink"):
        original = getattr(os, name)

        def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if calls.value == call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.value += 1
            return _original(*args, **kwargs)

        setattr(os, name, counted)
    _save(saver, Path(folder), 3)  # and remove the first: two are kept
    os._exit(0)


def test_a_death_at_any_change_of_the_disk_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    context = fork_server()
    seen, call = set(), 0
    while True:
        folder = tmp_path / str(call)
        calls: Any = context.Value("i", 0)
        process = context.Process(target=_die_at, args=(call, str(folder), calls))
        process.start()
        process.join(60)
        newest = CheckpointDirectory(folder).newest()
        assert newest is not None, f"nothing is left by a death at call {call}"
        step = _check(newest)
        seen.add(step)
        pointed = folder / (folder / "LATEST").read_text().strip()
        assert what_is_missing(pointed) is None
        assert 0 <= step - _check(pointed) <= 1
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        _die_not(folder, step)
        call += 1
    assert seen == {2, 3}
    assert call > 12
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step2", "step3"]


def _die_not(folder: Path, step: int) -> None:
    """What a death has left does not hinder the next save."""
    assert CheckpointDirectory(folder).begin(step + 9, 2).sequence == step + 1


def _save_for_ever(rank: int, folder: str, store: str, done: "Synchronized[int]") -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit
    )
    saver = ShardSaver(limit, torch.device("cpu"))
    newest = CheckpointDirectory(Path(folder)).newest()
    step = 0 if newest is None else _check(newest)
    box = [step]
    dist.broadcast_object_list(box)
    for number in range(box[0] + 1, box[0] + 10_000):
        _save(saver, Path(folder), number, asynchronous=number % 2 == 0)
        saver.finish()
        if rank == 0:
            done.value = number


def test_kills_at_random_moments_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    """One rank is killed, or both; the next run goes on from what they have left."""
    draw = random.Random(3)
    context = fork_server()
    folder = tmp_path / "run"
    done: Any = context.Value("i", 0)
    for kill in range(KILLS):
        began = done.value
        args = (str(folder), str(tmp_path / f"store{kill}"), done)
        ranks = [context.Process(target=_save_for_ever, args=(r, *args)) for r in range(2)]
        for process in ranks:
            process.start()
        limit = time.monotonic() + 90
        while done.value == began and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        for process in draw.sample(ranks, 2 if kill % 2 else 1):
            process.kill()
        time.sleep(0.02)
        for process in ranks:  # the one that is left has nobody to save with
            process.kill()
            process.join()
        newest = CheckpointDirectory(folder).newest()
        assert newest is not None
        assert began < done.value <= _check(newest) <= done.value + 1
    described = json.loads((newest / "topology.json").read_text())
    assert described["sequence"] == _check(newest)
