"""What a checkpoint says about the run that wrote it: ``topology.json``."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeswift_lightning.runtime.checkpoint_directory import TOPOLOGY_FILE, CheckpointError
from pipeswift_lightning.runtime.ownership import ParameterTable

__all__ = ["FORMAT_VERSION", "Layout", "Structure", "Topology", "require_keys", "versions"]

_PACKAGE = "pipeswift-lightning"
# 2: what each replica has learnt of its loss ("steps" in rank<N>.pt). 3: checksums.
FORMAT_VERSION = 3
_READ = (2, 3)


@dataclass(frozen=True, slots=True)
class Structure:
    """The names, dtypes and shapes of a module's parameters and saved buffers.

    Attributes:
        tensors: ``"float32[4, 8]"`` by name, in the module's order; tied parameters once.
        aliases: The first name of each tied parameter, by its other names.
        order: Every key of the module's ``state_dict``, in order.
    """

    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    order: Sequence[str]

    @classmethod
    def of(cls, module: nn.Module) -> "Structure":
        """Describe ``module``.

        Example:
            >>> dict(Structure.of(nn.Linear(2, 1)).tensors)
            {'weight': 'float32[1, 2]', 'bias': 'float32[1]'}
        """
        table = ParameterTable.of(module)
        state = module.state_dict()
        held: dict[str, torch.Tensor] = {}
        held.update(module.named_parameters())
        buffers = dict(module.named_buffers(remove_duplicate=False))
        held.update({name: buffers[name] for name in state if name in buffers})
        aliases = {a: c for c, names in table.aliases.items() for a in names[1:]}
        return cls({name: _shown(t) for name, t in held.items()}, aliases, list(state))

    @property
    def digest(self) -> str:
        """A short digest of all of it."""
        text = json.dumps([dict(self.tensors), dict(self.aliases)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: "Structure") -> list[str]:
        """Say how this structure (a checkpoint's) differs from another (a module's)."""
        found = []
        for name in dict.fromkeys((*self.tensors, *other.tensors)):
            mine, theirs = self._entry(name), other._entry(name)
            if _shape(mine) != _shape(theirs):
                found.append(f"{name}: {mine} in the checkpoint, {theirs} in the module")
        return found

    def other_dtypes(self, other: "Structure") -> list[str]:
        """Say which tensors differ in their dtype alone."""
        return [
            f"{name}: {mine} in the checkpoint, {other.tensors[name]} in the module"
            for name, mine in self.tensors.items()
            if name in other.tensors and mine != other.tensors[name]
        ]

    def _entry(self, name: str) -> str:
        if name in self.aliases:
            return f"tied to {self.aliases[name]}"
        return self.tensors.get(name, "absent")


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shape(entry: str) -> str:
    return entry.partition("[")[2] or entry


@dataclass(frozen=True, slots=True)
class Layout:
    """The mesh that a run used, and the processes in its groups."""

    num_stages: int
    num_replicas: int
    backend: str
    pipelines: Sequence[Sequence[int]]
    replicas: Sequence[Sequence[int]]
    shared_parameters: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Everything in ``topology.json`` but the files' sizes.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch that the run was in.
        batches: Batches of the epoch done.
        structure: The model's.
        optimizer_groups: Names of the parameters in each group of each optimizer.
        layers: First layer and the one after the last of each stage; ``None`` before the cut.
        micro_batches: Samples in each micro-batch of the last step.
        schedule: Name and digest of the plan, as text.
        layout: The mesh.
        versions: Of Python, torch and the packages.
        small_files: Files beside DCP's own.
        planned: The plan that costs have chosen for the last step, whole; empty without costs.
    """

    step: int
    epoch: int
    batches: int
    structure: Structure
    optimizer_groups: Sequence[Sequence[Sequence[str]]]
    layers: Sequence[Sequence[int]] | None
    micro_batches: Sequence[int] | None
    schedule: Mapping[str, str]
    layout: Layout
    versions: Mapping[str, str]
    small_files: Sequence[str]
    planned: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what is written."""
        described = asdict(self)
        structure = described.pop("structure")
        return {
            "format_version": FORMAT_VERSION,
            **described,
            "model": {"digest": self.structure.digest, **structure},
        }

    @classmethod
    def read(cls, path: Path) -> "Topology":
        """Read a checkpoint's topology.

        Raises:
            CheckpointError: Another version of this package wrote it, or it is damaged.
        """
        described = json.loads((path / TOPOLOGY_FILE).read_text())
        version = described.pop("format_version", None)
        if version not in _READ:
            age = "newer" if isinstance(version, int) and version > FORMAT_VERSION else "older"
            wrote = described.get("versions", {}).get(_PACKAGE, "which it does not name")
            msg = (
                f"{path} has format version {version!r}. Rule: this version of the package reads "
                f"format versions {' and '.join(map(str, _READ))} alone. Remedy: use the {age} "
                f"{_PACKAGE} that wrote it, {wrote}"
            )
            raise CheckpointError(msg)
        where = path / TOPOLOGY_FILE
        require_keys(described, _KEYS if version < FORMAT_VERSION else (*_KEYS, *_SUMS), where)
        model = described.pop("model")
        require_keys(model, ("digest", *_names(Structure)), where, within="model")
        layout = described.pop("layout")
        require_keys(layout, _names(Layout), where, within="layout")
        digest = model.pop("digest")
        for extra in ("files", "sequence", *_SUMS):
            described.pop(extra, None)
        topology = cls(structure=Structure(**model), layout=Layout(**layout), **described)
        if topology.structure.digest != digest:
            msg = (
                f"{where} has been changed: the digest of the model's names and "
                "shapes does not fit. Rule: a checkpoint is read as it was written. Remedy: "
                "restore the file, or use another checkpoint"
            )
            raise CheckpointError(msg)
        return topology


def _names(of: type[Structure] | type[Layout] | type[Topology]) -> list[str]:
    return [entry.name for entry in fields(of)]


_SUMS = ("checksums", "checksum")
_KEYS = (*(set(_names(Topology)) - {"structure"}), "model", "files", "sequence")


def require_keys(held: Any, keys: Iterable[str], where: Path, *, within: str = "") -> None:
    """See that a part of a checkpoint has the keys that its format version gives it.

    Args:
        held: What was read.
        keys: Its keys.
        where: The file.
        within: The part of the file; empty for all of it.

    Raises:
        CheckpointError: Some are missing, or there are others; the message names all of them.
    """
    found = set(held) if isinstance(held, Mapping) else set()
    wrong = []
    for verb, names in (("lacks", set(keys) - found), ("has an unknown", found - set(keys))):
        if names:
            wrong.append(f"{verb} {', '.join(map(repr, sorted(names)))}")
    if wrong:
        part = f"{within!r} in {where}" if within else f"{where}"
        msg = (
            f"{part} {' and '.join(wrong)}. Rule: a checkpoint of format version {FORMAT_VERSION} "
            "has all of its keys and no others. Remedy: it was changed or damaged; use another "
            "checkpoint"
        )
        raise CheckpointError(msg)


def versions(**packages: str) -> dict[str, str]:
    """Return the versions of Python, torch, this package and ``packages``."""
    try:
        own = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:  # run from a checkout
        own = "not installed"
    python = platform.python_version()
    return {_PACKAGE: own, "python": python, "torch": torch.__version__, **packages}
