"""A checkpoint in shards, as one rank reads it: what belongs here, whatever topology wrote it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointError
from pipeswift_lightning.runtime.mesh import Coordinate, Mesh
from pipeswift_lightning.runtime.sharded_state import load_small, read_table, read_tensors
from pipeswift_lightning.runtime.topology import Structure, Topology, require_keys
from pipeswift_lightning.strategies.epoch_position import EpochPosition
from pipeswift_lightning.strategies.loss_scope import joined_states
from pipeswift_lightning.strategies.merged_metrics import merged_metrics
from pipeswift_lightning.strategies.training_state import MODEL, OPTIMIZER

__all__ = ["LIGHTNING_FILE", "ShardSource", "rank_file"]

LIGHTNING_FILE = "lightning.pt"
RANK_KEYS = ("position", "seeds", "optimizer_values", "extra_state", "loader", "steps")
_LIGHTNING_KEYS = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "loops",
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
)
_SHOWN = 20


def rank_file(rank: int) -> str:
    """Name of the file with what one rank alone knows."""
    return f"rank{rank}.pt"


@dataclass(slots=True)
class ShardSource:
    """Reads one checkpoint.

    Attributes:
        path: Its folder.
        topology: What its run looked like.
        table: Dtype and shape of each tensor in it.
    """

    path: Path
    topology: Topology
    table: Mapping[str, tuple[torch.dtype, torch.Size]]
    _ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "ShardSource":
        """Read the descriptions of a whole checkpoint."""
        return cls(path, Topology.read(path), read_table(path))

    def lightning_state(self) -> dict[str, Any]:
        """Return Lightning's own state: loops, callbacks, schedulers, hyper-parameters."""
        file = self.path / LIGHTNING_FILE
        state: dict[str, Any] = load_small(file)
        # Callbacks and hyper-parameters have keys of their own beside these.
        require_keys({k: state[k] for k in _LIGHTNING_KEYS if k in state}, _LIGHTNING_KEYS, file)
        return state

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return what only ``rank`` of the run that saved knew."""
        if rank not in self._ranks:
            file = self.path / rank_file(rank)
            state: dict[str, Any] = load_small(file)
            require_keys(state, RANK_KEYS, file)
            position = [entry.name for entry in fields(EpochPosition)]
            require_keys(state["position"], position, file, within="position")
            self._ranks[rank] = state
        return self._ranks[rank]

    def is_like(self, mesh: Mesh) -> bool:
        """Whether the run that saved had the same stages and replicas."""
        layout = self.topology.layout
        return (layout.num_stages, layout.num_replicas) == (mesh.num_stages, mesh.num_replicas)

    # -- the model ----------------------------------------------------------------------------

    def load_model(self, module: nn.Module, *, strict: bool) -> None:
        """Fill the parameters and buffers that are here.

        Raises:
            CheckpointError: The module is another one; the message lists the differences.
        """
        here = Structure.of(module)
        self._check(here, strict=strict)
        held: dict[str, Tensor] = {}
        held.update(module.named_parameters())
        held.update(module.named_buffers(remove_duplicate=False))
        read_tensors(
            self.path,
            {
                f"{MODEL}{name}": held[name]
                for name in here.tensors
                if f"{MODEL}{name}" in self.table and not held[name].is_meta
            },
        )
        extra = self.extra_state()
        if extra:
            module.load_state_dict(extra, strict=False)

    def find(self, names: Collection[str]) -> Tensor | None:
        """Return the parameter of any of these names, or ``None``."""
        key = next((f"{MODEL}{n}" for n in names if f"{MODEL}{n}" in self.table), None)
        if key is None:
            return None
        dtype, shape = self.table[key]
        found = torch.empty(shape, dtype=dtype)
        read_tensors(self.path, {key: found})
        return found

    def described_model(self) -> dict[str, Tensor]:
        """Return a state dict of tensors without data, for hooks that look at names and shapes."""
        structure = self.topology.structure
        described = {}
        for name in structure.order:
            key = f"{MODEL}{structure.aliases.get(name, name)}"
            if key in self.table:
                dtype, shape = self.table[key]
                described[name] = torch.empty(shape, dtype=dtype, device="meta")
        return described

    def require_untouched(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a described state dict that a hook has changed: it is not what is loaded.

        Raises:
            CheckpointError: It has other names, or real tensors.
        """
        changed = {*state_dict} ^ {*self.described_model()}
        changed |= {n for n, v in state_dict.items() if not isinstance(v, Tensor) or not v.is_meta}
        if changed:
            msg = (
                f"on_load_checkpoint has changed {sorted(changed)[:9]} in checkpoint['state_dict']"
                ". Rule: there, a checkpoint in shards has names and shapes only. Remedy: make one "
                "file of it (recipes/reshard.py), and load that"
            )
            raise CheckpointError(msg)

    def _check(self, here: Structure, *, strict: bool) -> None:
        recorded = self.topology.structure
        found = recorded.differences(here)
        if not strict:  # names may differ, as in Lightning
            found = [difference for difference in found if "absent" not in difference]
        if found:
            more = f"\n  and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
            lines = "\n  ".join(found[:_SHOWN])
            msg = (
                f"{self.path} is a checkpoint of another model:\n  {lines}{more}\nRule: names and "
                "shapes are those of the module. Remedy: build the module with the arguments that "
                "it had, or set its strict_loading=False to allow for other names"
            )
            raise CheckpointError(msg)
        converted = recorded.other_dtypes(here)
        if converted:
            rank_zero_warn(
                f"pipeswift: {len(converted)} tensors of {self.path} are converted, for instance "
                f"{converted[0]}: the run goes on with other rounding than it would have."
            )

    def extra_state(self) -> dict[str, Any]:
        """Return what a ``state_dict`` holds beside parameters and buffers."""
        extra: dict[str, Any] = {}
        for rank in self.topology.layout.pipelines[0]:
            extra.update(self.rank_state(rank)["extra_state"])
        return extra

    # -- the optimizers -----------------------------------------------------------------------

    def check_groups(self, names: Sequence[Sequence[Sequence[str]]]) -> None:
        """Compare the optimizers' groups with those of the run that saved.

        Raises:
            CheckpointError: They differ.
        """
        recorded = self.topology.optimizer_groups
        found = []
        if [len(groups) for groups in recorded] != [len(groups) for groups in names]:
            found.append(f"{_sizes(recorded)} in the checkpoint, {_sizes(names)} in the run")
        else:
            for old, new in zip(recorded, names, strict=True):
                for i, (a, b) in enumerate(zip(old, new, strict=True)):
                    lost, added = sorted(set(a) - set(b)), sorted(set(b) - set(a))
                    if lost or added:
                        found.append(f"group {i}: without {lost[:9]}, with {added[:9]}")
        if found:
            lines = "\n  ".join(found[:_SHOWN])
            msg = (
                f"the optimizer's groups are not those of {self.path}:\n  {lines}\nRule: "
                "configure_optimizers makes the groups that it made. Remedy: the same arguments; "
                "or load the weights alone, by load_from_checkpoint of a consolidated file"
            )
            raise CheckpointError(msg)

    def optimizer_state(self, names: set[str]) -> dict[str, dict[str, Any]]:
        """Return the optimizers' state of the parameters ``names``."""
        targets: dict[str, Tensor] = {}
        state: dict[str, dict[str, Any]] = {}
        for key, (dtype, shape) in self.table.items():
            name, _, leaf = key.removeprefix(OPTIMIZER).rpartition(".")
            if key.startswith(OPTIMIZER) and name in names:
                targets[key] = torch.empty(shape, dtype=dtype)
                state.setdefault(name, {})[leaf] = targets[key]
        read_tensors(self.path, targets)
        for rank in self.topology.layout.pipelines[0]:
            for name, values in self.rank_state(rank)["optimizer_values"].items():
                if name in names:
                    state.setdefault(name, {}).update(values)
        return state

    # -- where it stood -----------------------------------------------------------------------

    def own_rank_state(self, mesh: Mesh, place: Coordinate) -> dict[str, Any]:
        """Return the state of the rank that stood where this one stands.

        On another mesh it is the first stage's of the same replica (or of the first), so that all
        ranks of a pipeline go on alike.
        """
        recorded = self.topology.layout
        replica = place.replica if place.replica < recorded.num_replicas else 0
        stage = place.stage if self.is_like(mesh) else 0
        return self.rank_state(recorded.pipelines[replica][stage])

    def step_state(self, mesh: Mesh, place: Coordinate) -> dict[str, Any]:
        """Return what steps depend on beside the module: each replica has learnt its own."""
        own: dict[str, Any] = self.own_rank_state(mesh, place)["steps"]
        recorded = self.topology.layout
        if recorded.num_replicas == mesh.num_replicas or not own:
            return own
        firsts = [self.rank_state(pipeline[0])["steps"] for pipeline in recorded.pipelines]
        return {**own, "loss": joined_states([first["loss"] for first in firsts])}

    def position(self, mesh: Mesh, place: Coordinate, module: nn.Module) -> EpochPosition:
        """Return where in its epoch the run stood."""
        own = self.own_rank_state(mesh, place)["position"]
        recorded = self.topology.layout
        lasts = [self.rank_state(pipeline[-1])["position"] for pipeline in recorded.pipelines]
        metrics = [last["metrics"] for last in lasts]  # every stage takes the last one's
        if recorded.num_replicas == mesh.num_replicas:
            return EpochPosition(**{**own, "metrics": metrics[place.replica]})
        merged = merged_metrics(module, metrics, place.replica, mesh.num_replicas)
        firsts = [self.rank_state(pipeline[0])["position"] for pipeline in recorded.pipelines]
        kinds = {key: kind for first in firsts for key, kind in first["kinds"].items()}
        state = {**own, "metrics": merged, "kinds": kinds}
        logged = [first["logged"] for first in firsts]
        return EpochPosition.merged(state, logged, mesh.num_replicas)


def _sizes(names: Sequence[Sequence[Sequence[str]]]) -> str:
    return " and ".join(f"{len(groups)} groups" for groups in names) or "no optimizer"
