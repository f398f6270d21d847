"""Every rank runs the user's whole step, and only the networks' calls are pipelines.

What a step may do on one device it may do here: call a network several times or under
``torch.no_grad()``, optimise by hand, and use what the network returns in any way. The price is
GPipe's order with all micro-batches in flight, and a broadcast of each output.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from pipeswift_lightning.plan.microbatches import MicroBatches
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.planner import Plan, make_plan
from pipeswift_lightning.runtime.collective_call import CollectiveNetwork
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.cut import LayerCut
from pipeswift_lightning.runtime.executor import Executor
from pipeswift_lightning.runtime.guard import ParameterGuard
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.ownership import LocalShare, Owners, ParameterTable, find_owners
from pipeswift_lightning.runtime.rng import preserved_rng, reseeder
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.hugging_face import returned
from pipeswift_lightning.strategies.layer_wrappers import LayerWrappers
from pipeswift_lightning.strategies.network import PipelinedNetwork, chained
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.stages import choose_partition, fixed_partition

__all__ = ["TransparentNetworks"]

_STEP = 1 << 20  # in place of a call's number in random streams
_OUTSIDE = (1 << 21,)  # in place of a step's seeds


class TransparentNetworks:
    """The pipelined networks of a module; what is outside of them is whole on every rank.

    A network is divided at its first call. One whose layers are called by themselves before that,
    or that is never called, stays whole on every rank.

    Args:
        module: The user's module.
        networks: Its networks that have a layer for each stage.
        groups: Process groups of the mesh.
        options: What the user chose.
        device: This rank's device.
        executor: Runs the rows of all calls.
        on_assembled: Called whenever a network has been divided.
    """

    def __init__(
        self,
        module: LightningModule,
        networks: Sequence[PipelinedNetwork],
        groups: MeshGroups,
        options: PipelineOptions,
        device: torch.device,
        executor: Executor,
        on_assembled: Callable[[], None],
    ) -> None:
        self.module = module
        self.groups = groups
        self.device = device
        self.executor = executor
        self.progress = executor.progress
        self.dynamic_shapes = options.dynamic_shapes
        self.guard = ParameterGuard()
        self.share: LocalShare | None = None
        self._options = options
        self._on_assembled = on_assembled
        self._networks: dict[CollectiveNetwork, PipelinedNetwork] = {}
        self._wrappers: dict[CollectiveNetwork, LayerWrappers] = {}
        self._seeds: tuple[int, ...] = _OUTSIDE
        self._calls = 0
        self._warned = False
        if groups.mesh.num_stages > 1:
            for network in networks:
                self._add(network)

    def _add(self, network: PipelinedNetwork) -> None:
        cut = LayerCut(
            network.module,
            network.layers,
            network_name=network.name,
            device=self.device,
            returned=returned,
        )
        collective = CollectiveNetwork(cut, self)
        self._networks[collective] = network
        self._wrappers[collective] = LayerWrappers(network, self._options)

    def open(self, why: str) -> None:
        """Answer the networks' calls from now on; ``why`` tells the user the reason."""
        table = ParameterTable.of(self.module)
        num_stages = self.groups.mesh.num_stages
        if num_stages > 1:
            owners = Owners.everywhere(table, num_stages)
            stage = self.groups.coordinate.stage
            self.share = LocalShare(self.module, owners, table, stage)
        pipelined: set[int] = set()
        for collective, network in self._networks.items():
            pipelined |= {id(p) for p in network.parameters()}
            network.module.__dict__.update(chained(network))
            self._wrappers[collective].install()
            collective.install()
            collective.cut.on_outside = lambda c=collective: self._leave_whole(c)
        for parameter in self.module.parameters():
            if id(parameter) not in pipelined:
                parameter.data = parameter.data.to(self.device)
        self._watch()
        if self._options.costs is not None:
            rank_zero_warn("pipeswift: costs= plans no steps that every rank runs whole; unused.")
        names = ", ".join(network.name for network in self._networks.values()) or "nothing"
        rank_zero_info(
            f"pipeswift: every rank runs the whole step (transparent mode), since {why}. "
            f"Pipelined: {names}; the rest is replicated. Exact, in GPipe's order, with all "
            "micro-batches in flight."
        )

    def close(self) -> None:
        """Let the networks answer by themselves again."""
        for collective, network in reversed(self._networks.items()):
            collective.remove()
            self._wrappers[collective].remove()
            if network.chain:
                network.module.__dict__.pop("forward", None)
        self._networks.clear()

    @contextmanager
    def step(self, seeds: tuple[int, ...]) -> Iterator[None]:
        """Run a block as one step: with random streams of its own, the same on every rank."""
        self._seeds, self._calls = seeds, 0
        self.executor.begin()
        for collective in self._networks:
            collective.begin()
        try:
            with preserved_rng(self.device):
                reseeder(self.device, *seeds, _STEP)(0, False)  # noqa: FBT003 -- a gap
                with self.guard:
                    yield
        finally:
            self._seeds = _OUTSIDE

    # -- for the calls ------------------------------------------------------------------------

    def next_call(self) -> tuple[int, ...]:
        """Return the seeds of the next call; calls outside steps are counted on."""
        self._calls += 1
        return (*self._seeds, self._calls)

    def names(self) -> dict[int, str]:
        """Return the names of the module's parameters, by ``id``."""
        return dict(ParameterTable.of(self.module).names)

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Return the micro-batches of a call with ``num_samples`` rows."""
        return self._options.call_sizes(num_samples, self.groups.mesh.num_stages).sizes

    def plan(self, partition: Partition, sizes: Sequence[int], *, training: bool) -> Plan:
        """Return the plan of a call."""
        return make_plan(
            partition=partition,
            micro_batches=MicroBatches(tuple(sizes)),
            schedule_name="gpipe",
            training=training,
            receive_window=self._options.receive_window,
        )

    def whole(self, reason: str) -> None:
        """A call runs as one micro-batch; tell the user once."""
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"pipeswift: {reason}, so each such call runs as one micro-batch: exact, but the "
                "stages wait for one another."
            )

    # -- who has what -------------------------------------------------------------------------

    def place(self, collective: CollectiveNetwork, trace: StepTrace) -> Partition:
        """Divide a network among the stages."""
        assert self.share is not None
        network = self._networks[collective]
        options, wanted = self._options, self._options.partition
        if wanted is not None and sum(wanted) != trace.num_layers and len(self._networks) > 1:
            options = replace(options, partition=None)  # it is another network's
        num_stages = self.groups.mesh.num_stages
        fixed = fixed_partition(options, None, trace.num_layers, num_stages)
        partition = choose_partition(self.module, network, trace, fixed, num_stages)
        stage = self.groups.coordinate.stage
        layers = partition.ranges[stage]
        own_layers = trace.order[layers.start : layers.stop]
        self._wrappers[collective].choose(own_layers, stage)
        found = find_owners(self.module, network.module, network.layers, trace, partition)
        own = self._own_names(network, trace)
        self._check_apart(network, own)
        before = self.share.owners
        prefixes = [n for n, m in self.module.named_modules() if m in self._modules(network)]
        self.share.owners = replace(
            before,
            parameters={**before.parameters, **{name: found.parameters[name] for name in own}},
            buffers={**before.buffers, **_within(found.buffers, prefixes)},
            replicated=before.replicated - own,
        )
        with in_collective("connecting stages that share parameters", self.progress):
            self.groups.create_shared(list(self.share.owners.shared()))
        self.share.give_up_foreign()
        self.share.move_to(self.device)
        self._watch()
        local = self.share.local()
        collective.parameters = [p for name, p in local.items() if name in own]
        mine = set(map(id, collective.parameters))
        collective.shared = {
            group: shared
            for group, parameters in self.share.shared_groups(self.groups).items()
            if (shared := [p for p in parameters if id(p) in mine])
        }
        self._on_assembled()
        return partition

    @staticmethod
    def _modules(network: PipelinedNetwork) -> set[nn.Module]:
        return {m for root in (network.module, *network.layers) for m in root.modules()}

    def _own_names(self, network: PipelinedNetwork, trace: StepTrace) -> frozenset[str]:
        assert self.share is not None
        names = self.share.table.names
        inside = {names[id(p)] for p in network.parameters()}
        return frozenset(inside | set(trace.parameter_gaps))

    def _check_apart(self, network: PipelinedNetwork, own: frozenset[str]) -> None:
        assert self.share is not None
        twice = sorted(own - self.share.owners.replicated)
        if twice:
            msg = (
                f"{network.name} shares the parameter {twice[0]} with another pipelined network. "
                "Rule: a parameter belongs to one network. Remedy: name one of the two, as in "
                f'PipeSwiftStrategy(network="{network.name.removeprefix("self.")}"); the other '
                "is replicated if they share nothing then, else let one network hold both"
            )
            raise CutError(msg)

    def _watch(self) -> None:
        names = self.names()
        inside = (p for network in self._networks.values() for p in network.parameters())
        self.guard.watch({id(p): names[id(p)] for p in inside})

    def _leave_whole(self, collective: CollectiveNetwork) -> None:
        """A layer is called by itself: before its network is divided, that keeps it whole."""
        if collective.partition is None:
            network = self._networks.pop(collective)
            collective.remove()
            self._wrappers[collective].remove()
            for parameter in network.parameters():
                parameter.data = parameter.data.to(self.device)
            self._watch()
            rank_zero_warn(
                f"pipeswift: the step calls layers of {network.name} by themselves, so it stays "
                "whole on every rank. Name the parts that the step calls, as in "
                'PipeSwiftStrategy(network=["model.encoder", "model.decoder"]), to pipeline them.'
            )


def _within(buffers: Mapping[str, int], prefixes: Sequence[str]) -> dict[str, int]:
    inside = set(prefixes)
    return {name: stage for name, stage in buffers.items() if name.rpartition(".")[0] in inside}
