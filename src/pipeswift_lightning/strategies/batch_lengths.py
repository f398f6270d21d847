"""What a batch tells of its samples: how long they are, and which belong together."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from pipeswift_lightning.plan.workload import Layout
from pipeswift_lightning.runtime.batching import tensors_by_path
from pipeswift_lightning.runtime.lengths import (
    SampleLengths,
    find_lengths,
    told_lengths,
    told_sessions,
)
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.padding import PaddingSeen
from pipeswift_lightning.runtime.profiler import length_of
from pipeswift_lightning.runtime.restoring import Trim
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["BatchLengths", "Known"]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a batch's samples.

    Attributes:
        lengths: Their lengths, and what may be trimmed.
        layout: How those of a micro-batch lie in memory.
        free: Whether any samples may form a micro-batch.
        sessions: Of each sample, if its module tells.
    """

    lengths: SampleLengths
    layout: Layout
    free: bool
    sessions: tuple[Hashable, ...] | None

    def key(self, call: StepCall) -> Hashable:
        """Return what tells plans apart."""
        lengths = self.lengths.lengths
        return lengths, self.layout, self.free, self.sessions, call.sizes, call.training

    def trim(self, batch: Any, samples: tuple[tuple[int, ...], ...]) -> Trim | None:
        """Return what is cut off micro-batches of these samples; None if rows differ in width."""
        widths = _widths(batch, self.lengths)
        if len(widths) != 1:
            return None
        width = widths.pop()
        lengths = self.lengths.lengths
        kept = tuple(min(width, max(lengths[i] for i in part)) for part in samples)
        return Trim(width, kept)


class BatchLengths:
    """Reads batches, and remembers what their padding was.

    Args:
        module: The user's module, whose hooks may tell.
        buckets: Lengths to which those of samples are rounded up; none: they stay.
    """

    def __init__(self, module: LightningModule, buckets: tuple[int, ...] | int | None) -> None:
        self._module = module
        self._buckets = tuple(sorted(buckets)) if isinstance(buckets, tuple) else buckets
        self._told: set[str] = set()  # hooks whose batches do not fit what the module tells
        self._padding = PaddingSeen()  # of this pipeline's batches: all its ranks see the same

    @property
    def splits_itself(self) -> bool:
        """Whether the module splits its batches."""
        return callable(getattr(self._module, "split_batch", None))

    def of(self, call: StepCall, *, trims: bool) -> Known:
        """Return what is known of a step's batch, and remember its padding."""
        return self._known_or_width(call, self._padding, trims=trims)

    def ahead(self, call: StepCall, *, trims: bool) -> Known:
        """Return the same, and remember nothing: other ranks may not see this batch, or later."""
        return self._known_or_width(call, self._padding.copy(), trims=trims)

    def _known_or_width(self, call: StepCall, padding: PaddingSeen, *, trims: bool) -> Known:
        try:
            return self._known(call, padding, trims=trims)
        except Exception as error:
            if call.training:
                raise
            # Evaluation's batches may lack what the module's hooks read in training batches.
            if call.hook not in self._told:
                self._told.add(call.hook)
                rank_zero_info(
                    f"pipeswift: what {type(self._module).__name__} tells of its batches does not "
                    f"fit those of {call.hook} ({error!r}): they are planned by their width."
                )
        packed = isinstance(call.source, PackedBatch)
        lengths = SampleLengths(call.source.lengths, {}) if packed else _equal_lengths(call)
        return Known(lengths, _layout(call), free=False, sessions=None)

    def what_is_cut(self, known: Known) -> str:
        """Return in words what may be cut off: tensors, dims, and the padding's values."""
        dims = sorted(known.lengths.dims.items())
        return str([(path, which, self._padding.value(path)) for path, which in dims])

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge alike, as plain values."""
        return self._padding.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""
        self._padding.load_state(state)

    def _known(self, call: StepCall, padding: PaddingSeen, *, trims: bool) -> Known:
        lengths = self._lengths(call, padding, trims=trims)
        free = lengths is not None and not self.splits_itself
        if not call.training:
            # What evaluation returns of packed samples may have a row a token: its order stays.
            free = free and not call.packed
        lengths = lengths or _equal_lengths(call)
        hook = getattr(self._module, "sample_sessions", None)
        sessions = told_sessions(hook(call.batch), call.num_samples) if callable(hook) else None
        return Known(self._rounded(lengths, call), _layout(call), free, sessions)

    def _lengths(
        self, call: StepCall, padding: PaddingSeen, *, trims: bool
    ) -> SampleLengths | None:
        if isinstance(call.source, PackedBatch):
            return SampleLengths(call.source.lengths, {})
        if not trims:
            return None
        hook = getattr(self._module, "sample_lengths", None)
        if callable(hook):
            return told_lengths(
                call.batch, hook(call.batch), getattr(self._module, "length_dims", {})
            )
        return find_lengths(call.batch, padding)

    def _rounded(self, lengths: SampleLengths, call: StepCall) -> SampleLengths:
        """Round lengths up to the buckets, so that few shapes occur."""
        if self._buckets is None or call.packed or not lengths.dims:
            return lengths
        widest = max(_widths(call.batch, lengths))
        rounded = (min(widest, self._bucket(length, widest)) for length in lengths.lengths)
        return replace(lengths, lengths=tuple(rounded))

    def _bucket(self, length: int, widest: int) -> int:
        if isinstance(self._buckets, int):
            return -(-length // self._buckets) * self._buckets
        # Rows longer than all buckets keep all of their padding: one more shape.
        return next((b for b in self._buckets or () if b >= length), widest)


def _widths(batch: Any, lengths: SampleLengths) -> set[int]:
    """Return how long the dims are that run over the tokens."""
    leaves = dict(tensors_by_path(batch))
    return {int(leaves[path].shape[dim]) for path, dims in lengths.dims.items() for dim in dims}


def _layout(call: StepCall) -> Layout:
    return Layout.PACKED if call.packed else Layout.PADDED


def _equal_lengths(call: StepCall) -> SampleLengths:
    """Return the lengths of a batch's samples as if they were all as long as it is wide."""
    return SampleLengths((max(1, length_of(call.batch)),) * call.num_samples, {})
