"""A module that was built on the meta device: each rank gives data to its own share alone."""

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pipeswift_lightning.runtime.materialise import MaterialiseError, Materialiser, absent_names
from pipeswift_lightning.runtime.ownership import ParameterTable
from pipeswift_lightning.strategies.hugging_face import initialiser
from pipeswift_lightning.strategies.weights import NoWeights, WeightError, WeightFiles

__all__ = ["Division", "divided_names"]

_DIVIDED = "_pipeswift_divided"
Find = Callable[[Collection[str]], Tensor | None]


def divided_names(module: LightningModule) -> frozenset[str]:
    """Return the parameters that were built on the meta device, and are never whole on a rank."""
    names: frozenset[str] = module.__dict__.get(_DIVIDED, frozenset())
    return names


class Division:
    """Gives data to a module's meta tensors, once it is known which of them live here.

    The buffers, small and needed anywhere, are made at once.

    Args:
        module: The user's module.
        weights: The file or folder that holds its parameters, if any does.

    Raises:
        WeightError: The files hold nothing of the module.
        MaterialiseError: A buffer cannot be set.
    """

    def __init__(self, module: LightningModule, weights: str | Path | None) -> None:
        self._module = module
        self._begun_before = bool(divided_names(module))
        self._checkpoint: Find | None = None
        self._strict = True
        if not self._begun_before:
            module.__dict__[_DIVIDED] = absent_names(module)
        names = (n for n, _ in (*module.named_parameters(), *module.named_buffers()))
        self._files = WeightFiles(weights, names) if weights is not None else NoWeights()
        aliases = ParameterTable.of(module).aliases
        missing = self._files.missing({n: a for n, a in aliases.items() if n in self.names})
        if missing and not self._begun_before:
            rank_zero_warn(
                f"pipeswift: {len(missing)} parameters ({missing[0]}, ...) are not in "
                f"weights={str(weights)!r}; they are initialised, as a new head would be."
            )
        self._materialiser = Materialiser(
            module, find=self._find, initialise=initialiser(module), seed=torch.initial_seed()
        )
        self._materialiser.buffers()

    @classmethod
    def of(
        cls, module: LightningModule, weights: str | Path | None, *, whole: bool
    ) -> "Division | None":
        """Return the division of ``module``, or ``None`` if it has no meta tensors.

        Args:
            module: The user's module.
            weights: The file or folder that holds its parameters.
            whole: Whether this rank has all parameters, and needs no first step to know it.

        Raises:
            WeightError: ``weights`` is given, but nothing waits for them.
        """
        tensors = (*module.parameters(), *module.buffers())
        if any(tensor.is_meta for tensor in tensors):
            division = cls(module, weights)
            if whole:
                division.parameters(division.names)
            return division
        if weights is not None and not divided_names(module):
            msg = (
                f"weights={str(weights)!r}, but all parameters of {type(module).__name__} have "
                "data already. Rule: weights are for modules built on the meta device. Remedy: "
                'build the network in configure_model(), under `with torch.device("meta"):`'
            )
            raise WeightError(msg)
        return None

    @property
    def names(self) -> frozenset[str]:
        """The parameters that were on the meta device at first."""
        return divided_names(self._module)

    def parameters(self, names: Collection[str]) -> None:
        """Give data to these parameters, if they have none yet.

        Raises:
            MaterialiseError: An earlier run gave them to another stage.
        """
        wanted = absent_names(self._module) & set(names)
        if wanted and self._begun_before and self._checkpoint is None:
            msg = (
                f"{min(wanted)} was trained on another stage in an earlier run of this process. "
                "Rule: a module built on the meta device stays divided as it was. Remedy: give "
                "stages=... and partition=... alike, or ckpt_path=..."
            )
            raise MaterialiseError(msg)
        self._materialiser.parameters(wanted)
        self._checkpoint = None
        if not absent_names(self._module):  # one stage has it all
            self._module.__dict__[_DIVIDED] = frozenset()

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take a checkpoint's state: for what has data now, and for what gets it later.

        Args:
            state: By name, as of the whole module.
            strict: Whether its names have to be the module's; otherwise what it lacks comes from
                the files of weights.

        Raises:
            MaterialiseError: Names or shapes are not the module's.
        """
        try:
            with warnings.catch_warnings():
                # Names and shapes of meta tensors are compared too; their data waits.
                warnings.filterwarnings("ignore", message=".*meta parameter.*no-op")
                self._module.load_state_dict(dict(state), strict=strict)
        except RuntimeError as error:
            msg = (
                f"{error} Rule: a checkpoint is of the same module. Remedy: resume with the "
                "configuration that wrote it, or set strict_loading=False on the LightningModule "
                "if it holds some parameters only, such as adapters"
            )
            raise MaterialiseError(msg) from error
        self.read_later(
            lambda names: next((state[name] for name in names if name in state), None),
            strict=strict,
        )

    def read_later(self, find: Find, *, strict: bool = True) -> None:
        """Take parameters from a checkpoint, once it is known which of them live here."""
        self._checkpoint, self._strict = find, strict

    def _find(self, names: Collection[str]) -> Tensor | None:
        if self._checkpoint is None:
            return self._files.find(names)
        found = self._checkpoint(names)
        if found is not None:
            return found
        if self._strict or self._begun_before:  # then trained data may be on another stage
            msg = (
                f"the checkpoint holds no {min(names)}. Rule: it is of the same module. Remedy: "
                "resume with the configuration that wrote it"
            )
            raise MaterialiseError(msg)
        return self._files.find(names)
