"""Random streams that do not depend on the number of stages or on the order of micro-batches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

__all__ = ["Reseed", "enter_layer", "preserved_rng", "reseeder", "reseeders", "stream_seed"]

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
# What draws from a stream: the user's code in the gap before a layer, or a layer.
_GAP, _LAYER = 0, 1


def stream_seed(*key: int) -> int:
    """Mix integers into a 63-bit seed (the SplitMix64 finaliser over each part in turn).

    ``hash()`` would differ from process to process, and sums of multiples collide.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA '14.

    Example:
        >>> stream_seed(1, 2) == stream_seed(1, 2), stream_seed(1, 2) == stream_seed(2, 1)
        (True, False)
    """
    return _mixed(_START, key) >> 1


def _mixed(state: int, key: tuple[int, ...]) -> int:
    for part in key:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


Reseed = Callable[[int, bool], None]


def reseeder(device: torch.device, *key: int) -> Reseed:
    """Return a function (index, is_layer) that seeds the generators for that layer or gap.

    The generators are seeded directly: ``torch.manual_seed`` costs a hundred times as much.
    """
    return _reseeder(_mixed(_START, key), _cuda_generator(device))


def reseeders(device: torch.device, *key: int) -> Callable[[int], Reseed]:
    """Return the function from a micro-batch to its `reseeder`, whose key ends with it."""
    state, cuda = _mixed(_START, key), _cuda_generator(device)
    return lambda micro_batch: _reseeder(_mixed(state, (micro_batch,)), cuda)


def _reseeder(state: int, cuda: torch.Generator | None) -> Reseed:
    gaps = _mixed(state, (_GAP,))
    host = torch.default_generator

    def reseed(index: int, is_layer: bool) -> None:  # noqa: FBT001 -- two kinds, one hot call
        # As in `enter_layer`, but with few calls: this runs several times in a micro-batch.
        state, key = (_START, (host.initial_seed(), _LAYER)) if is_layer else (gaps, (index,))
        seed = _mixed(state, key) >> 1
        host.manual_seed(seed)
        if cuda is not None:
            cuda.manual_seed(seed)
        if index == 0 and not is_layer:
            # A run of the step begins: what it draws elsewhere agrees on all stages.
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 -- users' code draws from it

    return reseed


def enter_layer(device: torch.device) -> None:
    """Seed the generators for a layer, from the seed of the gap before it alone.

    So activation checkpointing, which restores the random state from before a layer's call, makes
    the layer draw the same again.
    """
    reseeder(device)(0, True)  # noqa: FBT003 -- a layer


@cache  # to ask the device takes as long as to seed
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were: a strategy must never consume them."""
    cpu = torch.default_generator.get_state()
    # As a dict: as a tuple, numpy's state takes twice the time, longer than all else here.
    others = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    generator = _cuda_generator(device)
    cuda = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002
        if generator is not None and cuda is not None:
            generator.set_state(cuda)


def _cuda_generator(device: torch.device) -> torch.Generator | None:
    if not _is_cuda(device):
        return None
    index: int | None = device.index
    if index is None:
        index = torch.cuda.current_device()
    return torch.cuda.default_generators[index]
