"""Run the user's loss once, on the network's output for the whole batch.

Any loss is exact so: a mean over tokens, a contrastive loss, a metric that is no mean. The network
still runs as a pipeline; only the code around it sees the whole batch, as on one device. The price
is that no micro-batch can begin its backward before every forward has ended (GPipe's order), so
all of them are in flight.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from pipeswift_lightning.plan.microbatches import split_batch_size
from pipeswift_lightning.runtime.arrival import Arrival
from pipeswift_lightning.runtime.batching import batch_signature, num_samples, split_batch
from pipeswift_lightning.runtime.cut import Boundary, LayerCut
from pipeswift_lightning.runtime.formed import in_data_order
from pipeswift_lightning.runtime.joining import JoinedOutputs, join_outputs
from pipeswift_lightning.runtime.rng import reseeder
from pipeswift_lightning.runtime.stage_program import StageProgram
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.comparison import StepResult
from pipeswift_lightning.strategies.records import LogRecord, MergedLog, merge_records, recorded
from pipeswift_lightning.strategies.step import StepCall, loss_of, without_graph

__all__ = ["WholeBatchProgram"]

_WHOLE = 1 << 20  # in place of a micro-batch's id in random streams


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


@dataclass(slots=True)
class WholeBatchProgram(StageProgram):
    """Runs the network of one stage for each micro-batch, and the user's step once.

    Attributes:
        sizes: Rows of the network's arguments in each micro-batch; samples, as a rule.
        output: On the last stage, what the step returned for the batch.
        failure: What it raised instead, if it only looked at trimmed micro-batches.
        records: On the last stage, its calls of ``self.log``.
    """

    module: LightningModule
    cut: LayerCut
    trace: StepTrace | None
    first: int
    last: int
    call: StepCall
    sizes: tuple[int, ...] = ()
    output: Any = None
    failure: Exception | None = None
    records: list[LogRecord] = field(default_factory=list)
    _calls: list[tuple[Any, Any]] = field(default_factory=list)
    _given: list[tuple[Tensor, Arrival]] = field(default_factory=list)
    _outputs: dict[int, Any] = field(default_factory=dict)
    _joined: JoinedOutputs | None = None
    _gradients: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.sizes or self.call.sizes

    def prepare(self) -> None:
        """Run the step up to the network's call, and split the call's arguments."""
        if self.call.trim is not None:  # then each micro-batch's own step tells its arguments
            captured = [self._captured(batch) for batch in self.call.micro_batches]
            self._calls = list(map(self._detached, captured))
            return
        args, kwargs = self._captured(self.call.batch)
        arguments = self._detached((args, kwargs))
        rows = num_samples(arguments)
        if rows != sum(self.call.sizes):  # two batches joined, or each sample seen twice
            self.sizes = split_batch_size(rows, len(self.call.sizes))
        self._calls = list(split_batch(arguments, self.sizes))
        if any(leaf.shape[0] > rows for leaf in tree_flatten(arguments)[0] if _has_rows(leaf)):
            self._split_packed(arguments)

    def _captured(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step = self.call.bound(self.module, batch)
        with recorded(self.module), self.call.context():
            reseeder(self.cut.device, *self.call.seed, _WHOLE)(0, False)  # noqa: FBT003 -- a gap
            return self.cut.call.capture(
                step, step_name=self.call.hook, absent_parameters=self.first > 0
            )

    def _split_packed(self, arguments: Any) -> None:
        """Split arguments whose rows are no samples, such as the patches of all images.

        How many rows a micro-batch has of them is seen in the call that its own step makes.
        """
        own = [tree_flatten(self._captured(batch))[0] for batch in self.call.micro_batches]
        calls = [tree_flatten(call) for call in self._calls]
        for i, leaf in enumerate(tree_flatten(arguments)[0]):
            if not _has_rows(leaf) or any(len(mine) <= i or not _has_rows(mine[i]) for mine in own):
                continue
            rows = [mine[i].shape[0] for mine in own]
            if sum(rows) == leaf.shape[0]:
                parts = torch.unsafe_split_with_sizes(leaf, rows)
                for (leaves, _), part in zip(calls, parts, strict=True):
                    leaves[i] = part
        self._calls = [tree_unflatten(leaves, spec) for leaves, spec in calls]

    def _detached(self, arguments: Any) -> Any:
        """Cut the graph at the network's arguments: it is walked once, after all micro-batches."""
        leaves, spec = tree_flatten(arguments)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_meta:
                arrival = Arrival(leaf.detach())
                leaves[i] = arrival.tensor
                self._given.append((leaf, arrival))
        return tree_unflatten(leaves, spec)

    @override
    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        args, kwargs = self._calls[micro_batch]
        with recorded(self.module), self.call.context():
            result = self.cut.run(
                partial(self.cut.network, *args, **kwargs),
                step_name=self.call.hook,
                trace=self.trace,
                first=self.first,
                last=self.last,
                received=received if received is not None else (),
                reseed=reseeder(self.cut.device, *self.call.seed, micro_batch),
            )
        if isinstance(result, Boundary):
            return result.values
        self._outputs[micro_batch] = result.output
        return torch.empty(0)  # stands for the loss, which is not yet known

    @override
    def backward(self, micro_batch: int, loss: Tensor) -> None:
        if self._joined is None:
            self.finish()
        assert self._joined is not None
        tensors, gradients = self._joined.shares(micro_batch, self._gradients)
        if tensors:
            torch.autograd.backward(tensors, gradients)

    @override
    def signature(self, micro_batch: int) -> Hashable:
        shapes = batch_signature(self._calls[micro_batch])
        return (self.call.hook, "whole", self.call.trainable, shapes)

    def finish(self) -> None:
        """Run the user's step on the joined output, and differentiate its loss."""
        outputs = [self._outputs[i] for i in range(len(self.call.sizes))]
        trim = self.call.trim
        self._joined = joined = join_outputs(
            outputs if trim is None else trim.restored(outputs),
            self.sizes,
            self.cut.network_name,
            self.call.weighting.loss,
        )
        arrivals = [
            Arrival(tensor) if want else None
            for tensor, want in zip(joined.tensors, joined.wanted, strict=True)
        ]
        value = joined.fill(
            [
                self._in_order(tensor) if arrival is None else arrival.tensor
                for tensor, arrival in zip(joined.tensors, arrivals, strict=True)
            ]
        )
        output, self.records = self._inject(self.call.batch, value, _WHOLE)
        self.output = without_graph(output)
        loss = loss_of(output) if self.call.training else None
        if loss is not None:
            self.module.backward(self.call.scale(loss / self.call.loss_divisor))
        self._gradients = [a.take_gradient() if a is not None else None for a in arrivals]

    def _in_order(self, tensor: Tensor) -> Tensor:
        """Return rows in the order of the batch's samples, which trimmed micro-batches leave."""
        samples = self.call.samples
        if self.call.trim is None or samples is None or not tensor.dim():
            return tensor
        return in_data_order(tensor, samples)

    def complete(self, *, is_last: bool) -> None:
        """Do what is left once this rank's row has run."""
        if is_last and self._joined is None:
            self._finish_or_look()
        if self.call.training:
            given = [(leaf, arrival.take_gradient()) for leaf, arrival in self._given]
            used = [(leaf, gradient) for leaf, gradient in given if gradient is not None]
            if used:
                torch.autograd.backward([leaf for leaf, _ in used], [grad for _, grad in used])

    def _finish_or_look(self) -> None:
        try:
            self.finish()
        except Exception as failure:
            if self.call.trim is None or not self.call.probing:
                raise
            # Outputs may be one token shorter than rows, or numbers that depend on the width.
            self.failure = failure

    def whole(self) -> StepResult:
        """Return what the step gave for the batch (last stage)."""
        sizes = [sum(self.call.sizes)]
        return StepResult([self.output], [self.records], sizes, failure=self.failure)

    def result(self) -> tuple[Any, list[MergedLog]]:
        """Return the step's output and logs (last stage)."""
        return self.output, merge_records([self.records], [sum(self.call.sizes)])

    @torch.no_grad()
    def by_micro_batch(self) -> tuple[list[Any], list[list[LogRecord]]]:
        """Return what the step gives for each micro-batch alone, to compare (last stage)."""
        outputs, records = [], []
        for i, batch in enumerate(self.call.micro_batches):
            output, mine = self._inject(batch, without_graph(self._outputs[i]), i)
            outputs.append(without_graph(output))
            records.append(mine)
        return outputs, records

    def _inject(self, batch: Any, value: Any, stream: int) -> tuple[Any, list[LogRecord]]:
        """Run the step with the network's call returning ``value``."""
        step = self.call.bound(self.module, batch)
        reseed = reseeder(self.cut.device, *self.call.seed, stream)
        with recorded(self.module) as records, self.call.context():
            reseed(0, False)  # noqa: FBT003 -- a gap, not a layer
            output = self.cut.call.inject(
                step, value, step_name=self.call.hook, absent_parameters=self.first > 0
            )
        return output, records
