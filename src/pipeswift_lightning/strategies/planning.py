"""Plan steps from what the layers cost: the partition once, all else for each batch anew.

Every rank of a pipeline computes the same plan from the same costs and the same lengths; the ranks
compare it before they run it. What is searched is limited by numbers of evaluations, never by time.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel, Shape
from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan, make_plan
from pipeswift_lightning.plan.search import Choice, choose_plan
from pipeswift_lightning.plan.workload import Workload
from pipeswift_lightning.runtime.formed import form_batches
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.profiler import length_of
from pipeswift_lightning.strategies.batch_lengths import BatchLengths, Known
from pipeswift_lightning.strategies.options import MEASURE, PipelineOptions
from pipeswift_lightning.strategies.step import StepCall
from pipeswift_lightning.strategies.trimming import Trimming

__all__ = ["StepPlanner", "plan_of"]

_KEPT = 256  # plans, by the lengths that they are for
_EVALUATIONS = 50  # of each search for one batch: some 10 ms in all
_FIRST_EVALUATIONS = 400  # of each search for the first, over all numbers of micro-batches
_SCHEDULES = ("1f1b", "gpipe")


@dataclass(slots=True)
class _Number:
    """How many micro-batches a kind of step has, chosen for the largest batch so far."""

    micro_batches: int = 0
    samples: int = 0


class StepPlanner:
    """Chooses plans from costs.

    Args:
        module: The user's module; its hooks tell of its batches.
        options: What the user chose, which stays as it is.
        num_stages: Number of stages.

    Attributes:
        module: The user's module.
        trimming: Where padding is cut off that a micro-batch does not need.
        choice: The plan of the last training step.
        slowdown: By how much each stage is slower than the costs say; None: not known.
    """

    def __init__(self, module: LightningModule, options: PipelineOptions, num_stages: int) -> None:
        self.module, self._options, self._num_stages = module, options, num_stages
        self._model: CostModel | None = None
        self._partition: Partition | None = None
        self._training, self._evaluation = _Number(), _Number()
        auto = options.schedule == "auto"
        self._schedules: tuple[str, ...] = _SCHEDULES if auto else (options.schedule,)
        self._chosen: OrderedDict[Hashable, Candidate] = OrderedDict()
        self.trimming = Trimming(options.trim)
        self._batches = BatchLengths(module, options.buckets)
        self._cut = ""
        self.choice: Candidate | None = None
        self.slowdown: tuple[float, ...] | None = None
        self._resumed: tuple[Sequence[float] | None, str] | None = None
        self._mean: Shape | None = None
        self._ran: tuple[Sequence[Sequence[int]], tuple[int, ...] | None] = ((), None)

    @property
    def active(self) -> bool:
        """Whether there are costs to plan with."""
        return self._model is not None

    @property
    def model(self) -> CostModel | None:
        """The costs."""
        return self._model

    @property
    def measures(self) -> bool:
        """Whether plans follow from what this run measures, not from a file alone."""
        return self.active and self._options.costs == MEASURE

    @property
    def overhead_s(self) -> float:
        """What the costs of each Forward and Backward have besides its layers, in seconds."""
        return 0.0 if self._model is None else self._model.overhead_s

    def slow_down(self, slowdown: tuple[float, ...]) -> None:
        """Plan with this factor of each stage's costs from now on, all ranks from one step on."""
        self.slowdown = slowdown

    def first(self, model: CostModel, call: StepCall, partition: Partition | None) -> Choice:
        """Return the whole choice for one batch: partition, number of micro-batches and all.

        Args:
            model: The costs.
            call: A step on the batch.
            partition: The partition, if it is fixed.
        """
        self._take_up(model)
        known = self._batches.ahead(call, trims=self.trimming.applies(call.hook))
        workload = self._workload(model, call, known, partition)
        wanted = self._wanted(call)
        return choose_plan(
            workload,
            num_micro_batches=wanted,
            schedules=self._schedules,
            evaluations=_FIRST_EVALUATIONS,
        )

    def begin(
        self,
        model: CostModel,
        partition: Partition,
        *,
        number: int,
        num_samples: int,
        schedule: str,
    ) -> None:
        """Plan from now on, with what was chosen by `first` (on one rank, for all).

        Args:
            model: The costs.
            partition: Layers of each stage.
            number: Number of micro-batches,
            num_samples: for a batch of this size.
            schedule: The schedule to search first.
        """
        self._model, self._partition = model, partition
        self._take_up(model)
        self._schedules = (schedule, *(s for s in self._schedules if s != schedule))
        if not self._training.micro_batches:  # else it is a resumed run's
            self._training = _Number(number, num_samples)
        self._chosen.clear()

    def layer_costs(self) -> list[float] | None:
        """Return each layer's seconds in the last step's mean micro-batch; None without costs."""
        if self._model is None or self._mean is None:
            return None
        layers, mean = self._model.layers, self._mean
        return [layer.forward.seconds(mean) + layer.backward.seconds(mean) for layer in layers]

    def repartition(self, partition: Partition) -> None:
        """Plan for these stages from now on, if there are costs; layers have moved."""
        if self.active and partition != self._partition:
            self._partition = partition
            self._chosen.clear()

    def planned(self, call: StepCall) -> StepCall:
        """Return the step with its micro-batches as the costs choose them.

        Evaluation gains by what is cut off alone: where nothing can be, it stays as it is.
        """
        if self._model is None or self._partition is None:
            return call
        known = self._batches.of(call, trims=self.trimming.applies(call.hook))
        trimmed = known.free and (call.packed or bool(known.lengths.dims))
        if not (call.training or call.packed or trimmed):
            return call
        self._cut = self._batches.what_is_cut(known)
        choice = self._choice(call, known)
        samples, lengths = choice.formation.samples, known.lengths
        if call.training:
            self.choice = choice
            whole = Shape.packed(lengths.lengths)
            self._mean = Shape(whole.tokens / len(samples), whole.squares / len(samples))
        if self._batches.splits_itself:
            split: Any = self.module.split_batch
            parts = split(call.batch, choice.formation.sizes)
        else:
            parts = form_batches(call.source, samples, lengths if trimmed else None)
        return replace(
            call,
            micro_batches=parts,
            sizes=choice.formation.sizes,
            samples=samples,
            lengths=lengths.lengths,
            trimmed=trimmed,
            trim=known.trim(call.batch, samples) if trimmed else None,
            choice=choice,
        )

    def note(self, call: StepCall) -> None:
        """Remember of which samples a training step's micro-batches were; not the samples."""
        self._ran = call.samples or MicroBatches(call.sizes).ranges, call.lengths

    def tokens(self, batch: Any) -> tuple[int, ...] | None:
        """Return the tokens of each micro-batch of the last training step.

        Without padding if it was planned with lengths, else with it. None if its samples are no
        sequences, or none has run.

        Args:
            batch: The step's.
        """
        samples, lengths = self._ran
        if lengths is None:
            packed = isinstance(batch, PackedBatch)
            lengths = batch.lengths if packed else (length_of(batch),) * sum(map(len, samples))
        if max(lengths, default=1) == 1:
            return None
        return tuple(sum(lengths[i] for i in part) for part in samples)

    def plan_ahead(self, call: StepCall) -> None:
        """Choose for a training batch that is to come, so that its step finds its plan made.

        Not for the largest so far: it may change the number of micro-batches, and that in its turn.
        """
        fits = self._wanted(call) is not None or call.num_samples <= self._training.samples
        if self._model is not None and self._partition is not None and fits:
            trims = self.trimming.applies(call.hook)
            self._choice(call, self._batches.ahead(call, trims=trims))

    def is_checked(self, planned: StepCall) -> bool:
        """Whether a step just planned is to be compared with its micro-batches untrimmed."""
        return self.trimming.is_checked(planned, self._cut)

    def untrimmed(self, planned: StepCall) -> StepCall:
        """Return the same micro-batches with all of their padding."""
        assert planned.samples is not None
        parts = form_batches(planned.batch, planned.samples)
        return replace(planned, micro_batches=parts)

    def keep_padding(self, hook: str) -> None:
        """Trim no more in the steps of a hook: the padding matters."""
        self.trimming.keep_padding(hook)
        self._chosen.clear()

    def record(self) -> dict[str, Any]:
        """Return the plan of the last step as plain values; empty if there is none."""
        return {} if self.choice is None else self.choice.summary()

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to plan alike."""
        return {
            "trimming": self.trimming.state(),
            "padding": self._batches.state(),
            "numbers": [astuple(self._training), astuple(self._evaluation)],
            "slowdown": None if self._model is None else (self.slowdown, _digest(self._model)),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned; leave an earlier format's, and choose anew."""
        if "trimming" not in state:
            return
        self.trimming.load_state(state["trimming"])
        self._batches.load_state(state["padding"])
        self._training, self._evaluation = (_Number(*each) for each in state["numbers"])
        self._resumed = state.get("slowdown")
        if self._model is not None:
            self._take_up(self._model)

    def _take_up(self, model: CostModel) -> None:
        """Go on with a checkpoint's factors, if they are of these costs and so many stages."""
        if self._resumed is None or self._options.costs != MEASURE:
            return
        (factors, digest), self._resumed = self._resumed, None
        if factors is not None and len(factors) == self._num_stages and digest == _digest(model):
            self.slowdown = tuple(factors)

    # -- the choice ---------------------------------------------------------------------------

    def _wanted(self, call: StepCall) -> int | None:
        return None if self._options.micro_batches is None else len(call.sizes)

    def _choice(self, call: StepCall, known: Known) -> Candidate:
        """Return a batch's plan, and remember it.

        It follows from its key alone, so that ranks agree whatever each has planned ahead, and a
        resumed run with one that was not stopped (but for factors that either finds later).
        """
        model, partition = self._model, self._partition  # may move while a thread plans ahead
        assert model is not None
        assert partition is not None
        last = self._training if call.training else self._evaluation
        number = self._wanted(call)
        larger = call.num_samples > last.samples  # such as training's, after a sanity check
        if number is None and not larger:
            number = min(last.micro_batches, call.num_samples)
        key = known.key(call), partition.starts, number, self.slowdown
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = choose_plan(
                self._workload(model, call, known, partition),
                num_micro_batches=number,
                schedules=self._schedules if call.training else ("forward_only",),
                evaluations=_EVALUATIONS,
            ).chosen
            self._chosen[key] = chosen
            if len(self._chosen) > _KEPT:
                self._chosen.popitem(last=False)
        if number is None:
            last.micro_batches = len(chosen.formation.samples)
            last.samples = call.num_samples
        return chosen

    def _workload(
        self, model: CostModel, call: StepCall, known: Known, partition: Partition | None
    ) -> Workload:
        options = self._options
        limit = options.memory_limit
        return Workload(
            model=model,
            lengths=known.lengths.lengths,
            num_stages=self._num_stages,
            layout=known.layout,
            link=model.link or Link(),
            slowdown=self.slowdown,
            capacity_bytes=(limit,) * self._num_stages if isinstance(limit, float) else limit,
            sessions=known.sessions,
            reorder=known.free,
            order=options.order,
            partition=partition,
            warm_up=options.warm_up,
            sizes=call.sizes if isinstance(options.micro_batches, tuple) else None,
        )


def _digest(model: CostModel) -> str:
    return hashlib.blake2b(model.to_json().encode(), digest_size=8).hexdigest()


def plan_of(call: StepCall, partition: Partition, options: PipelineOptions, *, whole: bool) -> Plan:
    """Return what a step runs.

    Args:
        call: The step; planned, or as the options have it.
        partition: Layers of each stage.
        options: What the user chose.
        whole: Whether the loss sees the whole batch, which takes GPipe's order.
    """
    name: str = options.schedule_name
    warm_up: Sequence[int] | float | None = options.warm_up
    if call.choice is not None:
        name, warm_up = call.choice.schedule_name, call.choice.warm_up
    return make_plan(
        partition=partition,
        micro_batches=MicroBatches(call.sizes),
        schedule_name="gpipe" if whole else name,
        warm_up=None if whole else warm_up,
        training=call.training,
        receive_window=options.receive_window,
    )
