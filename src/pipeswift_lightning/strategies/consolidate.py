"""Turn a checkpoint in shards into one file; any process can, without ranks or the module."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.runtime.sharded_state import read_tensors
from pipeswift_lightning.strategies.checkpoint_folder import find_sound
from pipeswift_lightning.strategies.shard_source import ShardSource
from pipeswift_lightning.strategies.training_state import MODEL

__all__ = ["consolidate", "lightning_checkpoint", "model_weights"]

_SUFFIXES = (".ckpt", ".safetensors")


def consolidate(source: str | Path, target: str | Path) -> Path:
    """Write one file from a checkpoint in shards.

    Args:
        source: A checkpoint, or a folder of checkpoints, which means the newest whole one.
        target: ``*.ckpt`` for a Lightning checkpoint, that `LightningModule.load_from_checkpoint`
            and ``Trainer.fit(ckpt_path=)`` read under any strategy; ``*.safetensors`` for the
            model's weights alone. It must not exist.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointError: There is no whole checkpoint, its bytes are damaged, or
            ``target`` is of another kind or exists.
    """
    wanted = Path(target)
    if wanted.suffix not in _SUFFIXES:
        rule = f"Rule: its name ends with {' or '.join(_SUFFIXES)}"
        msg = f"target={str(target)!r} is of no known kind. {rule}. Remedy: name it so"
        raise CheckpointError(msg)
    if wanted.exists():
        msg = f"target={str(target)!r} exists. Rule: no file is overwritten. Remedy: another name"
        raise CheckpointError(msg)
    found = find_sound(source)
    if found is None:
        msg = (
            f"source={str(source)!r} is no checkpoint in shards. Rule: it is a folder step<N>, or "
            "one that holds such folders. Remedy: the dirpath of a TopologyCheckpoint"
        )
        raise CheckpointError(msg)
    opened = ShardSource.open(found)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    unfinished = wanted.with_name(f"{wanted.name}.tmp")
    if wanted.suffix == ".ckpt":
        torch.save(lightning_checkpoint(opened), unfinished)
    else:
        _save_safetensors(opened, unfinished)
    unfinished.rename(wanted)
    return found


def model_weights(source: ShardSource) -> dict[str, Tensor]:
    """Read the model's parameters and buffers, tied ones once."""
    stored = {
        name: torch.empty(shape, dtype=dtype)
        for name, (dtype, shape) in source.table.items()
        if name.startswith(MODEL)
    }
    read_tensors(source.path, stored)
    return {name.removeprefix(MODEL): tensor for name, tensor in stored.items()}


def lightning_checkpoint(source: ShardSource) -> dict[str, Any]:
    """Return what plain Lightning would have saved, optimizers included."""
    state = source.lightning_state()
    named_groups = [entry["param_groups"] for entry in state["optimizer_states"]]
    state["optimizer_states"] = [_numbered(source, groups) for groups in named_groups]
    loader = source.rank_state(0)["loader"]
    if loader is not None:
        state["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loader
    first = ("epoch", "global_step", "pytorch-lightning_version")
    return {**{k: state.pop(k) for k in first}, "state_dict": _state_dict(source), **state}


def _state_dict(source: ShardSource) -> dict[str, Any]:
    structure = source.topology.structure
    weights: dict[str, Any] = {**model_weights(source), **source.extra_state()}
    for alias, name in structure.aliases.items():
        weights[alias] = weights[name]
    return {name: weights[name] for name in structure.order if name in weights}


def _numbered(source: ShardSource, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Number the parameters in the order of the groups, as torch does."""
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = source.optimizer_state(set(names))
    return {
        "state": {numbers[name]: state[name] for name in names if name in state},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }


def _save_safetensors(source: ShardSource, path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        msg = (
            "safetensors is not installed. Rule: it writes *.safetensors. Remedy: pip install "
            "'pipeswift-lightning[safetensors]', or a target *.ckpt"
        )
        raise CheckpointError(msg) from None
    aliases = source.topology.structure.aliases
    # `safetensors.torch.load_model` looks tied names up there.
    notes = {"format": "pt", "pipeswift_step": json.dumps(source.topology.step), **aliases}
    save_file(model_weights(source), path, metadata=notes)
