"""What the benchmark of the executor runs: stages, and one step of ours and of the peer's."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeswift_lightning.plan.instructions import Schedule
from pipeswift_lightning.plan.timeline import Event
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.messages import Channel
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.transport import C10dTransport

__all__ = ["CASES", "Case", "OurStep", "PeerStep", "Sleep", "Sleeping"]

_DEVICE = torch.device("cpu")


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """Scales its input, and sleeps in forward and in backward."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, *self.seconds)


class _Scaled(nn.Module):
    """Next to nothing, with a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the stages do.

    Attributes:
        build: Returns one stage of so many.
        sample: Shape of one sample, of the input and of every activation.
        samples: Samples of one micro-batch.
        known_s: Seconds of Forward and Backward; ``None`` where they are measured.
        rounds_factor: Short steps are timed more often.
    """

    build: Callable[[int], nn.Module]
    sample: tuple[int, ...]
    samples: int
    known_s: tuple[float, float] | None
    rounds_factor: int = 1

    def stage(self, index: int, num_stages: int) -> nn.Module:
        """Return stage ``index``, the same at each call."""
        torch.manual_seed(index)
        return self.build(num_stages)

    def batch(self, num_micro_batches: int) -> Tensor:
        """Return the input of a step; it is also the target."""
        torch.manual_seed(0)
        return torch.randn(num_micro_batches * self.samples, *self.sample)


_WIDTH = 256
_LAYERS = 8  # Of the whole model: so that the work does not grow with the number of ranks.


def _transformer(num_stages: int) -> nn.Module:
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(_LAYERS // num_stages)
        )
    )


CASES = {
    "sleep": Case(
        build=lambda _: Sleeping(64, 0.020, 0.040),
        sample=(64,),
        samples=8,
        known_s=(0.020, 0.040),
    ),
    "real": Case(build=_transformer, sample=(32, _WIDTH), samples=4, known_s=None),
    "zero": Case(
        build=lambda _: _Scaled(64),
        sample=(64,),
        samples=8,
        known_s=(0.0, 0.0),
        rounds_factor=20,
    ),
}


class _Program:
    """The stage's module as a stage program. Micro-losses add up to the mean over the batch."""

    def __init__(self, module: nn.Module, micro_batches: tuple[Tensor, ...], *, last: int) -> None:
        self._module = module
        self._micro_batches = micro_batches
        self._last = last

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        x = received[0] if stage else self._micro_batches[micro_batch]
        output = self._module(x)
        if stage < self._last:
            return (output,)
        return _loss(output, self._micro_batches[micro_batch]) / len(self._micro_batches)

    def backward(self, micro_batch: int, loss: Tensor) -> None:  # noqa: ARG002 -- the protocol's
        loss.backward()

    def signature(self, micro_batch: int) -> Hashable:
        return "training_step", self._micro_batches[micro_batch].shape


class OurStep:
    """A step of our executor."""

    def __init__(self, case: Case, schedule: Schedule, groups: MeshGroups, batch: Tensor) -> None:
        stages, stage = groups.mesh.num_stages, groups.coordinate.stage
        self.module = case.stage(stage, stages)
        self._recorder = Recorder(groups.rank)
        self._executor = Executor(
            Channel(C10dTransport(groups, _DEVICE)), range(stages), recorder=self._recorder
        )
        self._schedule = schedule
        self._row = schedule.rows[stage]
        self._batch = batch

    def prepare(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def run(self) -> None:
        micro_batches = self._batch.chunk(self._schedule.num_micro_batches)
        program = _Program(self.module, micro_batches, last=self._schedule.num_stages - 1)
        self._recorder.begin()
        self._executor.run(self._row, program, training=True)

    def events(self) -> tuple[Event, ...]:
        """Return what the last step recorded."""
        return self._recorder.events()


class PeerStep:
    """A step of torch's; it returns no outputs (nor does ours) and does not rescale gradients."""

    def __init__(
        self, case: Case, schedule: str, micro_batches: int, groups: MeshGroups, batch: Tensor
    ) -> None:
        stages, stage = groups.mesh.num_stages, groups.coordinate.stage
        self.module = case.stage(stage, stages)
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        self._schedule = kind(
            PipelineStage(self.module, stage, stages, _DEVICE, group=groups.pipeline),
            micro_batches,
            loss_fn=lambda output, target: _loss(output, target) / micro_batches,
            scale_grads=False,
        )
        self._arguments = (batch,) if stage == 0 else ()
        self._target = batch if stage == stages - 1 else None

    def prepare(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def run(self) -> None:
        self._schedule.step(*self._arguments, target=self._target, return_outputs=False)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)
