"""Real processes that die, stop, raise, wait for each other or merely compute for long."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeswift_lightning.runtime.failure import FailureReport
from pipeswift_lightning.runtime.watchdog import PipelineFailure, Progress, Watchdog
from tests.helpers.faults import (
    Actor,
    Scene,
    play,
    send_self,
    sleep_holding_the_lock,
    strike_in_step,
)

SILENCE_S = 1.5


def _killed(actor: Actor) -> None:
    actor.run_pipeline(1000, strike_in_step(actor, send_self(signal.SIGKILL)))


def _stopped(actor: Actor) -> None:
    actor.run_pipeline(1000, strike_in_step(actor, send_self(signal.SIGSTOP)))


@pytest.mark.parametrize(
    ("victim", "store"), [(0, "tcp"), (1, "tcp"), (2, "tcp"), (3, "tcp"), (0, "agent"), (2, "file")]
)
def test_after_a_kill_every_survivor_leaves_within_a_second(victim: int, store: str) -> None:
    endings = play(Scene(body=_killed, victim=victim, store=store))
    for rank, ending in enumerate(endings):
        if rank == victim:
            assert ending.code == -signal.SIGKILL
            continue
        assert ending.code == 1, ending.said
        assert ending.after_s < 1.0
        assert f"rank {victim} (stage {victim}, micro-batch 3) failed: killed" in ending.said
        assert "Forward of micro-batch 3, in batch 2" in ending.said
        assert "from rank" in ending.said  # the direction the reporter waited for


@pytest.mark.parametrize(("victim", "store"), [(0, "tcp"), (3, "tcp"), (0, "agent"), (2, "file")])
def test_a_stopped_rank_is_named_and_fenced(victim: int, store: str) -> None:
    endings = play(Scene(body=_stopped, victim=victim, store=store, silence_s=SILENCE_S))
    for rank, ending in enumerate(endings):
        assert ending.after_s < SILENCE_S + 1.0
        if rank == victim:
            assert ending.code == -signal.SIGKILL
        else:
            assert ending.code == 1, ending.said
            where = f"rank {victim} (stage {victim}, micro-batch 3) failed: silent for "
            assert where in ending.said


@pytest.mark.parametrize("victim", [1, 3])
def test_a_kill_on_another_host_is_told_by_the_missing_heartbeat(victim: int) -> None:
    endings = play(Scene(body=_killed, victim=victim, apart=True))
    for ending in endings[:victim] + endings[victim + 1 :]:
        assert ending.code == 1
        assert ending.after_s < 1.5
        where = f"rank {victim} (stage {victim}, micro-batch 3) failed: killed: it closed its"
        assert where in ending.said


def test_a_killed_store_host_on_another_host_is_told_by_the_lost_store() -> None:
    for ending in play(Scene(body=_killed, victim=0, apart=True))[1:]:
        assert ending.code == 1
        assert ending.after_s < 1.0
        assert "rank 0 (stage 0, micro-batch 3) failed: the rendezvous store is gone" in ending.said


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_stopped_on_another_host_is_named_and_left_to_its_launcher(victim: int) -> None:
    scene = Scene(
        body=_stopped, victim=victim, apart=True, silence_s=SILENCE_S, limit_s=6, outlasted=True
    )
    for rank, ending in enumerate(play(scene)):
        if rank == victim:
            assert ending.code is None
            continue
        assert ending.code == 1, ending.said
        assert ending.after_s < SILENCE_S + 2.0
        assert f"rank {victim} (stage {victim}, micro-batch 3) failed: silent for" in ending.said


def _wrong(_: Actor) -> None:
    message = "expected 7 tokens"
    raise ValueError(message)


def _raising(actor: Actor) -> None:
    actor.run_pipeline(1000, strike_in_step(actor, _wrong))


@pytest.mark.parametrize("victim", [0, 2])
def test_an_exception_reaches_every_rank_with_its_traceback(victim: int) -> None:
    endings = play(Scene(body=_raising, victim=victim))
    for rank, ending in enumerate(endings):
        assert ending.code == 1
        assert ending.after_s < 1.0
        assert "in _wrong\n" in ending.said
        assert "ValueError: expected 7 tokens" in ending.said
        if rank != victim:
            where = f"PipelineFailure: Pipeline stopped: rank {victim} (stage {victim}"
            assert where in ending.said


def _blocked(actor: Actor) -> None:
    if actor.rank == 1:
        actor.strike()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _note(report: FailureReport) -> None:
    os.write(2, f"called back about rank {report.rank}\n".encode())


def test_a_main_thread_that_does_not_come_out_is_ended_with_the_report() -> None:
    scene = Scene(body=_blocked, victim=1, options={"on_abort": _note}, grace_s=0.3)
    for rank, ending in enumerate(play(scene)):
        if rank == 1:
            continue
        assert ending.code == 1
        assert 0.3 < ending.after_s < 1.5
        assert f"[rank {rank}] Pipeline stopped: rank 1 (stage 1) failed: killed" in ending.said
        assert "called back about rank 1" in ending.said


def _held_sockets(actor: Actor) -> None:
    if actor.rank == 0 and os.fork() == 0:
        while os.getppid() != 1 and time.monotonic() - actor.struck.value < 5:
            time.sleep(0.02)
        time.sleep(3)  # longer than the survivors may take
        os._exit(0)
    _killed(actor)


def test_a_data_worker_that_holds_the_dead_store_hosts_sockets_delays_no_one() -> None:
    endings = play(Scene(body=_held_sockets, victim=0))
    for ending in endings[1:]:
        assert ending.code == 1
        assert ending.after_s < 2.5  # the worker stays for longer
        assert "rank 0 (stage 0, micro-batch 3) failed: killed" in ending.said


def _clean(actor: Actor) -> None:
    actor.run_pipeline(3)
    if actor.rank == actor.scene.victim:
        time.sleep(actor.scene.silence_s * 1.5)


@pytest.mark.parametrize(("last_to_leave", "store"), [(0, "tcp"), (2, "tcp"), (2, "file")])
def test_a_clean_end_is_no_failure_however_late_one_rank_leaves(
    last_to_leave: int, store: str
) -> None:
    scene = Scene(body=_clean, world_size=3, victim=last_to_leave, silence_s=1.8, store=store)
    for ending in play(scene):
        assert (ending.code, "ended cleanly" in ending.said) == (0, True), ending.said


def _computes(actor: Actor) -> None:
    if actor.rank == actor.scene.victim:
        actor.progress.doing = "a long computation"
        time.sleep(actor.scene.silence_s * 2)
        sleep_holding_the_lock(actor.scene.silence_s * 0.6)
        time.sleep(actor.scene.silence_s / 2)  # a few heartbeats
        began = time.monotonic()
        sum(range(3_000_000))
        count = int(3_000_000 * actor.scene.silence_s * 2 / (time.monotonic() - began))
        sum(range(count))  # one bytecode: no other thread of this process runs meanwhile
    actor.run_pipeline(2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_long_compute_is_not_killed(victim: int) -> None:
    for ending in play(Scene(body=_computes, world_size=2, victim=victim, silence_s=1.0)):
        assert (ending.code, "ended cleanly" in ending.said) == (0, True), ending.said


def _wait_in_a_ring(actor: Actor) -> None:
    peer = {0: 1, 1: 2, 2: 0}.get(actor.rank)
    if peer is None:
        time.sleep(60)
    else:
        actor.exchange("gradient", 5, peer, send=False)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    for rank, ending in enumerate(play(Scene(body=_wait_in_a_ring, silence_s=1.0))):
        assert ending.code == 1
        assert "rank 0 (stage 0, micro-batch 5) failed: deadlock: ranks" in ending.said
        for waiting, peer in ((0, 1), (1, 2), (2, 0)):
            wait = f"rank {waiting}: waiting for the gradient of micro-batch 5 from rank {peer}"
            assert wait in ending.said
        assert rank < 3 or f"[rank {rank}] " in ending.said


def _one_runs_fewer_steps(actor: Actor) -> None:
    if actor.rank == 1:
        return
    actor.exchange("activation", 0, 1, send=False)


def test_a_rank_that_ended_too_early_is_named() -> None:
    endings = play(Scene(body=_one_runs_fewer_steps, world_size=2, silence_s=1.0))
    assert endings[0].code == 1
    assert "has ended its run" in endings[0].said
    assert "waiting for the activation of micro-batch 0 from rank 1" in endings[0].said


def _two_orphans(folder: Path) -> None:
    """Fork two ranks, then wait: the test kills this process."""
    parent = os.getpid()
    for rank in range(2):
        if os.fork() == 0:
            store = dist.PrefixStore("watchdog", dist.FileStore(str(folder / "store"), 2))
            Watchdog(store, rank, 2, Progress(), expected_parent_pid=parent, grace_s=0.2).start()
            (folder / f"pid{rank}").write_text(f"{os.getpid()}\n")
            time.sleep(60)
    time.sleep(60)


def test_no_orphan_outlives_its_parent(tmp_path: Path) -> None:
    from pipeswift_lightning.runtime.process import ProcessIdentity
    from tests.helpers.distributed import fork_server

    parent = fork_server().Process(target=_two_orphans, args=(tmp_path,))
    parent.start()
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    _until(lambda: all(file.exists() and file.read_text() for file in files), 10)
    children = [ProcessIdentity.of(int(file.read_text())) for file in files]
    assert all(child.is_alive() for child in children)
    time.sleep(0.3)
    parent.kill()
    parent.join()
    _until(lambda: not any(child.is_alive() for child in children), 1.0)


def _until(condition, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_explain_names_this_rank_when_its_peer_is_well() -> None:
    """A time-out or a transport error between two living ranks: nobody else is to blame."""
    store = dist.HashStore()
    dogs = [
        Watchdog(
            dist.PrefixStore("dog", store), r, 2, Progress(stage=r), silence_s=5.0, tick_s=0.02
        )
        for r in range(2)
    ]
    with ThreadPoolExecutor() as pool:  # start() waits for the others
        list(pool.map(Watchdog.start, dogs))
    failure = dogs[1].explain(RuntimeError("Timed out after 30 s"), waiting_for=0)
    assert isinstance(failure, PipelineFailure)
    assert (failure.report.rank, failure.report.reporter) == (1, 1)
    assert "Timed out after 30 s" in str(failure)
    for dog in reversed(dogs):
        dog.stop()
    assert dogs[0].first_failure() == failure.report


def test_the_first_report_stands() -> None:
    dog = Watchdog(dist.HashStore(), 0, 1, Progress(stage=0))
    dog.start()
    first = dog.post_failure(dog.describe(ValueError("first")))
    assert dog.post_failure(dog.describe(ValueError("second"))) == first == dog.first_failure()
    dog.stop()
    dog.stop()


def test_a_used_store_is_refused() -> None:
    store = dist.HashStore()
    for name, used in (("a", False), ("b", False), ("a", True)):
        dog = Watchdog(dist.PrefixStore(name, store), 0, 1, Progress())
        if used:
            with pytest.raises(ValueError, match="wrap it in a PrefixStore"):
                dog.start()
        else:
            dog.start()
        dog.stop()


def test_a_rank_that_never_starts_is_named() -> None:
    dog = Watchdog(dist.HashStore(), 1, 3, Progress(), join_s=0.2)
    with pytest.raises(TimeoutError, match=r"2 of 3 ranks did not start .* \[0, 2\]"):
        dog.start()
    dog.stop()


def test_a_failure_while_others_start_is_told_to_them() -> None:
    store = dist.HashStore()
    early, late = (Watchdog(store, r, 3, Progress(stage=r), join_s=5.0) for r in (0, 1))
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(early.start), pool.submit(late.start)]
        time.sleep(0.1)
        late.post_failure(late.describe(ValueError("no such layer")))
        for start in starts:
            with pytest.raises(PipelineFailure, match="no such layer"):
                start.result()
    for dog in (late, early):
        dog.stop()


def test_the_watch_must_be_more_patient_than_its_tick() -> None:
    with pytest.raises(ValueError, match=r"tick_s=2\.0 must be positive and at most"):
        Watchdog(dist.HashStore(), 0, 1, Progress(), silence_s=1.0, tick_s=2.0)
