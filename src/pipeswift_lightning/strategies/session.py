"""The pipeline of one LightningModule, from the first batch until the Trainer's call ends."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from pipeswift_lightning.plan.instructions import Instruction
from pipeswift_lightning.plan.partition import Partition, explicit_partition
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.plan.timeline import Timeline
from pipeswift_lightning.runtime.batching import structure_of
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.cut import LayerCut
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.messages import Channel
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.ownership import LocalShare, Owners, ParameterTable, find_owners
from pipeswift_lightning.runtime.recorder import Recorder
from pipeswift_lightning.runtime.rng import preserved_rng
from pipeswift_lightning.runtime.stage_program import Admission
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.runtime.transport import C10dTransport
from pipeswift_lightning.runtime.watchdog import Progress
from pipeswift_lightning.strategies.assembly_times import AssemblyTimes
from pipeswift_lightning.strategies.comparison import StepResult
from pipeswift_lightning.strategies.contract import pipelined
from pipeswift_lightning.strategies.division import divided_names
from pipeswift_lightning.strategies.hugging_face import returned, without_caches
from pipeswift_lightning.strategies.layer_wrappers import LayerWrappers
from pipeswift_lightning.strategies.look import LATE, batch_facts, look_at_step, step_facts
from pipeswift_lightning.strategies.measuring import CostSource
from pipeswift_lightning.strategies.metrics import SharedMetrics
from pipeswift_lightning.strategies.module_state import evaluating, unchanged
from pipeswift_lightning.strategies.network import PipelinedNetwork, chained, find_networks
from pipeswift_lightning.strategies.one_stage import measure_one_stage, plan_one_stage
from pipeswift_lightning.strategies.optimizers import StageOptimizers
from pipeswift_lightning.strategies.options import LossScope, PipelineOptions
from pipeswift_lightning.strategies.planning import StepPlanner, plan_of
from pipeswift_lightning.strategies.recorded_plan import RecordedPlan
from pipeswift_lightning.strategies.stage_gradients import reduce_stage_gradients
from pipeswift_lightning.strategies.stage_talk import StageTalk
from pipeswift_lightning.strategies.stages import check_fits, choose_partition, fixed_partition
from pipeswift_lightning.strategies.start_planning import start_planning
from pipeswift_lightning.strategies.step import StepCall, StepProgram
from pipeswift_lightning.strategies.step_times import gather_timeline
from pipeswift_lightning.strategies.transparent import TransparentNetworks
from pipeswift_lightning.strategies.whole_batch import WholeBatchProgram

__all__ = ["PipelineSession"]


class PipelineSession:
    """Cuts the module at its first batch, then runs steps over the stages.

    The order of the layers and what flows between them is discovered from the first batch, so
    until then every rank holds the whole module; after it, only its share.

    Args:
        module: The user's module.
        network: Its pipelined network.
        groups: Process groups of the mesh; ``None`` in a single process.
        options: What the user chose.
        device: This rank's device.
        progress: Read by the watchdog.
        optimizers: Told when parameters have left this rank, or come back.
        assembly: Times what comes before the first step.
    """

    def __init__(  # noqa: PLR0913 -- each is a part of the strategy
        self,
        module: LightningModule,
        network: PipelinedNetwork,
        groups: MeshGroups,
        options: PipelineOptions,
        device: torch.device,
        progress: Progress,
        optimizers: StageOptimizers,
        assembly: AssemblyTimes,
    ) -> None:
        self.module, self.network, self.groups = module, network, groups
        self.options, self.device = options, device
        self.partition: Partition | None = None
        self.transparent: TransparentNetworks | None = None
        self._cut_share: LocalShare | None = None
        self.recorder = Recorder(groups.coordinate.stage, device)
        self.plan: Plan | None = None
        self.recorded: RecordedPlan | None = None
        self._optimizers, self.assembly, self.progress = optimizers, assembly, progress
        self._traces: dict[Hashable, StepTrace] = {}
        self._order: tuple[int, ...] = ()
        self.cut = LayerCut(
            network.module,
            network.layers,
            network_name=network.name,
            device=device,
            returned=returned,
        )
        self._wrappers = LayerWrappers(network, options)
        self._running, self._changes = False, ExitStack()
        self._metrics = SharedMetrics(module, groups, device, progress, self._computes_here)
        self.planner = StepPlanner(module, options, self.num_stages)
        self._costs = CostSource(options.costs, module, network, groups, self._laid_aside, assembly)
        self.talk = StageTalk(groups, device, progress)
        self._executor = Executor(
            Channel(C10dTransport(groups, device), dynamic_shapes=options.dynamic_shapes),
            range(groups.mesh.num_stages),
            ranks=groups.mesh.pipeline_ranks(groups.coordinate.replica),
            progress=progress,
            recorder=self.recorder,
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.groups.mesh.num_stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.groups.coordinate.stage

    def _computes_here(self) -> bool:
        """Whether a metric's value is computed here, not fetched from the last stage."""
        return self._running or self.transparent is not None

    @property
    def share(self) -> LocalShare | None:
        """What this rank holds; ``None`` while that is the whole module."""
        return self._cut_share if self.transparent is None else self.transparent.share

    @property
    def is_last(self) -> bool:
        """Whether the user's loss runs here."""
        return self.stage == self.num_stages - 1

    def open(self) -> None:
        """Intercept the network's layers."""
        self._changes.enter_context(without_caches(self.module))
        self._metrics.open()
        if self.transparent is None:
            self.network.module.__dict__.update(chained(self.network))
            self._wrappers.install()  # before the cut, which calls what it finds there
            self.cut.install()

    def make_transparent(self, networks: Sequence[PipelinedNetwork], why: str) -> None:
        """From now on let every rank run whole steps; only before the module has been cut."""
        if self.cut.is_installed:
            self._remove_cut()
        self.transparent = TransparentNetworks(
            self.module,
            networks,
            self.groups,
            self.options,
            self.device,
            self._executor,
            self._optimizers.keep_local,
        )
        self.transparent.open(why)

    def try_out(self, call: StepCall, micro_batch: Any) -> StepTrace:
        """Run a step on one micro-batch's shapes, without data."""
        with preserved_rng(self.device):
            return look_at_step(self.module, self.cut, self._metrics, call, micro_batch)

    def run(self, call: StepCall, scope: LossScope) -> StepProgram | WholeBatchProgram:
        """Run one step over the pipeline.

        Raises:
            DisagreementError: The ranks drew different batches, or made different plans.
            CutError: The step cannot be cut.
        """
        self.progress.step = (self.progress.step or 0) + (not call.probing)
        with preserved_rng(self.device):
            trace = self.look_at(call) if self.num_stages > 1 else None
            whole = scope is LossScope.WHOLE_BATCH
            assert self.partition is not None
            plan = plan_of(call, self.partition, self.options, whole=whole)
            if call.training:
                self.plan = plan
            facts = step_facts(self.module, call, plan, self._order, scope)
            agreed = self.talk.compare(facts)
            kind = WholeBatchProgram if whole else StepProgram
            program = kind(self.module, self.cut, trace, *self._range(), call)
            with self._in_step(looks=call.probing):
                self._execute(program, plan.schedule.rows[self.stage], agreed)
        return program

    @contextmanager
    def _in_step(self, *, looks: bool = False) -> Iterator[None]:
        """Say that a step runs in a block; where it only looks, leave the module as it was."""
        self._running = True
        try:
            with unchanged(self.module) if looks else nullcontext():
                yield
        finally:
            self._running = False

    @contextmanager
    def whole_step(self, hook: str, batch: Any, seeds: tuple[int, ...]) -> Iterator[None]:
        """Run a block as a step that every rank runs whole.

        Raises:
            DisagreementError: The ranks drew different batches.
        """
        assert self.transparent is not None
        self.progress.step = (self.progress.step or 0) + 1
        self.talk.compare(batch_facts(self.module, hook, batch))()
        self.recorder.begin()
        with self._in_step(), self.transparent.step(seeds):
            yield

    def _execute(
        self,
        program: StepProgram | WholeBatchProgram,
        row: Sequence[Instruction],
        agreed: Admission,
    ) -> None:
        self.recorder.begin()
        training = program.call.training
        if isinstance(program, StepProgram):
            expect = None if program.call.probing else self.talk.expect
            self._executor.run(row, program, training=training, admit=agreed, meanwhile=expect)
            return
        agreed()
        with self._metrics.untouched():
            program.prepare()
        self._executor.run(row, program, training=training)
        program.complete(is_last=self.is_last)

    def by_micro_batch(self, program: WholeBatchProgram) -> StepResult:
        """Return what the step gives for each micro-batch alone (last stage)."""
        with self._in_step(looks=True), preserved_rng(self.device), self._metrics.untouched():
            return StepResult(*program.by_micro_batch(), program.call.sizes)

    def look(self, call: StepCall, scope: LossScope) -> StepResult:
        """Run a step's forward in evaluation mode, and leave no trace (results: last stage).

        Dropout would tell the whole batch from its micro-batches, whatever their weights.
        """
        with evaluating(self.module), self._metrics.untouched() as changes:
            program = self.run(replace(call, probing=True), scope)
            metrics = changes()
        if isinstance(program, WholeBatchProgram):
            return replace(program.whole(), metrics=metrics)
        ids = range(len(call.sizes)) if self.is_last else ()
        outputs, records = [program.outputs[i] for i in ids], [program.records[i] for i in ids]
        return StepResult(outputs, records, call.sizes, metrics)

    def _range(self) -> tuple[int, int]:
        assert self.partition is not None
        layers = self.partition.ranges[self.stage]
        return layers.start, layers.stop

    # -- assembly -----------------------------------------------------------------------------

    def look_at(self, call: StepCall) -> StepTrace | None:
        """Return how the step's layers hang together; the first time, cut the module.

        ``None`` if it runs whole in this process.
        """
        if self.num_stages == 1:
            self._assemble_single(call)
            if len(call.sizes) == 1:
                return None
        first = call.micro_batches[0]
        key = (call.hook, self.module.training, structure_of(first))
        trace = self._traces.get(key)
        if trace is None:
            self.talk.compare(batch_facts(self.module, call.hook, call.batch))()
            trace = self.try_out(call, first)
            if trace.only_whole and self.options.loss is LossScope.AUTO:
                self._undo_cut()
                found = pipelined(
                    find_networks(self.module, self.options.network), self.groups.mesh
                )
                self.make_transparent(found, f"{call.hook} {trace.only_whole}")
                return trace
            if self.num_stages > 1:
                self._fit_to(trace, call)
            else:
                measure_one_stage(self.planner, self._costs, trace, call, self.device)
            self._traces[key] = trace
        return trace

    def _undo_cut(self) -> None:
        """Make the module whole again: a step of another kind than before needs it so."""
        share, self._cut_share, self.partition = self._cut_share, None, None
        if share is not None:
            if self.plan is not None and self.module.trainer.accumulate_grad_batches > 1:
                raise CutError(LATE)  # gradients may be waiting, each on its stage
            with self._optimizers.made_whole():
                share.bring_back(self.groups, self.device)

    def _fit_to(self, trace: StepTrace, call: StepCall) -> None:
        if self.partition is None:
            self._assemble(trace, call)
        else:
            assert self.share is not None
            owners, fixed = self.share.owners, self.partition
            check_fits(self.module, self.network, trace, call.hook, self._order, owners, fixed)

    def _assemble_single(self, call: StepCall) -> None:
        if self.partition is None:
            self.partition = explicit_partition(max(1, len(self.network.layers)), starts=[0])
            plan_one_stage(self.planner, self.options, call, self.partition.num_layers)
            self._wrappers.choose(range(len(self.network.layers)), 0)
            self._optimizers.keep_local()

    def _assemble(self, trace: StepTrace, call: StepCall) -> None:
        module, network, self._order = self.module, self.network, trace.order
        fixed = fixed_partition(self.options, self.recorded, trace.num_layers, self.num_stages)
        if self.options.costs is not None:
            with in_collective("planning on the first rank", self.progress):
                costs = self._costs.reader(trace, call, self.device)
                fixed = start_planning(self.planner, costs, call, trace.num_layers, fixed)
        partition = choose_partition(module, network, trace, fixed, self.num_stages)
        owners = find_owners(module, network.module, network.layers, trace, partition)
        self.repartition(partition, owners)
        table, divided = ParameterTable.of(module), divided_names(module)
        self._cut_share = share = LocalShare(module, owners, table, self.stage, divided)
        share.give_up_foreign()
        share.move_to(self.device)
        self._optimizers.keep_local()

    def repartition(self, partition: Partition, owners: Owners) -> None:
        """Run these layers from now on; what the owners own has to come. Collective over all."""
        self.partition = partition
        self.planner.repartition(partition)
        self._wrappers.choose(self._order[slice(*self._range())], self.stage)
        self._executor.forget()
        with in_collective("connecting stages that share parameters", self.progress):
            self.groups.create_shared(list(owners.shared()))

    @property
    def trace(self) -> StepTrace:
        """How the layers hang together in all kinds of steps so far."""
        return StepTrace.of_all(list(self._traces.values()))

    @contextmanager
    def _laid_aside(self) -> Iterator[None]:
        """While a block runs, intercept nothing, and keep the metrics as they are."""
        self.cut.remove()
        self._wrappers.remove()
        try:
            with self._metrics.untouched():
                yield
        finally:
            self._wrappers.install()
            self.cut.install()

    def reduce_gradients(self) -> None:
        """Sum shared parameters over their stages, and average over the replicas."""
        summed = self.transparent is not None  # each call has summed its own already
        reduce_stage_gradients(self.module, self.share, self.groups, summed=summed)

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that live on this stage."""
        if self.share is None:
            return dict(self.module.named_parameters())
        return self.share.local()

    def counted_parameters(self) -> set[int]:
        """``id`` of the parameters that this stage counts in global norms: shared ones once."""
        if self.share is None:
            return {id(p) for p in self.module.parameters()}
        return self.share.counted()

    def timeline(self) -> Timeline:
        """The last step of this rank's pipeline, a rank a stage; collective over the pipeline."""
        return gather_timeline(self.recorder.events(), self.groups)

    def hang_up(self) -> None:
        """Close the connections, after a failure: peers wait until that happens."""
        self.talk.close()
        self._executor.close()

    def close(self, *, bring_back: bool) -> None:
        """Make the module whole again (unless the peers are gone) and let go of it."""
        self._metrics.close()
        self._changes.close()
        share = self.share
        if self.transparent is not None:
            self.transparent.close()
        else:
            self._remove_cut()
        if bring_back and share is not None:
            share.bring_back(self.groups, self.device)
        self._cut_share = self.transparent = None

    def _remove_cut(self) -> None:
        self.cut.remove()
        self._wrappers.remove()
        if self.network.chain:
            self.network.module.__dict__.pop("forward", None)
