"""A Lightning strategy over a mesh: where each process stands, and collectives among them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from pipeswift_lightning.runtime.agreement import require_agreement
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups
from pipeswift_lightning.strategies.assembly_times import AssemblyPart, AssemblyTimes
from pipeswift_lightning.strategies.collectives import Collectives
from pipeswift_lightning.strategies.environment import ensure_process_group
from pipeswift_lightning.strategies.hydra_job import forget_previous_job, job_facts
from pipeswift_lightning.strategies.launcher import PipelineLauncher
from pipeswift_lightning.strategies.notebook_launcher import NotebookLauncher
from pipeswift_lightning.strategies.options import PipelineOptions
from pipeswift_lightning.strategies.random_state import share_random_state
from pipeswift_lightning.strategies.watch import FailureWatch

__all__ = ["MeshStrategy"]


class MeshStrategy(ParallelStrategy):
    """Places processes on a mesh of stages and replicas, and connects them.

    What runs on the mesh is its subclass's business (`PipeSwiftStrategy`).

    Args:
        options: Names the number of stages.
        silence_s: Seconds without a sign of life after which a rank counts as lost.
        backend: ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Limit for set-up and for single collectives.
        accelerator: As for every strategy, set by the Trainer.
        parallel_devices: Likewise.
        cluster_environment: Likewise.
        checkpoint_io: Likewise.
        precision_plugin: Likewise.
    """

    def __init__(  # noqa: PLR0913 -- the four of its own, and what Lightning itself passes
        self,
        *,
        options: PipelineOptions,
        silence_s: float,
        backend: str | None,
        timeout: timedelta,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        forget_previous_job()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = options
        self.num_nodes = 1
        self._backend = backend
        self._timeout = timeout
        self._watch = FailureWatch(silence_s)
        self._groups: MeshGroups | None = None
        self._collectives: Collectives | None = None
        self._made_group = False
        self._assembly = AssemblyTimes()

    # -- places -------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
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
            OptionError: An option lists another number of stages.
        """
        mesh = Mesh.of(
            world_size=self.num_nodes * self.num_processes, num_stages=self.options.stages
        )
        self.options.check_stages(mesh.num_stages)
        return mesh

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
    def groups(self) -> MeshGroups:
        """The process groups; they exist once the Trainer has set up its environment."""
        if self._groups is None:
            msg = (
                "there are no process groups now. Rule: they exist while the Trainer runs. Remedy: "
                "ask for them in a hook of a callback or module"
            )
            raise RuntimeError(msg)
        return self._groups

    # -- set-up -------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.mesh  # noqa: B018 -- refuses a wrong number of devices before any process starts
        if self.num_nodes * self.num_processes == 1:
            return
        if _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            self._launcher = NotebookLauncher(
                self, on_failure=self._failed, check=self.check_before_start
            )
        else:
            self._launcher = PipelineLauncher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                on_failure=self._failed,
                has_begun=lambda: self._watch.has_begun,
                check=self.check_before_start,
            )

    def check_before_start(self, trainer: Trainer) -> None:
        """Refuse what can be seen to be wrong before other processes are started."""

    def _failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks about an error; return what to raise instead of it."""
        return self._watch.told(error, self.mesh)

    def set_world_ranks(self) -> None:
        """Tell the environment this process's rank; called by the Trainer."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(
            self.node_rank * self.num_processes + self.local_rank
        )
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        with self._assembly.timing(AssemblyPart.GROUPS):
            self._meet()

    def _meet(self) -> None:
        """Connect this process with the others."""
        self.set_world_ranks()
        if self._groups is None:
            self._made_group = ensure_process_group(
                self.cluster_environment,
                world_size=self.mesh.world_size,
                backend=self._backend,
                device=self.root_device,
                timeout=self._timeout,
            )
        self._watch.start(self.mesh, self.global_rank)
        if self._groups is None:
            self._connect()
        with in_collective("sharing rank 0's random state", self._watch.progress):
            share_random_state(self.root_device)

    def _connect(self) -> None:
        """Open the process groups, once it is known that all ranks want the same ones."""
        with in_collective("comparing the options of the ranks", self._watch.progress):
            facts = {
                **{name: str(value) for name, value in asdict(self.options).items()},
                "silence_s": str(self._watch.silence_s),
                "torch": torch.__version__,
                **job_facts(),
            }
            require_agreement(facts, None, self.root_device)
        with in_collective("opening the connections between the stages", self._watch.progress):
            groups = MeshGroups.create(self.mesh, self.global_rank)
            groups.warm(self.root_device)
        self._groups = groups
        self._collectives = Collectives(groups, self._watch, self.root_device)

    def require_agreement(self, what: str, facts: Mapping[str, str], rule: str) -> None:
        """Compare ``facts`` over all ranks; collective.

        Args:
            what: What is done, for the report should it fail: "comparing the configuration".
            facts: Named statements; equal on all ranks, or it is an error.
            rule: What was expected and what to do, for the error's end.

        Raises:
            DisagreementError: On every rank, naming each differing fact and all sides.
        """
        if self._collectives is None or self.mesh.world_size == 1:
            return
        with in_collective(what, self._watch.progress):
            require_agreement(facts, None, self.root_device, rule=rule)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by replica: all ranks of a pipeline must draw the same samples."""
        # Lightning does the same with the global rank, but later, and only if nobody has.
        _auto_add_worker_init_fn(dataloader, self.mesh.coordinate(self.global_rank).replica)
        return dataloader

    # -- collectives of the Trainer -----------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._collectives is not None:
            self._collectives.barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._collectives is None else self._collectives.broadcast(obj, src)

    @override
    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Any:
        if not isinstance(tensor, Tensor) or self._collectives is None or not self.is_distributed:
            return tensor
        return self._collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the replicas: the stages of one pipeline agree already."""
        if self._groups is None:
            return tensor
        assert self._collectives is not None
        chosen = group or self._groups.replicas
        return self._collectives.guarded(
            "gathering over the replicas",
            lambda: _all_gather_ddp_if_available(tensor, chosen, sync_grads),
        )

    def gather_over_stages(self, what: str, value: Any) -> list[Any]:
        """Return every stage's object, by stage; collective over this rank's pipeline.

        Args:
            what: What is done, for the report should it fail: "gathering step times".
            value: This stage's object; it is pickled.
        """
        if self._collectives is None:
            return [value]
        return self._collectives.gather_over_stages(what, value)

    def gather_over_replicas(self, what: str, value: Any) -> list[Any]:
        """Return every replica's object, of this rank's stage, by replica; collective over them.

        Args:
            what: What is done, for the report should it fail.
            value: This replica's object; it is pickled.
        """
        if self._collectives is None or self.mesh.num_replicas == 1:
            return [value]
        return self._collectives.gather_over_replicas(what, value)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._collectives is None:
            return decision
        return self._collectives.decide(decision=decision, unanimous=all)
