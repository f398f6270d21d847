"""How a value was logged: what Lightning needs to report it though no later step logs it."""

import builtins
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError

__all__ = ["described", "revived"]

_REDUCTIONS = ("mean", "sum", "min", "max")

_PLAIN = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def described(metric: _ResultMetric) -> dict[str, Any]:
    """Return the arguments of ``self.log`` as plain values."""
    meta, reduce = metric.meta, metric.meta.reduce_fx
    return {
        **{name: getattr(meta, name) for name in _PLAIN},
        "reduce": reduce.__name__,
        "is_builtin": reduce is getattr(builtins, reduce.__name__, None),
        "is_tensor": metric.is_tensor,
        "synced": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "last": metric._forward_cache if metric.is_tensor else None,
    }


def revived(state: dict[str, Any], trainer: Trainer, module: LightningModule) -> _ResultMetric:
    """Return what Lightning had for a value that `described` describes, still without its sum.

    Raises:
        CheckpointError: ``state`` names another function than Lightning's reductions.
    """
    if state["reduce"] not in _REDUCTIONS:
        msg = (
            f"the checkpoint names the reduction {state['reduce']!r}. Rule: it is one of "
            f"{', '.join(_REDUCTIONS)}: reading a checkpoint executes nothing. Remedy: another "
            "checkpoint; do not trust this one"
        )
        raise CheckpointError(msg)
    meta = _Metadata(
        **{name: state[name] for name in _PLAIN},
        reduce_fx=getattr(builtins if state["is_builtin"] else torch, state["reduce"]),
    )
    meta.sync = _Sync(
        _should=state["synced"],
        fn=trainer.strategy.reduce,
        rank_zero_only=state["rank_zero_only"],
    )
    metric = _ResultMetric(meta, state["is_tensor"])
    if not metric.is_tensor:
        metric.value = attrgetter(state["metric_attribute"])(module)
    metric._forward_cache = state["last"]
    metric._update_count = 1  # else it warns that nothing was logged
    return metric.to(trainer.strategy.root_device)
