"""What a checkpoint holds of a training run on one rank, all of it by name."""

import pickle
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.runtime.mesh import Coordinate
from pipeswift_lightning.runtime.ownership import LocalShare, ParameterTable
from pipeswift_lightning.runtime.sharded_state import save_small
from pipeswift_lightning.runtime.topology import Structure
from pipeswift_lightning.strategies.optimizers import unwrapped

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "at_the_start_of_an_epoch",
    "extra_state",
    "model_tensors",
    "named_settings",
    "optimizer_tensors",
    "safe_state",
]

MODEL, OPTIMIZER = "model.", "optimizer.state."
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def model_tensors(
    module: nn.Module, share: LocalShare | None, place: Coordinate, last: int
) -> dict[str, Tensor]:
    """Return the parameters and saved buffers that this rank can write.

    Of what several ranks hold alike, DCP lets one write. Buffers may differ from replica to
    replica: the first one's are saved.
    """
    found: dict[str, Tensor] = {
        f"{MODEL}{name}": parameter.detach()
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }
    if place.replica == 0:
        saved = module.state_dict()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            owner = place.stage if share is None else share.owners.buffers.get(name, last)
            if name in saved and owner == place.stage and not buffer.is_meta:
                found[f"{MODEL}{name}"] = buffer.detach()
    return found


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return what ``state_dict`` holds besides parameters and buffers, such as metrics' states."""
    structure = Structure.of(module)
    known = structure.tensors.keys() | structure.aliases.keys()
    return {name: value for name, value in module.state_dict().items() if name not in known}


def optimizer_tensors(
    optimizers: Sequence[Optimizer], module: nn.Module
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizers' state on this rank: its tensors, and what is none, by parameter.

    Raises:
        CheckpointError: It is no flat mapping from names to tensors and plain values.
    """
    names = ParameterTable.of(module).names
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for optimizer in map(unwrapped, optimizers):
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter))
            for key, value in state.items() if name is not None else ():
                if not isinstance(key, str) or "." in key or _hides_tensors(value):
                    _refuse_state(optimizer, str(name), key, value)
                elif isinstance(value, Tensor):
                    tensors[f"{OPTIMIZER}{name}.{key}"] = value.detach()
                else:
                    values.setdefault(str(name), {})[key] = value
    return tensors, values


def _hides_tensors(value: Any) -> bool:
    return not isinstance(value, Tensor) and any(isinstance(x, Tensor) for x in tree_leaves(value))


def _refuse_state(optimizer: Optimizer, name: str, key: object, value: object) -> None:
    msg = (
        f"{type(optimizer).__name__} keeps {key!r}: {type(value).__name__} for {name}. Rule: an "
        "optimizer's state is a flat mapping, for each parameter, from names without dots to "
        "tensors and plain values. Remedy: ModelCheckpoint, which gathers it whole, or another "
        "optimizer"
    )
    raise CheckpointError(msg)


def named_settings(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the settings of an optimizer's groups, with the names of their parameters."""
    return {
        "param_groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(mine)}
            for group, mine in zip(unwrapped(optimizer).param_groups, names, strict=True)
        ]
    }


def safe_state(checkpoint: Mapping[str, Any]) -> bytes:
    """Serialise Lightning's state, so that reading it executes nothing.

    Hyper-parameters that do not allow that are left out, with a warning: no state depends on them.

    Raises:
        CheckpointError: Something else does not.
    """
    state = dict(checkpoint)
    for key in _HYPER_PARAMETERS:
        if isinstance(state.get(key), Mapping):
            plain = _without_config(state[key])
            state[key], left = _safe_items({k: _without_config(v) for k, v in plain.items()})
            if left:
                rank_zero_warn(
                    f"pipeswift: the hyper-parameters {left} are no plain values, so the "
                    "checkpoint leaves them out: save_hyperparameters(ignore=[...]) says so too."
                )
    state.pop("hparams_type", None)
    try:
        return save_small(state)
    except (pickle.PickleError, AttributeError, TypeError):
        unsafe = [key for key, value in state.items() if not _is_safe(value)]
        msg = (
            f"the state of {', '.join(map(repr, unsafe))} holds objects that are no plain values "
            "or tensors. Rule: reading a checkpoint executes nothing. Remedy: let state_dict() or "
            "on_save_checkpoint() return dicts, lists, strings, numbers and tensors"
        )
        raise CheckpointError(msg) from None


def _without_config(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _safe_items(items: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept = {key: value for key, value in items.items() if _is_safe(value)}
    return kept, [key for key in items if key not in kept]


def _is_safe(value: Any) -> bool:
    try:
        save_small(value)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def at_the_start_of_an_epoch(loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loops' state as if the next epoch had not been touched.

    Lightning counts an epoch's batches anew when it runs, not when the last one ends, and would
    take an untouched epoch for one that is done.
    """
    copied = deepcopy(dict(loops))
    fit = copied["fit_loop"]
    for key in ("batch_progress", "scheduler_progress", "automatic_optimization.optim_progress"):
        _zero(fit[f"epoch_loop.{key}"], "current")
    fit["epoch_loop.batch_progress"]["is_last_batch"] = False
    if "epoch_loop.val_loop.batch_progress" in fit:
        _zero(fit["epoch_loop.val_loop.batch_progress"], "total")
    for progress in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
        progress["ready"] = progress["started"] = progress["completed"]
    return copied


def _zero(progress: dict[str, Any], which: str) -> None:
    for key, value in progress.items():
        if key == which:
            progress[key] = dict.fromkeys(value, 0)
        elif isinstance(value, dict):
            _zero(value, which)
