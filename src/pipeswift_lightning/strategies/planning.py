"""Plan steps from what the layers cost: the partition once, all else for each batch anew.

Every rank of a pipeline computes the same plan from the same costs and the same lengths; the ranks
compare it before they run it. What is searched is limited by numbers of evaluations, never by time.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel, Shape
from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan, make_plan
from pipeswift_lightning.plan.search import Choice, choose_plan
from pipeswift_lightning.plan.workload import Layout, Workload
from pipeswift_lightning.runtime.batching import tensors_by_path
from pipeswift_lightning.runtime.formed import form_batches
from pipeswift_lightning.runtime.lengths import (
    SampleLengths,
    find_lengths,
    told_lengths,
    told_sessions,
)
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.padding import PaddingSeen
from pipeswift_lightning.runtime.profiler import length_of
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["StepPlanner", "plan_of"]

_KEPT = 256  # plans, by the lengths that they are for
_EVALUATIONS = 200  # of each search for one batch: some 10 ms in all
_SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a batch's samples.

    Attributes:
        lengths: Their lengths, and what may be trimmed.
        layout: How those of a micro-batch lie in memory.
        free: Whether any samples may form a micro-batch.
        sessions: Of each sample, if its module tells.
    """

    lengths: SampleLengths
    layout: Layout
    free: bool
    sessions: tuple[Hashable, ...] | None


class StepPlanner:
    """Chooses plans from costs.

    Args:
        module: The user's module; its hooks tell of its batches.
        options: What the user chose, which stays as it is.
        num_stages: Number of stages.

    Attributes:
        module: The user's module.
        trims: Whether padding may be cut off that a micro-batch does not need; a check may have
            found that it changes what the step gives.
        choice: The plan of the last step that was planned.
    """

    def __init__(self, module: LightningModule, options: PipelineOptions, num_stages: int) -> None:
        self.module, self._options, self._num_stages = module, options, num_stages
        self._model: CostModel | None = None
        self._partition: Partition | None = None
        self._number, self._largest = 0, 0
        auto = options.schedule == "auto"
        self._schedules: tuple[str, ...] = _SCHEDULES if auto else (options.schedule,)
        self._chosen: OrderedDict[Hashable, Candidate] = OrderedDict()
        self.trims = options.trim is not False
        self.checks = 0
        self._padding = PaddingSeen()  # of this pipeline's batches: all its ranks see the same
        self._looked: set[str] = set()  # what was cut off when checks have compared
        self._cut = ""
        self.choice: Candidate | None = None
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

    def first(self, model: CostModel, call: StepCall, partition: Partition | None) -> Choice:
        """Return the whole choice for one batch: partition, number of micro-batches and all.

        Args:
            model: The costs.
            call: A step on the batch.
            partition: The partition, if it is fixed.
        """
        workload = self._workload(model, call, self._known_first(call), partition)
        wanted = self._wanted(call)
        return choose_plan(workload, num_micro_batches=wanted, schedules=self._schedules)

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
        self._schedules = (schedule, *(s for s in self._schedules if s != schedule))
        if not self._number:  # else it is a resumed run's
            self._number, self._largest = number, num_samples
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
        """Return the step with its micro-batches as the costs choose them."""
        if self._model is None or self._partition is None:
            return call
        known = self._known(call, self._padding)
        dims = sorted(known.lengths.dims.items())
        self._cut = str([(path, which, self._padding.value(path)) for path, which in dims])
        key = (known.lengths.lengths, known.layout, known.free, known.sessions, call.sizes)
        choice = self._chosen.get(key)
        if choice is None:
            choice = self._choose(self._model, call, known, self._partition)
            self._chosen[key] = choice
            if len(self._chosen) > _KEPT:
                self._chosen.popitem(last=False)
        self.choice = choice
        samples = choice.formation.samples
        whole = Shape.packed(known.lengths.lengths)
        self._mean = Shape(whole.tokens / len(samples), whole.squares / len(samples))
        trimmed = known.free and (call.packed or bool(known.lengths.dims))
        if self._splits_itself:
            split: Any = self.module.split_batch
            parts = split(call.batch, choice.formation.sizes)
        elif trimmed:
            parts = form_batches(call.source, samples, known.lengths)
        else:
            parts = form_batches(call.batch, samples)
        return replace(
            call,
            micro_batches=parts,
            sizes=choice.formation.sizes,
            samples=samples,
            lengths=known.lengths.lengths,
            trimmed=trimmed,
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

    def is_checked(self, planned: StepCall) -> bool:
        """Whether a step's trimmed micro-batches are to be compared with untrimmed ones.

        They are when what is cut off is new, a tensor or its padding, and now and then. Packed ones
        are not: that the loss may see micro-batches has been found with them.
        """
        if self._options.trim != "auto" or planned.packed or not _is_cut(planned):
            return False
        new = self._cut not in self._looked
        self._looked.add(self._cut)
        count, self.checks = self.checks, self.checks + 1
        return new or count & (count - 1) == 0

    def untrimmed(self, planned: StepCall) -> StepCall:
        """Return the same micro-batches with all of their padding."""
        assert planned.samples is not None
        parts = form_batches(planned.batch, planned.samples)
        return replace(planned, micro_batches=parts)

    def keep_padding(self) -> None:
        """Trim no more: the padding matters."""
        self.trims = False
        self._chosen.clear()

    def record(self) -> dict[str, Any]:
        """Return the plan of the last step as plain values; empty if there is none."""
        return {} if self.choice is None else self.choice.summary()

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to plan alike."""
        return {
            "trims": self.trims,
            "checks": self.checks,
            "padding": self._padding.state(),
            "looked": sorted(self._looked),
            "number": self._number,
            "largest": self._largest,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""
        self.trims = self.trims and state["trims"]
        self.checks = state["checks"]
        self._padding.load_state(state.get("padding", {}))
        self._looked = set(state.get("looked", ()))
        self._number, self._largest = state["number"], state["largest"]

    # -- what is known of a batch -------------------------------------------------------------

    @property
    def _splits_itself(self) -> bool:
        return callable(getattr(self.module, "split_batch", None))

    def _known_first(self, call: StepCall) -> _Known:
        # Other ranks do not look at this batch, so it must not be remembered.
        padding = self._padding.copy()
        try:
            return self._known(call, padding)
        except Exception as error:
            if call.training:
                raise
            # A sanity check's batch may lack what the module's hooks read in training batches.
            rank_zero_info(
                f"pipeswift: what {type(self.module).__name__} tells of its batches does not fit "
                f"the first, of {call.hook} ({error!r}): it is planned by its width."
            )
        packed = isinstance(call.source, PackedBatch)
        lengths = SampleLengths(call.source.lengths, {}) if packed else _equal_lengths(call)
        return _Known(lengths, _layout(call), packed, None)

    def _known(self, call: StepCall, padding: PaddingSeen) -> _Known:
        lengths = self._lengths(call, padding)
        free = lengths is not None and not self._splits_itself
        lengths = lengths or _equal_lengths(call)
        hook = getattr(self.module, "sample_sessions", None)
        sessions = told_sessions(hook(call.batch), call.num_samples) if callable(hook) else None
        return _Known(lengths, _layout(call), free, sessions)

    def _lengths(self, call: StepCall, padding: PaddingSeen) -> SampleLengths | None:
        if isinstance(call.source, PackedBatch):
            return SampleLengths(call.source.lengths, {})
        if not self.trims:
            return None
        hook = getattr(self.module, "sample_lengths", None)
        if callable(hook):
            return told_lengths(
                call.batch, hook(call.batch), getattr(self.module, "length_dims", {})
            )
        return find_lengths(call.batch, padding)

    # -- the choice ---------------------------------------------------------------------------

    def _wanted(self, call: StepCall) -> int | None:
        return None if self._options.micro_batches is None else len(call.sizes)

    def _choose(
        self, model: CostModel, call: StepCall, known: _Known, partition: Partition
    ) -> Candidate:
        number = self._wanted(call)
        larger = call.num_samples > self._largest  # such as training's, after a sanity check
        if number is None and not larger:
            number = min(self._number, call.num_samples)
        choice = choose_plan(
            self._workload(model, call, known, partition),
            num_micro_batches=number,
            schedules=self._schedules,
            evaluations=_EVALUATIONS,
        )
        if number is None:
            self._number, self._largest = len(choice.chosen.formation.samples), call.num_samples
        return choice.chosen

    def _workload(
        self, model: CostModel, call: StepCall, known: _Known, partition: Partition | None
    ) -> Workload:
        options = self._options
        limit = options.memory_limit
        return Workload(
            model=model,
            lengths=known.lengths.lengths,
            num_stages=self._num_stages,
            layout=known.layout,
            link=model.link or Link(),
            capacity_bytes=(limit,) * self._num_stages if isinstance(limit, float) else limit,
            sessions=known.sessions,
            reorder=known.free,
            partition=partition,
            warm_up=options.warm_up,
            sizes=call.sizes if isinstance(options.micro_batches, tuple) else None,
        )


def _layout(call: StepCall) -> Layout:
    return Layout.PACKED if call.packed else Layout.PADDED


def _equal_lengths(call: StepCall) -> SampleLengths:
    """Return the lengths of a batch's samples as if they were all as long as it is wide."""
    return SampleLengths((max(1, length_of(call.batch)),) * call.num_samples, {})


def _is_cut(planned: StepCall) -> bool:
    """Whether a micro-batch lacks padding that the batch has."""
    whole = dict(tensors_by_path(planned.batch))
    return planned.trimmed and any(
        tensor.shape[1:] != whole[path].shape[1:]
        for part in planned.micro_batches
        for path, tensor in tensors_by_path(part)
    )


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
