"""Plan the next batch while the present one trains.

Its lengths are known once the loader has it. To draw it early is exact only where nothing is drawn
from the process's own random numbers then: from worker processes, whose samples are chosen by one
of torch's samplers, or where Lightning itself has fetched it already. Other batches are planned at
the beginning of their own step.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pipeswift_lightning.runtime.peekable import Peekable

__all__ = ["LookAhead"]

# They draw all of their random numbers when an epoch begins, or from a generator of their own.
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler, WeightedRandomSampler)


class LookAhead:
    """Runs a function on the batch that comes next, in a thread.

    Args:
        prepare: The function. What it raises is passed over: the batch's own step raises it too.
    """

    def __init__(self, prepare: Callable[[Any], None]) -> None:
        self._prepare = prepare
        self._thread: Thread | None = None

    def begin(self, loop: _FitLoop) -> None:
        """Look at the next batch of a loop, if that changes nothing."""
        peek = _next_batch(loop)
        if peek is None:
            return
        self._thread = Thread(target=self._look, args=(peek,), daemon=True, name="pipeswift-plan")
        self._thread.start()

    def _look(self, peek: Callable[[], Any]) -> None:
        with suppress(Exception):  # the loop meets it again, where it can be told of
            self._prepare(peek())

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until the batch is prepared."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)


def _next_batch(loop: _FitLoop) -> Callable[[], Any] | None:
    """Return what gives the next batch, or None."""
    fetcher, combined = loop._data_fetcher, loop._combined_loader
    if combined is None or fetcher is None or fetcher.done or len(combined.flattened) != 1:
        return None
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches:
        fetched = fetcher.batches[0][0]
        return lambda: fetched
    iterators: list[Iterator[Any]] | None = getattr(combined._iterator, "iterators", None)
    if not iterators or not _draws_nothing(combined.flattened[0]):
        return None
    if isinstance(iterators[0], _MultiProcessingDataLoaderIter):
        iterators[0] = Peekable(iterators[0])
    peekable = iterators[0]
    return partial(peekable.peek, peekable.turn) if isinstance(peekable, Peekable) else None


def _draws_nothing(loader: Any) -> bool:
    """Whether to fetch from a loader early draws no random number in this process."""
    if type(loader) is not DataLoader or not isinstance(loader.batch_sampler, BatchSampler):
        return False
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in _SAMPLERS:
        return False
    return not (isinstance(loader.sampler, RandomSampler) and _draws_late(loader.sampler))


def _draws_late(sampler: RandomSampler) -> bool:
    """Whether a sampler draws from a generator that others may see, while an epoch runs."""
    repeats = sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return repeats and sampler.generator is not None
