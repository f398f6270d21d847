"""Read single tensors out of safetensors files, so that each rank reads its own only."""

import json
from collections.abc import Collection, Mapping
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

    Raises:
        WeightError: There is no such file, or the folder holds several without an index.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._safe_open: Any = _safetensors().safe_open
        self._files: Mapping[str, Path] = self._list()

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
        """Return the file's name for a tensor: the module's, with or without its first parts."""
        for name in names:
            parts = name.replace(".base_layer.", ".").split(".")
            for start in range(max(1, len(parts) - 1)):
                key = ".".join(parts[start:])
                if key in self._files:
                    return key
        return None

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
                "agree, except for the module's first parts. Remedy: name the files of this model"
            )
            raise WeightError(msg)
        return absent


def _safetensors() -> Any:
    try:
        return import_module("safetensors")
    except ModuleNotFoundError:
        msg = (
            "weights=... needs the package safetensors, which is not installed. Remedy: "
            "pip install 'pipeswift-lightning[hf]'"
        )
        raise WeightError(msg) from None
