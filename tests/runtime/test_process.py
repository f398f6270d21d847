import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeswift_lightning.runtime.process import ProcessIdentity


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_this_process_is_alive_and_busy() -> None:
    me = ProcessIdentity.current()
    assert ProcessIdentity.from_json(me.to_json()) == me
    assert (me.pid, me.is_alive(), me.is_stopped()) == (os.getpid(), True, False)
    before_s = me.cpu_s()
    while time.process_time() < before_s + 0.05:
        pass
    assert me.cpu_s() > before_s


def test_a_stopped_process_is_alive(sleeper: "subprocess.Popen[bytes]") -> None:
    process = ProcessIdentity.of(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert (process.is_alive(), process.is_stopped()) == (True, True)


def test_a_zombie_is_dead_and_killing_the_dead_is_harmless(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    process = ProcessIdentity.of(sleeper.pid)
    process.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    assert not process.is_alive()
    process.kill()


def test_a_reused_pid_is_another_process(sleeper: "subprocess.Popen[bytes]") -> None:
    earlier = replace(ProcessIdentity.of(sleeper.pid), started=1)
    assert not earlier.is_alive()
    earlier.kill()
    assert sleeper.poll() is None
    assert (earlier.is_stopped(), earlier.cpu_s()) == (False, 0.0)


def test_without_a_process_table_the_kernel_is_asked(sleeper: "subprocess.Popen[bytes]") -> None:
    process = replace(ProcessIdentity.of(sleeper.pid), started=0)
    assert process.is_alive()
    sleeper.kill()
    sleeper.wait()
    assert not process.is_alive()
