import threading

import pytest
import torch
import torch.distributed as dist

from pipeswift_lightning.runtime.blocked import distributed_call


def test_a_thread_elsewhere_is_in_no_call() -> None:
    assert distributed_call(threading.get_ident()) is None
    assert distributed_call(-1) is None


@pytest.mark.world_size(2)
def test_a_collective_that_nobody_announced_is_seen() -> None:
    seen: list[str | None] = []
    main = threading.get_ident()
    if dist.get_rank() == 0:
        timer = threading.Timer(0.3, lambda: seen.append(distributed_call(main)))
        timer.start()
        dist.all_reduce(torch.ones(1))
        timer.join()
        assert seen[0] is not None
        assert seen[0].startswith("in torch.distributed.all_reduce, called at test_blocked.py:")
    else:
        threading.Event().wait(1.0)
        dist.all_reduce(torch.ones(1))
