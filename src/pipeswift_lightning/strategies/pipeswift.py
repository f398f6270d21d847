"""``Trainer(strategy="pipeswift")``: Lightning's hooks, turned into runtime calls."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.plan.timeline import Timeline
from pipeswift_lightning.runtime.communication import CommunicationError, communicating
from pipeswift_lightning.runtime.gradients import broadcast_tensors
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.strategies.checkpoint import (
    gather_module_state,
    gather_optimizer_state,
)
from pipeswift_lightning.strategies.contract import check_module, check_optimizers
from pipeswift_lightning.strategies.hooks import StepHook, StepRunner
from pipeswift_lightning.strategies.launcher import PipelineLauncher
from pipeswift_lightning.strategies.network import find_network
from pipeswift_lightning.strategies.optimizers import OptimizerNames, clip_by_global_norm
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.random_state import share_random_state
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.watch import FailureWatch

__all__ = ["PipeSwiftStrategy"]

_KEPT_STEPS = 200


class PipeSwiftStrategy(ParallelStrategy):
    """Run an ordinary LightningModule as a pipeline.

    ``training_step`` runs once for each micro-batch, cut at the network's layers: each device runs
    its own layers, the last one the user's loss. Gradients, metrics and checkpoints are those of
    one device.

    Args:
        stages: Number of pipeline stages. ``None`` makes every device a stage; fewer than devices
            replicate the pipeline (``devices=4, stages=2`` trains 2 pipelines, data parallel).
        micro_batches: Number of micro-batches in a batch, a list of their sizes in samples, or
            ``"auto"``.
        schedule: ``"1f1b"`` or ``"gpipe"``.
        warm_up: 1F1B's warm-up: a depth for each stage, or a factor from 1 to 2 (deeper hides
            latency and variance, and keeps more micro-batches in memory).
        network: Attribute of the LightningModule that holds the network, or ``"self"``. ``None``
            finds it: the one child module with parameters, else ``model``, ``net``, ``network``.
        partition: Number of layers of each stage. ``None`` balances their estimated cost.
        dynamic_shapes: Set it if the shapes of activations depend on the data, not only on the
            shapes of the batch.
        receive_window: How many receives are posted ahead on each edge.
        silence_s: Seconds without a sign of life after which a rank counts as lost.
        process_group_backend: ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Limit for set-up and for single collectives.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or your cluster's.
        checkpoint_io: Set by the Trainer, or your plugin.
        precision_plugin: Set by the Trainer, or your plugin.

    Raises:
        OptionError: An argument is out of its range.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> import pipeswift_lightning
        >>> trainer = Trainer(
        ...     strategy=PipeSwiftStrategy(micro_batches=8), accelerator="cpu", devices=2,
        ...     logger=False, enable_checkpointing=False, enable_model_summary=False,
        ... )
    """

    strategy_name = "pipeswift"

    def __init__(  # noqa: PLR0913 -- the user's knobs, then what Lightning itself passes
        self,
        *,
        stages: int | None = None,
        micro_batches: int | str | Sequence[int] | None = "auto",
        schedule: str = "1f1b",
        warm_up: Sequence[int] | float | None = None,
        network: str | None = None,
        partition: Sequence[int] | None = None,
        dynamic_shapes: bool = False,
        receive_window: int = 1,
        silence_s: float = 10.0,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = PipelineOptions.of(
            stages=stages,
            micro_batches=micro_batches,
            schedule=schedule,
            warm_up=warm_up,
            partition=partition,
            dynamic_shapes=dynamic_shapes,
            receive_window=receive_window,
        )
        self.num_nodes = 1
        self._network_name = network
        self._backend = process_group_backend
        self._timeout = timeout
        self._watch = FailureWatch(silence_s)
        self._groups: MeshGroups | None = None
        self._session: PipelineSession | None = None
        self._steps: StepRunner | None = None
        self._names = OptimizerNames()
        self._gradients: dict[str, Tensor | None] = {}
        self._sync_gradients = True
        self._owns_process_group = False
        self._step_times: deque[tuple[float, float, float]] = deque(maxlen=_KEPT_STEPS)

    # -- places -------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None  # noqa: S101 -- set by the Trainer
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> Mesh:
        """The mesh over all devices.

        Raises:
            MeshError: The devices are no multiple of the stages.
        """
        return Mesh.of(
            world_size=self.num_nodes * self.num_processes, num_stages=self.options.stages
        )

    @property
    def is_distributed(self) -> bool:
        """Whether samples are sharded: only over replicas, never over stages.

        Lightning injects a ``DistributedSampler`` where this is true.
        """
        return self.mesh.num_replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.mesh
        replica = mesh.coordinate(self.global_rank).replica
        return {"num_replicas": mesh.num_replicas, "rank": replica}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def groups(self) -> MeshGroups:
        """The process groups; they exist once the Trainer has set up its environment."""
        if self._groups is None:
            msg = "the process groups exist only while the Trainer runs"
            raise RuntimeError(msg)
        return self._groups

    @property
    def session(self) -> PipelineSession:
        """The pipeline; it exists between set-up and teardown of a Trainer call."""
        if self._session is None:
            msg = "the pipeline exists only while the Trainer runs"
            raise RuntimeError(msg)
        return self._session

    # -- set-up -------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None  # noqa: S101 -- set by the Trainer
        self.mesh  # noqa: B018 -- refuses a wrong number of devices before any process starts
        if self.num_nodes * self.num_processes > 1:
            self._launcher = PipelineLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell the environment this process's rank; called by the Trainer."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(
            self.node_rank * self.num_processes + self.local_rank
        )
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self._check_world_size()
        if self._groups is None:
            self._init_process_group()
            self._groups = MeshGroups.create(self.mesh, self.global_rank)
            self._groups.warm(self.root_device)
        self._watch.start(self._groups)
        share_random_state(self.root_device)

    def _check_world_size(self) -> None:
        expected = self.num_nodes * self.num_processes
        if _distributed_is_initialized() and dist.get_world_size() != expected:
            msg = (
                f"a process group of {dist.get_world_size()} ranks is already there, but the "
                f"Trainer asks for {expected} devices. Rule: they are equal. Remedy: destroy the "
                "old group (torch.distributed.destroy_process_group()) before this Trainer"
            )
            raise RuntimeError(msg)

    def _init_process_group(self) -> None:
        if _distributed_is_initialized():
            return
        self._owns_process_group = True
        if self.mesh.world_size == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return
        assert self.cluster_environment is not None  # noqa: S101 -- set by the Trainer
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment, backend, timeout=self._timeout, device_id=device
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None  # noqa: S101 -- set by the Trainer
        module = self.lightning_module
        assert module is not None  # noqa: S101 -- connected by the Trainer
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_module(module, self.precision_plugin, fitting=fitting)
        self.precision_plugin.convert_module(module)
        network = find_network(module, self._network_name)
        self._check_layers(len(network.layers), network.name)
        self.model_to_device()
        self._equalise(module)
        self._session = PipelineSession(
            module,
            network,
            self.groups,
            self.options,
            self.root_device,
            self._watch.progress,
            self._keep_local,
        )
        self._steps = StepRunner(self._session, self.options)
        if fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            self._names.remember(module, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._clip_globally()
        self._session.open()

    def _check_layers(self, num_layers: int, name: str) -> None:
        stages = self.mesh.num_stages
        if stages > num_layers:
            msg = (
                f"{name} has {num_layers} layers, but {stages} stages are asked for. Rule: each "
                f"stage has a layer. Remedy: stages={num_layers} or fewer "
                "(devices beyond that replicate the pipeline), or return finer layers from "
                "configure_pipeline()"
            )
            raise ValueError(msg)

    def _equalise(self, module: nn.Module) -> None:
        """Start all ranks from rank 0's values, whether or not the user seeded everything."""
        if self.mesh.world_size == 1:
            return
        tensors = [*module.parameters(), *module.buffers()]
        with communicating("sending rank 0's initial parameters"):
            broadcast_tensors((t.data for t in tensors), 0, dist.group.WORLD, self.root_device)  # type: ignore[arg-type]

    def _keep_local(self) -> None:
        assert self.lightning_module is not None  # noqa: S101 -- connected by the Trainer
        self._names.keep_local(self.optimizers, self.lightning_module)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None  # noqa: S101 -- connected by the Trainer
        self.lightning_module.to(self.root_device)

    def _clip_globally(self) -> None:
        """Make norm clipping see all stages.

        The plugin's instance is patched, not its class: the class's name is a checkpoint key.
        """
        plugin = self.precision_plugin

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_by_global_norm(parameters, clip_val, self._counted(), self._sum_over_stages)

        plugin.__dict__["clip_grad_by_norm"] = clip_grad_by_norm

    def _counted(self) -> set[int]:
        session = self.session
        if session.share is None:
            return {id(p) for p in session.module.parameters()}
        owners = session.share.owners.parameters
        return {
            id(p) for n, p in session.share.local().items() if owners[n][0] == session.stage
        }

    def _sum_over_stages(self, value: Tensor) -> None:
        with communicating("summing gradient norms over the stages"):
            dist.all_reduce(value, group=self.groups.pipeline)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by replica: all ranks of a pipeline must draw the same samples."""
        init = getattr(dataloader, "worker_init_fn", None)
        if getattr(init, "func", None) is pl_worker_init_function:
            replica = self.mesh.coordinate(self.global_rank).replica
            init.keywords["rank"] = replica
        return dataloader

    # -- steps --------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None  # noqa: S101 -- connected by the Trainer
        before = {n: p.grad for n, p in module.named_parameters() if not p.is_meta}
        for parameter in module.parameters():
            parameter.grad = None
        output = self._run(StepHook.TRAINING, args, kwargs)
        self._gradients = {}
        for name, parameter in self.session.local_parameters().items():
            self._gradients[name] = parameter.grad
            parameter.grad = before.get(name)
        self._note_times()
        return _with_leaf_loss(output)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.VALIDATION, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.TEST, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.PREDICT, args, kwargs)

    def _run(self, hook: StepHook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._steps is not None  # noqa: S101 -- made in set-up
        try:
            return self._steps.run(hook, (*args, *kwargs.values()), self.precision_plugin)
        except CommunicationError as error:
            raise self._watch.root_cause(error, self.groups) from error

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand the step's gradients over, between the hooks that Lightning calls around it."""
        module = self.lightning_module
        assert module is not None  # noqa: S101 -- connected by the Trainer
        closure_loss = Precision.pre_backward(self.precision_plugin, closure_loss, module)  # type: ignore[assignment]
        for name, parameter in self.session.local_parameters().items():
            gradient = self._gradients.pop(name, None)
            if gradient is None:
                continue
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self._sync_gradients:
            self._reduce_gradients()
        return Precision.post_backward(self.precision_plugin, closure_loss, module)

    def _reduce_gradients(self) -> None:
        self._watch.progress.doing = "reducing gradients"
        try:
            with communicating("reducing gradients"):
                self.session.reduce_gradients()
        except CommunicationError as error:
            raise self._watch.root_cause(error, self.groups) from error

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]
        """While gradients accumulate they are not reduced: once a step is enough."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    # -- collectives of the Trainer -----------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized() and not self._watch.failed:
            self._collective(f"barrier {name or ''}", dist.barrier)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        self._collective(
            "broadcast", lambda: dist.broadcast_object_list(box, src, group=_group.WORLD)
        )
        return box[0]

    @override
    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Any:
        """Reduce over the replicas; the stages of a pipeline agree already."""
        if not isinstance(tensor, Tensor) or self._groups is None or not self.is_distributed:
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = name in ("mean", "avg", None, ReduceOp.AVG)
        operation = {"max": ReduceOp.MAX, "min": ReduceOp.MIN, "product": ReduceOp.PRODUCT}.get(
            name if isinstance(name, str) else "", ReduceOp.SUM
        )
        if isinstance(name, ReduceOp) and not mean:
            operation = name  # type: ignore[assignment]
        result = tensor.detach().clone()
        target = group if group is not None else self._groups.replicas
        self._collective("reduce", lambda: dist.all_reduce(result, op=operation, group=target))
        return result / self.mesh.num_replicas if mean else result

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the replicas."""
        if self._groups is None:
            return tensor
        return super().all_gather(tensor, group or self._groups.replicas, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not _distributed_is_initialized():
            return decision
        count = torch.tensor(int(decision), device=self.root_device)
        self._collective("a common decision", lambda: dist.all_reduce(count))
        return bool(count == self.world_size) if all else bool(count)

    def _collective(self, what: str, operation: Any) -> None:
        try:
            with communicating(what):
                operation()
        except CommunicationError as error:
            if self._groups is None:
                raise
            raise self._watch.root_cause(error, self._groups) from error

    # -- checkpoints --------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None  # noqa: S101 -- connected by the Trainer
        if self._groups is None:
            return self.lightning_module.state_dict()
        share = self._session.share if self._session is not None else None
        return gather_module_state(self.lightning_module, share, self._groups)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None  # noqa: S101 -- connected by the Trainer
        index = next(i for i, o in enumerate(self.optimizers) if _same(o, optimizer))
        return gather_optimizer_state(
            optimizer, self._names.groups[index], self.lightning_module, self.groups
        )

    # -- observing ----------------------------------------------------------------------------

    def _note_times(self) -> None:
        compute = [e for e in self.session.recorder.events() if e.is_compute]
        if compute:
            busy = sum(event.duration_s for event in compute)
            self._step_times.append((compute[0].start_s, compute[-1].end_s, busy))

    def measured_bubbles(self) -> list[float] | None:
        """Return each stage's idle share of the last steps, by stage; collective.

        The step lasts from the first stage's first forward to the last end of any compute in the
        pipeline; clocks of one host are one clock.
        """
        if self._groups is None or not self._step_times:
            return None
        every: list[Any] = [None] * self.mesh.num_stages
        dist.all_gather_object(every, list(self._step_times), group=self._groups.pipeline)
        steps = list(zip(*every, strict=True))
        spans = [max(s[1] for s in step) - min(s[0] for s in step) for step in steps]
        return [
            1.0 - sum(step[stage][2] for step in steps) / sum(spans)
            for stage in range(self.mesh.num_stages)
        ]

    def timeline(self) -> Timeline:
        """Return the measured timeline of the last step; collective over the pipeline."""
        return self.session.timeline()

    # -- the end ------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._watch.tell(exception)
        if self.mesh.world_size > 1 and _distributed_is_initialized():
            # Closing the connections is what wakes peers that wait for this rank.
            with suppress(RuntimeError):
                dist.destroy_process_group()
            self._groups = None

    @override
    def teardown(self) -> None:
        session, self._session = self._session, None
        healthy = self._groups is not None and not self._watch.failed
        if session is not None:
            session.close(bring_back=healthy)
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        if healthy or session is None or session.share is None:
            super().teardown()
        self._watch.stop()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Pipeline parallelism (pipeswift-lightning)"
            )


def _with_leaf_loss(output: Any) -> Any:
    """Give Lightning a loss that it may call backward on; the gradients are already there."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_()
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"].detach().requires_grad_()}
    return output


def _same(a: Any, b: Any) -> bool:
    return getattr(a, "_optimizer", a) is getattr(b, "_optimizer", b)


