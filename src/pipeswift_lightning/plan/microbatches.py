"""How many samples of the batch go to which micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = [
    "MicroBatchError",
    "MicroBatches",
    "choose_num_micro_batches",
    "sizes_for",
    "split_batch_size",
]


class MicroBatchError(ValueError):
    """A batch that cannot be split as asked."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Consecutive runs of samples, one a micro-batch.

    Args:
        sizes: Number of samples of each micro-batch, 1 or more. Shape ``[num_micro_batches]``.

    Raises:
        MicroBatchError: There is no micro-batch, or one is empty.

    Example:
        >>> micro_batches = MicroBatches((3, 1))
        >>> micro_batches.num_micro_batches, micro_batches.batch_size, micro_batches.ranges
        (2, 4, (range(0, 3), range(3, 4)))
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        _check_sizes(self.sizes)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.sizes)

    @property
    def batch_size(self) -> int:
        """Number of samples, all micro-batches together."""
        return sum(self.sizes)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Samples of each micro-batch. Shape ``[num_micro_batches]``."""
        return tuple(range(a, b) for a, b in pairwise(accumulate(self.sizes, initial=0)))


def choose_num_micro_batches(batch_size: int, num_stages: int) -> int:
    """Return a number of micro-batches to start with when nothing is measured.

    Four a stage keep the bubble of equal micro-batches below a fifth; one stage has none to fill.

    Args:
        batch_size: Samples in the batch, 1 or more.
        num_stages: Number of stages, 1 or more.

    Raises:
        MicroBatchError: An argument is below 1.

    Example:
        >>> choose_num_micro_batches(64, num_stages=4), choose_num_micro_batches(6, num_stages=4)
        (16, 6)
    """
    for name, value in (("batch_size", batch_size), ("num_stages", num_stages)):
        if value < 1:
            message = (
                f"{name}={value} leaves nothing to run. Rule: 1 or more. Remedy: {name}=1, say"
            )
            raise MicroBatchError(message)
    return 1 if num_stages == 1 else min(batch_size, 4 * num_stages)


def split_batch_size(batch_size: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return sizes as equal as can be, the larger ones first.

    Args:
        batch_size: Samples in the batch.
        num_micro_batches: 1 or more, at most ``batch_size``.

    Raises:
        MicroBatchError: There would be an empty micro-batch, or none at all.

    Example:
        >>> split_batch_size(10, 4)
        (3, 3, 2, 2)
    """
    if not 1 <= num_micro_batches <= batch_size:
        message = (
            f"cannot split {batch_size} samples into {num_micro_batches} micro-batches. Rule: each "
            f"has a sample. Remedy: between 1 and {batch_size} micro-batches, or a larger batch"
        )
        raise MicroBatchError(message)
    size, larger = divmod(batch_size, num_micro_batches)
    return (size + 1,) * larger + (size,) * (num_micro_batches - larger)


def sizes_for(batch_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes for a batch that may be smaller than planned, e.g. the epoch's last.

    Micro-batches are filled in order until the samples run out; those left empty fall away.

    Args:
        batch_size: Samples in the batch, 1 or more, at most the sum of ``sizes``.
        sizes: Sizes for the full batch. Shape ``[num_micro_batches]``.

    Raises:
        MicroBatchError: The batch is empty or has more samples than ``sizes`` hold, or a size is
            below 1.

    Example:
        >>> sizes_for(6, [4, 4, 2])
        (4, 2)
    """
    _check_sizes(sizes)
    if not 1 <= batch_size <= sum(sizes):
        message = (
            f"micro-batches of {list(sizes)} samples hold 1 to {sum(sizes)} samples, but the batch "
            f"has {batch_size}. Rule: they hold the batch. Remedy: let them add up to its size"
        )
        raise MicroBatchError(message)
    before = accumulate(sizes, initial=0)
    return tuple(
        min(size, batch_size - start)
        for size, start in zip(sizes, before, strict=False)
        if start < batch_size
    )


def _check_sizes(sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        message = (
            f"sizes={list(sizes)} are no micro-batches. Rule: 1 sample or more each. Remedy: leave "
            "empty ones out"
        )
        raise MicroBatchError(message)
