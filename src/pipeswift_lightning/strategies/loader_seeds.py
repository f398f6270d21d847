"""The random states that the order of an epoch's batches depends on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeswift_lightning.strategies.random_state import get_random_state, set_random_state

__all__ = ["LoaderSeeds", "own_generators"]

Generator = torch.Generator | random.Random | np.random.Generator


@dataclass(slots=True)
class LoaderSeeds:
    """The random states in which the epoch's iterator was made, and in which it was first asked.

    Lightning makes the first epoch's iterator long before its first batch, the others' just before.

    Attributes:
        device: Whose global generator counts beside the host's.
        loaders: The loaders, whose own generators count too.
    """

    device: torch.device
    loaders: Sequence[object] = ()
    before_iterator: dict[str, Any] | None = None
    before_batches: dict[str, Any] | None = None
    _is_made: bool = field(default=False)

    def now(self) -> dict[str, Any]:
        """Return the state of every generator."""
        states = [_state(generator) for generator in own_generators(self.loaders)]
        return {"global": get_random_state(self.device), "loaders": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give every generator the state that `now` has returned, perhaps in another process."""
        set_random_state(state["global"], self.device)
        generators = list(own_generators(self.loaders))
        if len(generators) != len(state["loaders"]):
            rank_zero_warn(
                f"pipeswift: the loaders hold {len(generators)} random generators of their own, "
                f"those of the checkpoint held {len(state['loaders'])}: the order of the batches "
                "may differ from what it would have been. Use the loaders of the run that saved."
            )
            return
        for generator, own in zip(generators, state["loaders"], strict=True):
            _set_state(generator, own)

    def note_set_up(self) -> None:
        """Note that Lightning is about to make an iterator outside an epoch."""
        self.before_iterator, self.before_batches = self.now(), None
        self._is_made = True

    def note_epoch(self) -> None:
        """Note that an epoch begins."""
        now = self.now()
        if self._is_made:
            self.before_batches, self._is_made = now, False
        else:
            self.before_iterator, self.before_batches = now, None

    def as_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"iterator": self.before_iterator, "batches": self.before_batches}

    def load(self, state: Mapping[str, Any], *, is_made: bool) -> None:
        """Take what a checkpoint has kept."""
        self.before_iterator, self.before_batches = state["iterator"], state["batches"]
        self._is_made = is_made


def own_generators(loaders: Sequence[object]) -> Iterator[Generator]:
    """Find the generators that loaders, their samplers and their data sets hold themselves.

    Example:
        >>> sampler = torch.utils.data.RandomSampler(range(3), generator=torch.Generator())
        >>> loader = torch.utils.data.DataLoader(range(3), sampler=sampler)
        >>> list(own_generators([loader])) == [sampler.generator]
        True
    """
    seen: set[int] = set()
    for loader in loaders:
        for holder in _holders(loader):
            for value in getattr(holder, "__dict__", {}).values():
                if isinstance(value, Generator) and id(value) not in seen and _is_plain(value):
                    seen.add(id(value))
                    yield value


def _holders(loader: object) -> Iterator[object]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    yield loader
    yield from (getattr(loader, "sampler", None), batch_sampler)
    yield getattr(batch_sampler, "sampler", None)
    yield from (dataset, getattr(dataset, "dataset", None))


def _is_plain(generator: Generator) -> bool:
    """Whether its state is made of what a checkpoint may hold."""
    return all(
        isinstance(x, int | str | float | Tensor | None) for x in tree_leaves(_state(generator))
    )


def _state(generator: Generator) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
        case _:
            return dict(generator.bit_generator.state)


def _set_state(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            generator.bit_generator.state = state
