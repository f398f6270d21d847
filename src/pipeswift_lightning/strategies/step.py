"""The user's step as a stage program: what the executor runs for each micro-batch."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.runtime.batching import batch_signature, fresh_containers
from pipeswift_lightning.runtime.cut import Boundary, LayerCut
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.restoring import Trim
from pipeswift_lightning.runtime.rng import Reseed, reseeders
from pipeswift_lightning.runtime.stage_program import StageProgram
from pipeswift_lightning.runtime.structure import mapped
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.loss_weights import Weighting
from pipeswift_lightning.strategies.records import (
    LogRecord,
    MergedLog,
    merge_outputs,
    merge_records,
    recorded,
)

__all__ = ["StepCall", "StepProgram", "loss_of", "without_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of a step hook on one batch, split into micro-batches.

    Attributes:
        hook: ``"training_step"``, ``"validation_step"`` and so on.
        batch: The whole batch.
        micro_batches: The micro-batches.
        rest: The hook's arguments after the batch.
        sizes: Samples of each micro-batch.
        seed: Seeds of the step's random streams.
        loss_divisor: Divides the loss before its backward (``accumulate_grad_batches``).
        context: The precision plugin's context for the hook.
        scale: Multiplies the loss before its backward (fp16's gradient scaler).
        trainable: Tells apart which parameters are frozen: it decides what needs a gradient.
        weighting: What each micro-batch counts for the loss and the logged values.
        probing: Whether the step only looks, and is not differentiated.
        source: What the micro-batches are made of: the batch, or a packed one.
        samples: Sample ids of each micro-batch; ``None``: consecutive runs.
        lengths: Tokens of each sample, as it was planned with; ``None``: it was not planned.
        trimmed: Whether micro-batches may lack padding that the batch has.
        trim: How much of it, where that is one number a micro-batch.
        choice: The plan that the costs have chosen; ``None``: the options' own.
    """

    hook: str
    batch: Any
    micro_batches: Sequence[Any]
    rest: tuple[Any, ...]
    sizes: tuple[int, ...]
    seed: tuple[int, ...]
    loss_divisor: int
    context: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    trainable: int = 0
    weighting: Weighting = field(default_factory=Weighting)
    probing: bool = False
    source: Any = None
    samples: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None
    trimmed: bool = False
    trim: Trim | None = None
    choice: Candidate | None = None

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return sum(self.sizes)

    @property
    def packed(self) -> bool:
        """Whether samples lie one behind the other, so that a tensor's rows are no samples."""
        return isinstance(self.source, PackedBatch)

    def bound(self, module: LightningModule, batch: Any) -> Callable[[], Any]:
        """Return the step on ``batch`` (the whole one, or a micro-batch), ready to run once."""
        return partial(getattr(module, self.hook), fresh_containers(batch), *self.rest)

    def in_one(self) -> "StepCall":
        """Return the same call with the whole batch as its only micro-batch."""
        return replace(
            self,
            micro_batches=[self.batch],
            sizes=(self.num_samples,),
            weighting=Weighting(),
            samples=None,
            lengths=None,
            trimmed=False,
            trim=None,
            choice=None,
        )

    @property
    def training(self) -> bool:
        """Whether the step is differentiated."""
        return self.hook == "training_step" and not self.probing

    def loss_weight(self, micro_batch: int) -> float:
        """The share of one micro-batch in the loss."""
        given = self.weighting.loss
        return given[micro_batch] if given else self.sizes[micro_batch] / sum(self.sizes)


@dataclass(slots=True)
class StepProgram(StageProgram):
    """Runs the layers of one stage within the user's step.

    Attributes:
        outputs: On the last stage, what the step returned for each micro-batch, by id.
        records: On the last stage, its calls of ``self.log``.
    """

    module: LightningModule
    cut: LayerCut
    trace: StepTrace | None
    first: int
    last: int
    call: StepCall
    outputs: dict[int, Any] = field(default_factory=dict)
    records: dict[int, list[LogRecord]] = field(default_factory=dict)
    _signatures: dict[int, Hashable] = field(default_factory=dict)
    _reseeders: Callable[[int], Reseed] = field(init=False)

    def __post_init__(self) -> None:
        self._reseeders = reseeders(self.cut.device, *self.call.seed)

    @override
    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        call = self.call
        step = call.bound(self.module, call.micro_batches[micro_batch])
        with recorded(self.module) as records, call.context():
            result = self.cut.run(
                step,
                step_name=call.hook,
                trace=self.trace,
                first=self.first,
                last=self.last,
                received=received if received is not None else (),
                reseed=self._reseeders(micro_batch),
            )
        if isinstance(result, Boundary):
            return result.values
        self.outputs[micro_batch] = without_graph(result.output)
        self.records[micro_batch] = records
        return self._loss(result.output, micro_batch) if call.training else None

    def _loss(self, output: Any, micro_batch: int) -> Tensor | None:
        loss, weight = loss_of(output), self.call.loss_weight(micro_batch)
        if loss is None or weight == 0:  # a mean over no tokens is nan, and nan * 0 too
            return None
        return self.call.scale(loss * (weight / self.call.loss_divisor))

    @override
    def backward(self, micro_batch: int, loss: Tensor) -> None:
        self.module.backward(loss)

    def result(self) -> tuple[Any, list[MergedLog]]:
        """Return the step's output and logs for the whole batch (last stage)."""
        ids = range(len(self.call.sizes))
        outputs = [self.outputs[i] for i in ids]
        weighting, sizes = self.call.weighting, self.call.sizes
        logs = merge_records([self.records[i] for i in ids], sizes, weighting.of_log)
        skipped = [output is None for output in outputs]
        if any(skipped) and not all(skipped) and self.call.training:
            msg = (
                f"{self.call.hook} returned None for micro-batches "
                f"{[i for i, s in enumerate(skipped) if s]} of {len(skipped)}. Rule: a step is "
                "skipped for a whole batch or not at all. Remedy: return a zero loss instead "
                "(0 * output.sum())"
            )
            raise RuntimeError(msg)
        if any(skipped):
            return None, logs
        return merge_outputs(outputs, sizes, weighting.loss, self.call.samples), logs

    @override
    def signature(self, micro_batch: int) -> Hashable:
        known = self._signatures.get(micro_batch)
        if known is None:
            shapes = batch_signature(self.call.micro_batches[micro_batch])
            known = (self.call.hook, self.call.trainable, shapes)
            self._signatures[micro_batch] = known
        return known


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what ``training_step`` returned; ``None`` if it skips the batch.

    Raises:
        TypeError: It is no tensor of one element.
        RuntimeError: It depends on a value of another stage.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        msg = (
            f"training_step returned {type(output).__name__}. Rule: it returns the loss as a "
            "tensor of one element, a dict with the key 'loss', or None. Remedy: return "
            "loss.mean(), say, or {'loss': loss}"
        )
        raise TypeError(msg)
    if loss.is_meta:
        msg = (
            "the loss depends on a value that an earlier stage computes and no layer passes on. "
            "Rule: what crosses a cut is an argument or an output of a layer. Remedy: compute it "
            "from the network's output or from the batch, or name the layers in "
            "configure_pipeline()"
        )
        raise RuntimeError(msg)
    return loss


def without_graph(output: Any) -> Any:
    """Return ``output`` with its tensors detached."""
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
