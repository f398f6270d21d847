"""A pipeline whose stages sleep for known times, and ways to slow one thing of it."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.transport import C10dTransport
from tests.helpers.parity import make_trainer

FORWARD_S, BACKWARD_S = 0.01, 0.02
ATTEMPTS = 3
SLOW_S = 25.0
BUSY = 0.02  # Sleeps longer than asked for by this share: the machine has other work.
WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Sleeps:
    """How long the stages sleep.

    Attributes:
        factors: Multiplies both times, by stage.
        extra: Called with stage and number of the call before each Forward of a training step.
        loader_s: Before each batch.
    """

    factors: tuple[float, ...]
    extra: Callable[[int, int], None] | None = None
    loader_s: float = 0.0


class _Slept:
    """How long this process was to sleep, and how much longer it took to wake."""

    asked_s = late_s = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        start_s = time.perf_counter()
        time.sleep(seconds)
        cls.asked_s += seconds
        cls.late_s += time.perf_counter() - start_s - seconds


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        _Slept.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _Slept.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingLayer(nn.Module):
    def __init__(self, stage: int, sleeps: Sleeps) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._stage, self._sleeps, self._calls = stage, sleeps, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta or not torch.is_grad_enabled():  # the discovery of the network
            return self.linear(x)
        if self._sleeps.extra is not None:
            self._sleeps.extra(self._stage, self._calls)
        self._calls += 1
        factor = self._sleeps.factors[self._stage]
        return _Sleep.apply(self.linear(x), factor * FORWARD_S, factor * BACKWARD_S)


class Sleeper(LightningModule):
    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.net = nn.Sequential(*(SleepingLayer(s, sleeps) for s in range(len(sleeps.factors))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch).pow(2).mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples(Dataset[Tensor]):
    def __init__(self, num: int, batch_size: int, per_batch_s: float) -> None:
        self._num, self._batch_size, self._per_batch_s = num, batch_size, per_batch_s

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Tensor:
        if self._per_batch_s and index % self._batch_size == 0:
            time.sleep(self._per_batch_s)
        return torch.full((WIDTH,), float(index % 3))


def train(
    sleeps: Sleeps,
    callbacks: list[Callback],
    *,
    steps: int,
    micro_batches: int = 4,
    batch_size: int = 4,
    schedule: str = "1f1b",
    loss: str = "per_sample",
    stages: int | None = None,
    **kwargs: Any,
) -> Any:
    """Train ``steps`` steps in the ranks of the harness, a stage a sleeper; return the Trainer."""
    stages = len(sleeps.factors) if stages is None else stages
    strategy = PipeSwiftStrategy(
        stages=stages, micro_batches=micro_batches, schedule=schedule, loss=loss
    )
    trainer = make_trainer(
        strategy, callbacks=callbacks, max_steps=steps, precision="32-true", **kwargs
    )
    data = Samples(steps * batch_size, batch_size, sleeps.loader_s)
    trainer.fit(Sleeper(sleeps), DataLoader(data, batch_size))
    return trainer


def measured(*checks: Callable[[], None]) -> None:
    """Run checks of measured times on all ranks, each up to three times, on a fresh run.

    A busy machine can make any of them fail. So what fails every time, while the machine woke
    sleepers late or let a rank wait for a core, has not been measured: the test is skipped then,
    after the other checks.
    """
    unmeasured = [check.__name__ for check in checks if not _holds(check)]
    if unmeasured:
        pytest.skip(f"the machine is too busy to measure {', '.join(unmeasured)}")


def _holds(check: Callable[[], None]) -> bool:
    """Whether a check holds; False if it could not be seen on a busy machine."""
    start_s = time.perf_counter()
    for attempt in range(ATTEMPTS):
        _Slept.asked_s = _Slept.late_s = 0.0
        begin_s, waited_s = time.perf_counter(), _waited_s()
        error: AssertionError | None = None
        try:
            check()
        except AssertionError as caught:
            traceback.print_exc()
            error = caught
        now_s = time.perf_counter()
        kept_waiting = _waited_s() - waited_s > BUSY * (now_s - begin_s)
        busy = kept_waiting or _Slept.late_s > BUSY * _Slept.asked_s
        slow = now_s - start_s > SLOW_S  # no time for another attempt
        outcome = torch.tensor([float(error is not None), float(busy), float(slow)])
        dist.all_reduce(outcome)
        if not outcome[0]:
            return True
        if outcome[2] or attempt == ATTEMPTS - 1:
            if outcome[1]:
                return False
            raise error or AssertionError("another rank's check failed, on a calm machine")
    return False


def _waited_s() -> float:
    """Return for how long this process has been ready to run, but had no core."""
    told = Path("/proc/self/schedstat")
    return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0


class _Late:
    """A send that leaves later; in the meantime the sender goes on."""

    def __init__(self, due_s: float, start: Callable[[], Any]) -> None:
        self.due_s, self._start = due_s, start
        self._left = threading.Event()
        self._work: Any = None

    def leave(self) -> None:
        time.sleep(max(0.0, self.due_s - time.perf_counter()))
        self._work = self._start()
        self._left.set()

    def wait(self, *args: Any) -> Any:
        self._left.wait()
        return self._work.wait(*args)


@contextmanager
def slow_link(source: int, target: int, latency_s: float) -> Iterator[None]:
    """Messages from position ``source`` to ``target`` arrive ``latency_s`` later."""
    queue: deque[_Late] = deque()
    ready, done = threading.Semaphore(0), threading.Event()
    send = C10dTransport.send

    def late(self: C10dTransport, tensor: Tensor, destination: int) -> Any:
        if dist.get_rank() != source or destination != target:
            return send(self, tensor, destination)
        message = _Late(time.perf_counter() + latency_s, lambda: send(self, tensor, destination))
        queue.append(message)
        ready.release()
        return message

    def deliver() -> None:
        while True:
            ready.acquire()
            if done.is_set():
                return
            queue.popleft().leave()

    thread = threading.Thread(target=deliver)
    thread.start()
    C10dTransport.send = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        C10dTransport.send = send  # type: ignore[method-assign]
        done.set()
        ready.release()
        thread.join()
