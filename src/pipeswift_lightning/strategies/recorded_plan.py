"""The cut and the micro-batches that a checkpoint's run used, for a run on the same mesh."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RecordedPlan"]


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """What to use again where the user has chosen nothing.

    Attributes:
        layers: Number of layers of each stage.
        sizes: Samples in each micro-batch; empty if no step had run, or if the last one ran in one
            piece, as a loss that no weights explain has to: a resumed run may have other weights.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, ranges: Sequence[Sequence[int]] | None, sizes: Sequence[int] | None
    ) -> "RecordedPlan | None":
        """Return what a topology says; ``None`` if its run had not been cut yet.

        Example:
            >>> RecordedPlan.of([[0, 3], [3, 5]], [2, 2])
            RecordedPlan(layers=(3, 2), sizes=(2, 2))
            >>> RecordedPlan.of([[0, 3], [3, 5]], [4]).fits(4)
            False
        """
        if ranges is None:
            return None
        split = tuple(sizes) if sizes is not None and len(sizes) > 1 else ()
        return cls(tuple(stop - start for start, stop in ranges), split)

    def layers_for(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the layers of each stage, if there are as many layers as there were."""
        return self.layers if sum(self.layers) == num_layers else None

    def fits(self, batch_size: int) -> bool:
        """Whether a batch of this size was split by ``sizes``."""
        return bool(self.sizes) and sum(self.sizes) == batch_size
