"""Call a pipelined network as if it were here: every rank makes the call, and gets its output.

The call is one node of each rank's graph. Its forward runs the pipeline's forwards on all
micro-batches and broadcasts what the last stage returns; its backward runs the backwards, and gives
every rank the gradients of the arguments. Each rank's own parameters are inputs of the node, so
autograd treats them as ever: hooks, ``torch.autograd.grad`` and frozen parameters work.
"""

import weakref
import zlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from pipeswift_lightning.plan.instructions import Instruction
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.phases import split_phases
from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.runtime.agreement import require_agreement
from pipeswift_lightning.runtime.arguments import CallArguments
from pipeswift_lightning.runtime.batching import batch_signature, describe_batch, structure_of
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.cut import Boundary, LayerCut
from pipeswift_lightning.runtime.executor import Executor, Held
from pipeswift_lightning.runtime.gradients import own_gradients, reduce_gradients, sum_gradients
from pipeswift_lightning.runtime.guard import ParameterGuard
from pipeswift_lightning.runtime.joining import JoinedOutputs, join_outputs
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.messages import Layout
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.progress import Progress
from pipeswift_lightning.runtime.recompute import is_recomputing
from pipeswift_lightning.runtime.rng import preserved_rng, reseeder
from pipeswift_lightning.runtime.sharing import OutputSharing
from pipeswift_lightning.runtime.stage_program import StageProgram
from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["CallHost", "CollectiveNetwork"]

_ANCHOR = torch.empty(0, requires_grad=True)  # makes a node's output need a gradient; gets none


class CallHost(Protocol):
    """What a network asks of its surroundings."""

    groups: MeshGroups
    device: torch.device
    executor: Executor
    progress: Progress
    dynamic_shapes: bool
    guard: ParameterGuard

    def place(self, network: "CollectiveNetwork", trace: StepTrace) -> Partition:
        """Divide the network among the stages, at its first call; alike on all ranks."""
        ...

    def plan(self, partition: Partition, sizes: Sequence[int], *, training: bool) -> Plan:
        """Return the plan of a call."""
        ...

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Return the micro-batches of a call."""
        ...

    def next_call(self) -> tuple[int, ...]:
        """Return the seeds of the next call; the last one counts calls."""
        ...

    def names(self) -> dict[int, str]:
        """Return the names of the module's parameters, by ``id``."""
        ...

    def whole(self, reason: str) -> None:
        """A call runs as one micro-batch; tell the user once."""
        ...


@dataclass(slots=True)
class _Program(StageProgram):
    """Runs one stage of a network on the micro-batches of one call."""

    network: "CollectiveNetwork"
    trace: StepTrace
    bounds: tuple[int, int]
    calls: Sequence[tuple[Any, Any]]
    seeds: tuple[int, ...]
    key: Hashable
    outputs: dict[int, Any] = field(default_factory=dict)
    joined: JoinedOutputs | None = None
    gradients: list[Tensor | None] = field(default_factory=list)

    @override
    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        args, kwargs = self.calls[micro_batch]
        cut = self.network.cut
        with self.network.unanswered():
            result = cut.run(
                partial(cut.network.forward, *args, **kwargs),
                step_name=f"the call of {cut.network_name}",
                trace=self.trace,
                first=self.bounds[0],
                last=self.bounds[1],
                received=received if received is not None else (),
                reseed=reseeder(cut.device, *self.seeds, micro_batch),
            )
        if isinstance(result, Boundary):
            return result.values
        self.outputs[micro_batch] = result.output
        return torch.empty(0)  # stands for a loss; there may be none

    def join(self, sizes: Sequence[int]) -> None:
        """Join the outputs of all micro-batches, where there are any."""
        if self.outputs:
            outputs = [self.outputs[i] for i in range(len(sizes))]
            self.joined = join_outputs(outputs, sizes, self.network.cut.network_name)
            self.outputs.clear()

    @override
    def backward(self, micro_batch: int, loss: Tensor) -> None:
        assert self.joined is not None
        tensors, gradients = self.joined.shares(micro_batch, self.gradients)
        if tensors:
            torch.autograd.backward(tensors, gradients, retain_graph=True)

    @override
    def signature(self, micro_batch: int) -> Hashable:
        return self.key, batch_signature(self.calls[micro_batch])


@dataclass(slots=True, weakref_slot=True)
class _Call:
    """What a call leaves for its backward; it lives as long as autograd's saved tensors."""

    host: CallHost
    program: _Program
    held: Held
    row: tuple[Instruction, ...]
    arguments: CallArguments
    parameters: list[nn.Parameter]
    shared: dict[dist.ProcessGroup, list[nn.Parameter]]
    token: Tensor = field(default_factory=lambda: torch.empty(0))

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backwards; returns the gradients of the arguments, then of the parameters."""
        host = self.host
        joined = self.program.joined
        if joined is not None:
            given = iter(gradients)
            self.program.gradients = [next(given) if want else None for want in joined.wanted]
        with host.guard.paused(), preserved_rng(host.device), own_gradients(self.parameters):
            host.executor.run_backward(self.row, self.program, self.held)
            self.program.gradients = []
            if self.shared:
                with in_collective("summing the gradients of shared parameters", host.progress):
                    reduce_gradients([], self.shared, None)
            own = [p.grad for p in self.parameters]
        wanted = self.arguments.wanted
        inputs = self.arguments.take_gradients()
        if wanted and host.groups.mesh.num_stages > 1:
            with in_collective("sharing the gradients of a network's arguments", host.progress):
                inputs = sum_gradients(inputs, wanted, host.groups.pipeline)
        return [*inputs, *own]


class _Pipelined(torch.autograd.Function):
    """The node of a call in each rank's graph."""

    @override
    @staticmethod
    def forward(
        ctx: Any,
        call: "weakref.ref[_Call]",
        token: Tensor,
        box: list[Tensor],
        _anchor: Tensor,
        *_inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.call = call
        outputs = tuple(box)
        box.clear()
        return outputs

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            msg = (
                "a gradient through a pipelined network is itself differentiated "
                "(create_graph=True, as for a gradient penalty). Rule: a pipeline's backward runs "
                "once more, but has no backward of its own. Remedy: leave this network whole on "
                "each rank, by naming the others in PipeSwiftStrategy(network=[...]), or use "
                'strategy="ddp" for this module'
            )
            raise CutError(msg)
        ctx.saved_tensors  # noqa: B018 -- raises autograd's own error if they have been freed
        call = ctx.call()
        return (None, None, None, None, *call.backward(gradients))


class CollectiveNetwork:
    """One network, each call of which is a collective of the ranks of a pipeline.

    Args:
        cut: Intercepts the network and its layers.
        host: Its surroundings.
    """

    def __init__(self, cut: LayerCut, host: CallHost) -> None:
        self.cut = cut
        self.partition: Partition | None = None
        self.parameters: list[nn.Parameter] = []
        self.shared: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        self._host = host
        self._traces: dict[Hashable, tuple[StepTrace, bool]] = {}
        self._outputs = OutputSharing(cut.network_name, host.groups, host.device, host.progress)
        self._order: tuple[int, ...] = ()

    def install(self) -> None:
        """Answer the network's calls."""
        self.cut.install()
        self.cut.call.answer = self._answer

    def remove(self) -> None:
        """Let the network answer by itself again."""
        self.cut.call.answer = None
        self.cut.remove()

    def begin(self) -> None:
        """Begin a step of several calls."""
        self._outputs.begin(anew=self._host.dynamic_shapes)

    @contextmanager
    def unanswered(self) -> Iterator[None]:
        """Let calls through to the network's own forward."""
        self.cut.call.answer = None
        try:
            yield
        finally:
            self.cut.call.answer = self._answer

    # -- one call -----------------------------------------------------------------------------

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if is_recomputing():
            msg = (
                f"{self.cut.network_name} is called within torch.utils.checkpoint, which would "
                "call it again during the backward. Rule: a pipelined network is called by the "
                "step itself. Remedy: checkpoint its layers, inside of it"
            )
            raise CutError(msg)
        with self._host.guard.paused(), preserved_rng(self._host.device):
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        host, training = self._host, torch.is_grad_enabled()
        arguments = CallArguments((args, kwargs), self.cut.network_name, training=training)
        seeds = host.next_call()
        trace, joinable = self._trace(arguments, seeds)
        assert self.partition is not None
        sizes = self._sizes(arguments, joinable=joinable)
        plan = host.plan(self.partition, sizes, training=training)
        key = self._key(arguments, plan, seeds[-1])
        calls = arguments.split(sizes)
        stage = host.groups.coordinate.stage
        layers = self.partition.ranges[stage]
        program = _Program(self, trace, (layers.start, layers.stop), calls, seeds, key)
        row = plan.schedule.rows[stage]
        forward, backward = split_phases(row) if training else (row, ())
        held = None
        if training:
            held = host.executor.run_forward(forward, program)
        else:
            host.executor.run(row, program, training=False, begin=False)
        program.join(sizes)
        kind = key, training, tuple(program.signature(i) for i in range(len(sizes)))
        layout, tensors = self._outputs.share(program.joined, kind)
        if held is not None and layout.gradients:
            used = [p for p in self.parameters if p.requires_grad]
            shared = {g: [p for p in ps if p.requires_grad] for g, ps in self.shared.items()}
            call = _Call(host, program, held, backward, arguments, used, shared)
            _connect(tensors, layout, call)
        return layout.fill(tensors)

    def _sizes(self, arguments: CallArguments, *, joinable: bool) -> tuple[int, ...]:
        """Return the micro-batches: one, if what comes back could not be joined."""
        name, rows = self.cut.network_name, arguments.num_samples
        if rows is None:
            self._host.whole(f"{name} is called without a tensor that has a row a sample")
            return (1,)
        if not joinable:
            self._host.whole(f"{name} returns values without a row a sample, such as a scalar")
            return (rows,)
        return self._host.sizes(rows)

    def _key(self, arguments: CallArguments, plan: Plan, number: int) -> Hashable:
        """Agree with the other stages on the call; return what determines layouts."""
        host, kind = self._host, self._host.device.type
        autocast = torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind))
        key = (
            self.cut.network_name,
            self.cut.network.training,
            arguments.flags,
            autocast,
            number if host.dynamic_shapes else None,
        )
        facts = {
            "call of": f"{self.cut.network_name}, number {number}",
            "its arguments": describe_batch(arguments.value),
            "with gradients": f"{torch.is_grad_enabled()} {arguments.flags}",
            "mode": f"training={key[1]}, autocast={autocast}",
            "plan": plan.digest,
            "layers": str(self._order),
        }
        trainable = zlib.crc32(bytes(p.requires_grad for p in self.parameters))
        if host.groups.mesh.num_stages == 1:
            return key, (trainable,)
        what = f"comparing a call of {self.cut.network_name} with the other stages"
        with in_collective(what, host.progress):
            # Which parameters are frozen is known where they are: optimizers are toggled there.
            every = require_agreement(facts, host.groups.pipeline, host.device, remark=trainable)
        return key, every

    # -- the first call of a kind -------------------------------------------------------------

    def _trace(self, arguments: CallArguments, seeds: tuple[int, ...]) -> tuple[StepTrace, bool]:
        """Return how the layers hang together, and whether outputs have a row a sample."""
        args, kwargs = arguments.value
        kind = (self.cut.network.training, structure_of((args, kwargs)))
        known = self._traces.get(kind)
        if known is not None:
            return known
        step = partial(self.cut.network.forward, *args, **kwargs)
        reseeder(self.cut.device, *seeds)(0, False)  # noqa: FBT003 -- a gap, not a layer
        with self.unanswered(), torch.no_grad():
            trace = self.cut.discover(step, step_name="the step", names=self._host.names())
        if self.partition is None:
            self._order = trace.order
            self.partition = self._host.place(self, trace)
        elif trace.order != self._order:
            msg = (
                f"{self.cut.network_name} calls its layers in the order {trace.order}, but the "
                f"stages were cut for the order {self._order}. Rule: all calls run the same "
                "layers in the same order. Remedy: return coarser layers from "
                "configure_pipeline()"
            )
            raise CutError(msg)
        result = self._traces[kind] = trace, trace.returned_rows <= {arguments.num_samples}
        return result


def _connect(tensors: list[Tensor], layout: Layout, call: _Call) -> None:
    """Put those of the output that need a gradient behind the call's node in this rank's graph."""
    places = [i for i, spec in enumerate(layout.tensors) if spec.requires_grad]
    token, reference = call.token, weakref.ref(call)
    box = [tensors[i] for i in places]
    inputs = [*call.arguments.wanted, *call.parameters]
    # Autograd frees what it saved when no further backward can come, and with it the call.
    hooks = torch.autograd.graph.saved_tensors_hooks(_Keep(call), _token_of)
    with hooks:
        outputs = _Pipelined.apply(reference, token, box, _ANCHOR, *inputs)  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, outputs, strict=True):
        tensors[place] = tensor


class _Keep:
    """A pack hook that saves the call itself in the token's place, and does not keep it."""

    def __init__(self, call: _Call) -> None:
        self._call: _Call | None = call

    def __call__(self, _token: Tensor) -> _Call | None:
        call, self._call = self._call, None
        return call


def _token_of(call: _Call) -> Tensor:
    return call.token
