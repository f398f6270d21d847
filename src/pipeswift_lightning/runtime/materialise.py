"""Give data to what a module holds on the meta device: this stage's share of it, and no more.

A parameter's data comes from a source, such as a file, or else from the initialisation of the small
module that holds it, with a seed of that module's name: the same at any number of stages.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.ownership import ParameterTable
from pipeswift_lightning.runtime.rng import preserved_rng, stream_seed

__all__ = ["MaterialiseError", "Materialiser", "absent_names"]

_CPU = torch.device("cpu")


class MaterialiseError(RuntimeError):
    """A tensor on the meta device cannot be given data."""


def absent_names(module: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters on the meta device.

    Example:
        >>> sorted(absent_names(nn.Linear(1, 1, device="meta")))
        ['bias', 'weight']
    """
    return frozenset(name for name, p in module.named_parameters() if p.is_meta)


class Materialiser:
    """Makes meta tensors real, in place: optimizers keep the objects that they hold.

    Args:
        module: The module.
        find: Returns the data for a tensor of any of these names, or ``None``.
        initialise: Initialises a small module by its own means; returns whether it can.
        seed: The run's seed.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        find: Callable[[Collection[str]], Tensor | None],
        initialise: Callable[[nn.Module], bool],
        seed: int,
    ) -> None:
        self._module = module
        self._find = find
        self._initialise = initialise
        self._seed = seed

    def buffers(self) -> None:
        """Make all buffers real: masks and frequencies, which every stage may need.

        Raises:
            MaterialiseError: One is neither found nor set by its module's initialisation.
        """
        for prefix, child in self._module.named_modules():
            names = {
                f"{prefix}.{leaf}" if prefix else leaf: leaf
                for leaf, buffer in child._buffers.items()
                if buffer is not None and buffer.is_meta
            }
            for leaf in names.values():
                child._buffers[leaf] = _blank(child._buffers[leaf])
            saved = {n: leaf for n, leaf in names.items() if leaf not in _unsaved(child)}
            tensors = {name: child._buffers[leaf] for name, leaf in names.items()}
            self._fill(prefix, child, tensors, {name: (name,) for name in saved})

    def parameters(self, names: Collection[str]) -> None:
        """Make the parameters of these (canonical) names real, on the host.

        Raises:
            MaterialiseError: One is neither found nor set by its module's initialisation.
        """
        table = ParameterTable.of(self._module)
        wanted = set(names)
        for prefix, child in self._module.named_modules():
            mine: dict[str, Tensor | None] = {}
            for parameter in child._parameters.values():
                name = table.names[id(parameter)] if parameter is not None else ""
                # Tied parameters are set by the module that holds them first.
                if parameter is None or not parameter.is_meta or name not in wanted:
                    continue
                if name.rpartition(".")[0] == prefix:
                    mine[name] = parameter
            for parameter in mine.values():
                _make_real(parameter)
            self._fill(prefix, child, mine, {name: table.aliases[name] for name in mine})

    def _fill(
        self,
        prefix: str,
        child: nn.Module,
        tensors: Mapping[str, Tensor | None],
        sources: Mapping[str, Collection[str]],
    ) -> None:
        missing: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            assert tensor is not None
            data = self._find(sources[name]) if name in sources else None
            if data is None:
                missing[name] = tensor
                continue
            if data.shape != tensor.shape:
                msg = (
                    f"{name} has the shape {list(tensor.shape)}, but its file says "
                    f"{list(data.shape)}. Rule: weights fit the module. Remedy: build the module "
                    "with the configuration that the weights were saved with"
                )
                raise MaterialiseError(msg)
            with torch.no_grad():
                tensor.copy_(data)
        if missing:
            self._initialise_only(prefix, child, missing)

    @torch.no_grad()
    def _initialise_only(
        self, prefix: str, child: nn.Module, missing: Mapping[str, Tensor]
    ) -> None:
        changed = {id(tensor) for tensor in missing.values()}
        others = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        with _unchanged(t for t in others if id(t) not in changed), preserved_rng(_CPU):
            torch.default_generator.manual_seed(
                stream_seed(self._seed, zlib.crc32(prefix.encode()))
            )
            known = self._initialise(child)
        unset = [name for name, tensor in missing.items() if not known or _is_blank(tensor)]
        if unset:
            msg = (
                f"{unset[0]} is on the meta device, no file holds it, and {type(child).__name__} "
                "does not say how to set it. Rule: what is built on the meta device comes from "
                "weights=..., or from reset_parameters() (Hugging Face: _init_weights) of the "
                "module that holds it. Remedy: define that method, register a buffer as "
                "persistent, or build that module outside torch.device('meta')"
            )
            raise MaterialiseError(msg)


def _unsaved(child: nn.Module) -> set[str]:
    return child._non_persistent_buffers_set


def _blank(tensor: Tensor | None) -> Tensor:
    """Return a real tensor like ``tensor`` that shows whether it has been set."""
    assert tensor is not None
    blank = torch.empty_like(tensor, device="cpu")
    if blank.is_floating_point() or blank.is_complex():
        return blank.fill_(float("nan"))
    return blank if blank.dtype is torch.bool else blank.fill_(torch.iinfo(blank.dtype).min)


def _is_blank(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype is torch.bool:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _make_real(parameter: Tensor | None) -> None:
    assert isinstance(parameter, nn.Parameter)
    real = nn.Parameter(_blank(parameter.detach()), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


@contextmanager
def _unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo what a block does to tensors."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta]
    try:
        yield
    finally:
        for tensor, before in kept:
            tensor.copy_(before)
