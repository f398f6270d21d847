"""What a rank tells the others when it fails, and what may come between."""

import pytest
import torch.distributed as dist

from pipeswift_lightning.runtime.failure import FailureReport
from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.runtime.watchdog import Watchdog
from pipeswift_lightning.strategies.watch import FailureWatch

MESH = Mesh(num_stages=2, num_replicas=1)


class _InterruptedWatchdog(Watchdog):
    """The user presses Ctrl-C once more, just before the others are told."""

    def __init__(self, watch: FailureWatch) -> None:
        super().__init__(dist.HashStore(), rank=0, world_size=1, progress=watch.progress)
        self.posted: list[FailureReport] = []
        self._presses = 1

    def post_failure(self, report: FailureReport) -> FailureReport:
        if self._presses:
            self._presses -= 1
            raise KeyboardInterrupt
        self.posted.append(report)
        return report


def test_a_second_interrupt_does_not_keep_the_others_in_the_dark() -> None:
    """Lightning calls the strategy once more, with interrupts switched off."""
    watch = FailureWatch(silence_s=5.0)
    watchdog = watch._watchdog = _InterruptedWatchdog(watch)
    with pytest.raises(KeyboardInterrupt):
        watch.told(KeyboardInterrupt(), MESH)
    assert watchdog.posted == []
    watch.told(KeyboardInterrupt(), MESH)
    watch.told(KeyboardInterrupt(), MESH)
    assert [report.cause for report in watchdog.posted] == ["KeyboardInterrupt"]
