"""Read single tensors out of safetensors files, so that each rank reads its own only."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["NoWeights", "WeightError", "WeightFiles"]

_INDEX = "*.safetensors.index.json"


class WeightError(ValueError):
    """The files of weights cannot be used."""


class NoWeights:
    """Stands for no files: everything is initialised."""

    def find(self, names: Collection[str]) -> Tensor | None:  # noqa: ARG002 -- none has data
        """Return ``None``."""
        return None

    def missing(self, names: Mapping[str, Collection[str]]) -> list[str]:  # noqa: ARG002
        """Return no names: nothing was expected."""
        return []


class WeightFiles:
    """The tensors of one safetensors file, or of a folder as Hugging Face writes it.

    Args:
        path: A file; or a folder with one, or with several and their index.
        names: The module's names. The files' are the same, but for one prefix that all lack: the
            one with which most are found.

    Raises:
        WeightError: There is no such file, or the folder holds several without an index.
    """

    def __init__(self, path: str | Path, names: Iterable[str]) -> None:
        self._path = Path(path)
        self._safe_open: Any = _safetensors().safe_open
        self._files: Mapping[str, Path] = self._list()
        self._prefix = _prefix(names, self._files)

    def _list(self) -> dict[str, Path]:
        if self._path.is_file():
            return dict.fromkeys(self._keys(self._path), self._path)
        indices = sorted(self._path.glob(_INDEX))
        if indices:
            files = json.loads(indices[0].read_text())["weight_map"]
            return {name: self._path / file for name, file in files.items()}
        files = sorted(self._path.glob("*.safetensors"))
        if len(files) != 1:
            msg = (
                f"weights={str(self._path)!r} holds {len(files)} safetensors files and no index. "
                "Rule: weights are a .safetensors file, or a folder with one, or with several and "
                "their .safetensors.index.json. Remedy: name such a file or folder "
                "(model.save_pretrained(folder) writes one)"
            )
            raise WeightError(msg)
        return dict.fromkeys(self._keys(files[0]), files[0])

    def _keys(self, file: Path) -> list[str]:
        with self._safe_open(file, framework="pt") as opened:
            return list(opened.keys())

    def _key(self, names: Collection[str]) -> str | None:
        """Return the file's name for a tensor: the module's, without the prefix."""
        known = (_plain(name) for name in names)
        short = (name.removeprefix(self._prefix) for name in known if name.startswith(self._prefix))
        return next((name for name in short if name in self._files), None)

    def find(self, names: Collection[str]) -> Tensor | None:
        """Return the tensor of any of these names, or ``None``."""
        key = self._key(names)
        if key is None:
            return None
        # Opened for each tensor: pages of an open file count as this process's memory.
        with self._safe_open(self._files[key], framework="pt") as opened:
            found: Tensor = opened.get_tensor(key).clone()
        return found

    def missing(self, names: Mapping[str, Collection[str]]) -> list[str]:
        """Return the names that no file has.

        Raises:
            WeightError: No file has any of them.
        """
        absent = [name for name, aliases in names.items() if self._key(aliases) is None]
        if names and len(absent) == len(names):
            msg = (
                f"weights={str(self._path)!r} holds none of the module's parameters: it has "
                f"{next(iter(self._files), 'nothing')!r}, the module {absent[0]!r}. Rule: names "
                "agree, except for one prefix of the module's. Remedy: name the files of this model"
            )
            raise WeightError(msg)
        return absent


def _plain(name: str) -> str:
    """Return the name that a tensor had before an adapter was put around its layer."""
    return name.replace(".base_layer.", ".")


def _prefix(names: Iterable[str], files: Collection[str]) -> str:
    """Return what the module's names have in front of the files', the shortest of equals.

    Example:
        >>> _prefix(["net.norm.weight", "net.out.norm.weight"], ["norm.weight", "out.norm.weight"])
        'net.'
    """
    counts = Counter({"": 0})
    for name in map(_plain, names):
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in files:
                counts[".".join([*parts[:start], ""])] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)))


def _safetensors() -> Any:
    try:
        return import_module("safetensors")
    except ModuleNotFoundError:
        msg = (
            "weights=... is given, and safetensors is not installed. Rule: that package reads "
            "them. Remedy: pip install 'pipeswift-lightning[hf]'"
        )
        raise WeightError(msg) from None
