"""What ``benchmarks.lognormal`` races: layers, micro-batches, and a step of each side."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.lowering import lower
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.messages import Channel
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.transport import C10dTransport

__all__ = ["CASES", "Case", "Data", "OurSide", "PeerSide", "packed_runs", "padded_runs", "tell"]

_CPU = torch.device("cpu")


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps for each token in forward, and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    """A layer that may be told where the samples of a packed row end."""

    segments: Sequence[int] | None = None


class Sleeping(Layer):
    """Takes as long as its tokens are many."""

    def __init__(self, width: int, token_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.token_s = token_s

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self.token_s * x.shape[0] * x.shape[1])


class Block(Layer):
    """A transformer's block with causal attention: padding at the end changes nothing before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        mixed = self.mix(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        parts = [length] if self.segments is None else list(self.segments)
        attended = torch.cat(
            [
                functional.scaled_dot_product_attention(*part, is_causal=True)
                for part in zip(*(t.split(parts, dim=2) for t in (q, k, v)), strict=True)
            ],
            dim=2,
        )
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.inner(self.norms[1](x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network.

    Attributes:
        width: Of its activations.
        layers: Make its layers; the same at each call.
    """

    width: int
    layers: tuple[Callable[[], Layer], ...]

    def stage(self, layers: range) -> nn.Sequential:
        """Return these layers, with the same weights at each call."""
        built = []
        for i in layers:
            torch.manual_seed(i)
            built.append(self.layers[i]())
        return nn.Sequential(*built)


def _sleeping(token_s: Sequence[float]) -> Case:
    return Case(width=16, layers=tuple((lambda s=s: Sleeping(16, s)) for s in token_s))


_TOKEN_S = 6e-6  # of one layer's forward
CASES = {
    "sleep": _sleeping([_TOKEN_S] * 8),
    "uneven": _sleeping([_TOKEN_S * by for by in (0.2, 1, 1, 1, 1, 1, 1, 2.5)]),
    "real": Case(width=128, layers=(lambda: Block(128, 4),) * 4),
}


@dataclass(frozen=True, slots=True)
class Data:
    """The samples of a batch.

    Attributes:
        inputs: Of each sample, ``[T, width]``.
        targets: The same.
    """

    inputs: list[Tensor]
    targets: list[Tensor]

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, seed: int) -> "Data":
        """Draw samples of these lengths."""
        draw = torch.Generator().manual_seed(seed)
        both = [torch.randn(2, n, width, generator=draw) for n in lengths]
        return cls([x[0] for x in both], [x[1] for x in both])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(x) for x in self.inputs)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of samples. The target has one more feature: 1 at tokens, 0 at padding."""

    inputs: Tensor
    target: Tensor
    segments: tuple[int, ...] | None


def padded_runs(data: Data, m: int, length: int) -> list[MicroBatch]:
    """Return equal runs of samples, all padded to ``length``."""
    rows = [
        (_padded(x, length), _padded(_weighted(y), length))
        for x, y in zip(data.inputs, data.targets, strict=True)
    ]
    size = len(rows) // m
    return [
        MicroBatch(*(torch.stack(column) for column in zip(*rows[i : i + size], strict=True)), None)
        for i in range(0, len(rows), size)
    ]


def packed_runs(
    data: Data, samples: Sequence[Sequence[int]], length: int | None = None
) -> list[MicroBatch]:
    """Return micro-batches of one row: samples one behind the other, padded to ``length``."""
    found = []
    for part in samples:
        inputs = torch.cat([data.inputs[i] for i in part])
        target = torch.cat([_weighted(data.targets[i]) for i in part])
        segments = [len(data.inputs[i]) for i in part]
        if length is not None and length > len(inputs):
            segments.append(length - len(inputs))
            inputs, target = _padded(inputs, length), _padded(target, length)
        found.append(MicroBatch(inputs[None], target[None], tuple(segments)))
    return found


def _weighted(target: Tensor) -> Tensor:
    return torch.cat([target, torch.ones(len(target), 1)], dim=1)


def _padded(rows: Tensor, length: int) -> Tensor:
    return functional.pad(rows, (0, 0, 0, length - len(rows)))


def _loss(output: Tensor, target: Tensor, num_tokens: int) -> Tensor:
    each = (output - target[..., :-1]).pow(2).mean(-1)
    return (each * target[..., -1]).sum() / num_tokens


def tell(stage: nn.Sequential, segments: Sequence[int] | None) -> None:
    """Say where the samples of the next row end."""
    for layer in stage:
        layer.segments = segments


class _Program:
    """The stage's layers as a stage program."""

    def __init__(
        self, stage: nn.Sequential, parts: Sequence[MicroBatch], num_tokens: int, *, is_last: bool
    ) -> None:
        self._stage, self._parts, self._num_tokens = stage, parts, num_tokens
        self._is_last = is_last

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        part = self._parts[micro_batch]
        tell(self._stage, part.segments)
        output = self._stage(received[0] if stage else part.inputs)
        return _loss(output, part.target, self._num_tokens) if self._is_last else (output,)

    def backward(self, micro_batch: int, loss: Tensor) -> None:  # noqa: ARG002 -- the protocol's
        loss.backward()

    def signature(self, micro_batch: int) -> Hashable:
        return "training_step", self._parts[micro_batch].inputs.shape


class OurSide:
    """A step of our executor, as planned."""

    def __init__(self, case: Case, plan: Candidate, data: Data, groups: MeshGroups) -> None:
        self.stage = stage = groups.coordinate.stage
        stages = groups.mesh.num_stages
        self.module: nn.Module = (layers := case.stage(plan.partition.ranges[stage]))
        parts = packed_runs(data, plan.formation.samples)
        m = len(parts)
        schedule = lower(build_schedule(plan.schedule_name, stages, m, warm_up=plan.warm_up))
        self._row = schedule.rows[stage]
        self._recorder = Recorder(stage)
        self._executor = Executor(
            Channel(C10dTransport(groups, _CPU)), range(stages), recorder=self._recorder
        )
        self._program = _Program(layers, parts, data.num_tokens, is_last=stage == stages - 1)

    def prepare(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def run(self) -> None:
        self._recorder.begin()
        self._executor.run(self._row, self._program, training=True)

    def busy_s(self) -> float:
        """Return how long this rank computed in the last step."""
        return sum(event.duration_s for event in self._recorder.events() if event.is_compute)


class _Queued(nn.Module):
    """A stage whose forwards come in the micro-batches' order."""

    def __init__(self, stage: nn.Sequential, parts: Sequence[MicroBatch]) -> None:
        super().__init__()
        self.stage = stage
        self._segments = [part.segments for part in parts]
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        tell(self.stage, self._segments[self.next % len(self._segments)])
        self.next += not x.is_meta
        return self.stage(x)


class PeerSide:
    """A step of torch's 1F1B; all of its micro-batches have one shape."""

    def __init__(
        self, case: Case, layers: range, parts: Sequence[MicroBatch], data: Data, groups: MeshGroups
    ) -> None:
        stage, stages = groups.coordinate.stage, groups.mesh.num_stages
        self.module: nn.Module = (built := case.stage(layers))
        self._queued = _Queued(built, parts)
        num_tokens = data.num_tokens
        self._schedule = Schedule1F1B(
            PipelineStage(self._queued, stage, stages, _CPU, group=groups.pipeline),
            len(parts),
            loss_fn=lambda output, target: _loss(output, target, num_tokens),
            scale_grads=False,
        )
        inputs = torch.cat([part.inputs for part in parts])
        target = torch.cat([part.target for part in parts])
        self._arguments = (inputs,) if stage == 0 else ()
        self._target = target if stage == stages - 1 else None

    def prepare(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self._queued.next = 0

    def run(self) -> None:
        self._schedule.step(*self._arguments, target=self._target, return_outputs=False)
