"""The collectives that Lightning asks a strategy for, over the right ranks, never a silent hang."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeswift_lightning.runtime.communication import CommunicationError, in_collective
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.strategies.watch import FailureWatch

__all__ = ["Collectives"]

T = TypeVar("T")

_OPERATIONS = {
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Collectives:
    """Collectives over all ranks, over the replicas, and over the stages."""

    def __init__(self, groups: MeshGroups, watch: FailureWatch, device: torch.device) -> None:
        self._groups = groups
        self._watch = watch
        self._device = device

    def guarded(self, what: str, operation: Callable[[], T]) -> T:
        """Run a collective; if it fails, raise the failure that is behind it.

        Raises:
            PipelineFailure: Another rank failed, now or before.
        """
        self._watch.require_whole(what)
        try:
            with in_collective(what, self._watch.progress):
                return operation()
        except CommunicationError as error:
            raise self._watch.root_cause(error, self._groups.mesh) from None

    def barrier(self, name: str | None) -> None:
        """Wait for all ranks."""
        if not self._watch.failed:
            self.guarded(f"at the barrier {name or '(unnamed)'}", dist.barrier)

    def broadcast(self, value: Any, source: int) -> Any:
        """Return rank ``source``'s object."""
        box = [value]
        device = self._device if self._device.type != "cpu" else None
        self.guarded(
            f"waiting for an object of rank {source}",
            lambda: dist.broadcast_object_list(box, source, device=device),
        )
        return box[0]

    def reduce(self, tensor: Tensor, group: Any | None, reduce_op: Any) -> Tensor:
        """Reduce over the replicas: the stages of one pipeline agree already."""
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = name in ("mean", "avg", None) or name == dist.ReduceOp.AVG
        operation: Any = dist.ReduceOp.SUM
        if isinstance(name, str):
            operation = _OPERATIONS.get(name, operation)
        elif name is not None and not mean:
            operation = name
        result = tensor.detach().clone()
        target = group if group is not None else self._groups.replicas
        self.guarded(
            "reducing a logged value over the replicas",
            lambda: dist.all_reduce(result, op=operation, group=target),
        )
        return result / self._groups.mesh.num_replicas if mean else result

    def decide(self, *, decision: bool, unanimous: bool) -> bool:
        """Return whether all ranks (or any) say yes."""
        count = torch.tensor(int(decision), device=self._device)
        self.guarded("agreeing on a decision", lambda: dist.all_reduce(count))
        votes = int(count)
        return votes == self._groups.mesh.world_size if unanimous else votes > 0

    def gather_over_stages(self, what: str, value: Any) -> list[Any]:
        """Return every stage's object, by stage."""
        every: list[Any] = [None] * self._groups.mesh.num_stages
        pipeline = self._groups.pipeline
        self.guarded(what, lambda: dist.all_gather_object(every, value, group=pipeline))
        return every

    def gather_over_ranks(self, what: str, value: Any) -> list[list[Any]]:
        """Return every rank's object, by replica and stage."""
        mesh = self._groups.mesh
        every: list[Any] = [None] * mesh.world_size
        self.guarded(what, lambda: dist.all_gather_object(every, value))
        return [[every[r] for r in mesh.pipeline_ranks(i)] for i in range(mesh.num_replicas)]

    def gather_over_replicas(self, what: str, value: Any) -> list[Any]:
        """Return every replica's object, by replica."""
        every: list[Any] = [None] * self._groups.mesh.num_replicas
        replicas = self._groups.replicas
        self.guarded(what, lambda: dist.all_gather_object(every, value, group=replicas))
        return every

    def sum_over_stages(self, value: Tensor) -> None:
        """Add ``value`` up over the stages, in place."""
        self.guarded(
            "summing gradient norms over the stages",
            lambda: dist.all_reduce(value, group=self._groups.pipeline),
        )
