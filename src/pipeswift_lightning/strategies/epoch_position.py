"""Where in an epoch a run stands: drawn batches, random states, and values logged so far.

Lightning resumes an epoch with the loader's first batch again, and forgets what was logged. Here
the loader's iterator is made in the random state in which it was made the first time, so that it
shuffles alike, and the batches that were used are drawn and dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.strategies.loader_seeds import LoaderSeeds
from pipeswift_lightning.strategies.logged_result import described, revived
from pipeswift_lightning.strategies.random_state import get_random_state, set_random_state

__all__ = ["EpochPosition", "metric_states"]

Values = dict[str, dict[str, Tensor]]


@dataclass(slots=True)
class EpochPosition:
    """What a rank needs to go on inside an epoch.

    Attributes:
        batches: Batches of the epoch that were used.
        random: The random state then.
        logged: Running values of what was logged for the epoch.
        metrics: States of the module's own metrics.
        kinds: How each value was logged.
    """

    batches: int
    random: dict[str, Any]
    logged: Values = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trainer: Trainer, module: LightningModule, device: torch.device, *, fresh: bool
    ) -> "EpochPosition":
        """Note where ``trainer`` stands; ``fresh`` if no batch of the next epoch was drawn."""
        random = get_random_state(device)
        if fresh:
            return cls(0, random, {}, metric_states(module))
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return cls(batches, random, _logged(trainer), metric_states(module), _kinds(trainer))

    @classmethod
    def merged(cls, state: Mapping[str, Any], replicas: Sequence[Values], num: int) -> Self:
        """Return one replica's share of what was logged, if it was logged on other replicas.

        Args:
            state: What a checkpoint kept.
            replicas: What each replica had logged.
            num: Number of replicas now; each takes an equal share.
        """
        logged: Values = {}
        for key in dict.fromkeys(key for replica in replicas for key in replica):  # alike on all
            parts = [replica[key] for replica in replicas if key in replica]
            logged[key] = {name: _joined(name, parts, num) for name in parts[0]}
        return cls(state["batches"], state["random"], logged, state["metrics"], state["kinds"])

    def as_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "batches": self.batches,
            "random": self.random,
            "logged": self.logged,
            "metrics": self.metrics,
            "kinds": self.kinds,
        }

    def move_loader(self, trainer: Trainer, seeds: LoaderSeeds) -> None:
        """Bring the loader to where it stood, and the random generators with it.

        A loader that keeps its own state has been moved by Lightning already.

        Raises:
            CheckpointError: The loader has too few batches.
        """
        fetcher, loader = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
        assert fetcher is not None and loader is not None  # noqa: PT018 -- Lightning's set-up
        if not any(isinstance(part, _Stateful) for part in loader.flattened):
            for part in loader.flattened:  # Lightning does it later, before an epoch's first batch
                _set_sampler_epoch(part, trainer.current_epoch)
            if seeds.before_iterator is not None and not _are_iterators(loader.flattened):
                seeds.restore(seeds.before_iterator)
                iter(fetcher)
            if seeds.before_batches is not None:
                seeds.restore(seeds.before_batches)
            self._drop(fetcher)
            if not self.batches:
                return  # the iterator that was just made has drawn what it would have drawn
        set_random_state(self.random, seeds.device)

    def _drop(self, fetcher: Any) -> None:
        for dropped in range(self.batches):
            try:
                next(fetcher)
            except StopIteration:
                msg = (
                    f"the checkpoint was made after {self.batches} batches of an epoch, but the "
                    f"loader has {dropped}. Rule: a run goes on within an epoch with the same "
                    "batches. Remedy: the same data and global batch size, or a checkpoint of an "
                    "epoch's end"
                )
                raise CheckpointError(msg) from None
        fetcher.fetched -= self.batches  # Lightning adds them itself

    def add_logged(self, trainer: Trainer, module: LightningModule) -> None:
        """Add what was logged before to what has been logged since; call it after one step.

        What this step has not logged may never be logged again in the epoch, so it is made anew.
        """
        results = trainer.fit_loop.epoch_loop._results
        for key, state in self.kinds.items():
            if key not in results or results[key].has_reset:
                results[key] = revived(state, trainer, module)
        for key, values in self.logged.items():
            metric = results[key]
            for name, before in values.items():
                attribute = _ATTRIBUTES[name]
                now = getattr(metric, attribute)
                setattr(metric, attribute, _REDUCE[name](now, before.to(now.device)))

    def load_metrics(self, module: LightningModule) -> None:
        """Give the module's metrics their states."""
        for name, child in module.named_modules():
            state = self.metrics.get(name)
            if isinstance(child, Metric) and state is not None:
                for key, value in state["values"].items():
                    setattr(child, key, move_data_to_device(value, child.device))
                child._update_count = state["updates"]


def _are_iterators(loaders: list[Any]) -> bool:
    return any(isinstance(loader, Iterator) for loader in loaders)


# Kinds of running values: the attribute of Lightning's that holds one, and how two are joined.
_ATTRIBUTES = {"sum": "value", "max": "value", "min": "value", "samples": "cumulated_batch_size"}
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "samples": torch.add,
}


def _logged(trainer: Trainer) -> Values:
    results = trainer.fit_loop.epoch_loop._results
    found: Values = {}
    for key, metric in results.items():
        if not metric.is_tensor or not metric.meta.on_epoch or metric.has_reset:
            continue
        meta = metric.meta
        kind = "max" if meta.is_max_reduction else "min" if meta.is_min_reduction else "sum"
        found[key] = {kind: metric.value.detach().clone()}
        if meta.is_mean_reduction:
            found[key]["samples"] = metric.cumulated_batch_size.clone()
    return found


def _kinds(trainer: Trainer) -> dict[str, dict[str, Any]]:
    return {
        key: described(metric)
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
        if metric.meta.on_epoch and not metric.has_reset
    }


def _joined(kind: str, parts: Sequence[Mapping[str, Tensor]], num: int) -> Tensor:
    stacked = torch.stack([part[kind] for part in parts])
    match kind:
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case _:
            return stacked.sum(0) / num


def metric_states(module: LightningModule) -> dict[str, Any]:
    """Return the states of the metrics that have been updated, by their place in the module."""
    return {
        name: {
            "updates": child._update_count,
            "values": {key: getattr(child, key) for key in child._defaults},
        }
        for name, child in module.named_modules()
        if isinstance(child, Metric) and child._update_count > 0
    }
