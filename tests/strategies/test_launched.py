"""Scripts that a launcher starts, as a user would: no process is left, whoever ends first."""

import subprocess
import sys
import time

import pytest

from tests.helpers.casts import launch, leave_when_gone
from tests.helpers.distributed import fork_server
from tests.helpers.faults import Ending, start_server
from tests.helpers.scenario import Scenario

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
QUICKLY_S = 10.0  # under 2 s on two quiet cores; the interpreter's own end takes most of it


def check(code: int | None, endings: list[Ending]) -> None:
    assert code not in (0, None)
    for ending in endings:
        assert ending.after_s < QUICKLY_S, ending


def test_an_exception_in_a_child() -> None:
    scenario = Scenario(fault="forward", rank=1, devices=2)
    code, endings = launch(scenario, launcher=(sys.executable,))  # all of it as a user has it
    check(code, endings)
    assert code == 1
    assert "rank 1 (stage 1, micro-batch 1) failed: ValueError" in endings[0].said
    assert endings[1].said.count("ValueError: the user's own error") == 1


def test_the_parent_is_killed() -> None:
    code, endings = launch(Scenario(fault="backward", action="kill", rank=0, devices=2))
    check(code, endings)
    assert code == -9
    assert "rank 0 (stage 0, micro-batch 1) failed: killed" in endings[1].said


def test_the_parent_is_interrupted() -> None:
    """Ctrl-C reaches the parent alone where no terminal is: it takes its children along."""
    code, endings = launch(Scenario(fault="forward", action="interrupt_parent", rank=1, devices=2))
    check(code, endings)
    assert code == 1
    assert "KeyboardInterrupt" in endings[0].said
    assert "failed: KeyboardInterrupt" in endings[1].said


@pytest.mark.parametrize(("action", "how"), [("kill", "was killed by SIGKILL"), ("exit", "code 7")])
def test_a_child_that_ends_before_it_joins(action: str, how: str) -> None:
    """The others wait for it where no watch has begun: the launcher must see it."""
    code, endings = launch(Scenario(fault="import", action=action, rank=1, devices=3))
    check(code, endings)
    assert "the process of local rank 1 (pid" in endings[0].said
    assert how in endings[0].said
    assert "before it had joined" in endings[0].said


def test_torchrun_and_a_killed_rank() -> None:
    scenario = Scenario(fault="forward", action="kill", rank=1, devices=2)
    code, endings = launch(scenario, launcher=TORCHRUN)
    check(code, endings)
    assert "rank 1 (stage 1, micro-batch 1) failed: killed" in endings[0].said


def test_a_rank_whose_parent_has_gone_does_not_wait_to_join() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    start_server(fork_server())
    rank = fork_server().Process(target=leave_when_gone, args=(gone.pid,))
    began = time.monotonic()
    rank.start()
    rank.join(QUICKLY_S)
    assert (rank.exitcode, time.monotonic() - began < QUICKLY_S) == (1, True)
