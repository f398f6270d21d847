"""torchmetrics in a pipeline: the state lives on the last stage, the value is everybody's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from pipeswift_lightning.runtime.announcement import announce
from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.progress import Progress

__all__ = ["SharedMetrics"]


class SharedMetrics:
    """Makes ``compute`` of a module's metrics work on every rank while a pipeline runs.

    Steps run to their end on the last stage alone, so only there a metric is updated. Outside of
    steps ``compute`` is a collective: the last stage computes (synchronised over the replicas),
    and all stages return its value.

    Args:
        module: The user's module.
        groups: The mesh's groups.
        device: Where values go.
        progress: Read by the watchdog.
        in_step: Whether a step runs; within one, ``compute`` stays local. So it does always where
            every rank runs whole steps, and has the state.
    """

    def __init__(
        self,
        module: LightningModule,
        groups: MeshGroups,
        device: torch.device,
        progress: Progress,
        in_step: Callable[[], bool],
    ) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._groups = groups
        self._device = device
        self._progress = progress
        self._in_step = in_step
        self._looks = 0
        self._saved: list[tuple[Metric, Any, Any, Any]] = []

    def open(self) -> None:
        """Take the metrics over."""
        for metric in self._metrics:
            original = metric.compute
            self._saved.append(
                (metric, original, metric.process_group, metric.distributed_available_fn)
            )
            metric.process_group = self._groups.replicas
            if self._groups.mesh.num_replicas == 1:
                metric.distributed_available_fn = _not_distributed
            if self._groups.mesh.num_stages > 1:
                metric.compute = partial(self._compute, original)  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the metrics back."""
        for metric, original, group, available in self._saved:
            metric.compute = original  # type: ignore[method-assign]
            metric.process_group = group
            metric.distributed_available_fn = available
        self._saved.clear()

    @contextmanager
    def untouched(self) -> Iterator[Callable[[], list[Any]]]:
        """Undo what a block does to the metrics; tells, within it, what it has done so far.

        Within it ``compute`` stays local: a step that is only looked at may end on one rank before
        it comes there, or fail on values without data.
        """
        saved = [
            (m, {name: _copied(getattr(m, name)) for name in m._defaults}, _counters(m))
            for m in self._metrics
        ]

        def changes() -> list[Any]:
            return [
                change
                for metric, states, _ in saved
                for name, state in states.items()
                for change in _changes(state, getattr(metric, name))
            ]

        self._looks += 1
        try:
            yield changes
        finally:
            self._looks -= 1
            for metric, states, (count, cached, computed) in saved:
                for name, state in states.items():
                    setattr(metric, name, state)
                metric._update_count = count
                metric._forward_cache = cached
                metric._computed = computed

    def _compute(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._looks or self._in_step():
            return original(*args, **kwargs)
        mesh, place = self._groups.mesh, self._groups.coordinate
        last = place.stage == mesh.num_stages - 1
        value = original(*args, **kwargs) if last else None
        source = mesh.rank(stage=mesh.num_stages - 1, replica=place.replica)
        with in_collective("waiting for a metric's value", self._progress):
            value = announce(value, source, self._groups.control)
        return tree_map_only(Tensor, lambda t: t.detach().to(self._device), value)


def _copied(state: Any) -> Any:
    return [*state] if isinstance(state, list) else state.clone()


def _changes(before: Any, after: Any) -> list[Any]:
    """Return what an update has added to a state; a maximum, or a list, as it is now."""
    if isinstance(after, list):
        return [tree_map_only(Tensor, _detached, part) for part in after[len(before) :]]
    both = isinstance(before, Tensor) and before.shape == after.shape
    if both and before.isfinite().all() and after.dtype is not torch.bool:
        return [after.detach() - before]
    return [after.detach().clone()]


def _detached(value: Tensor) -> Tensor:
    return value.detach().clone()


def _counters(metric: Metric) -> tuple[int, Any, Any]:
    return metric._update_count, metric._forward_cache, metric._computed


def _not_distributed() -> bool:
    return False
