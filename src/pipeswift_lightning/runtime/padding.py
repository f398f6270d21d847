"""What tensors hold where rows have no token: found in one batch, and held against later ones.

One cell, or cells that happen to be alike, may be a row's last token as well as padding: a target
that is as wide as its source in one batch only is no row of padded tokens.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["PaddingSeen"]

_ENOUGH = 2  # rows' cells that must have held the value


class PaddingSeen:
    """The one value of each tensor's padding, as a run's batches have shown it.

    Example:
        >>> import torch
        >>> seen = PaddingSeen()
        >>> [seen.takes("ids", torch.tensor([0]), 1) for _ in range(2)]  # one cell says too little
        [False, True]
        >>> seen.takes("ids", torch.tensor([7]), 1), seen.takes("ids", torch.tensor([0]), 1)
        (False, False)
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, int] | None] = {}  # None: not padding alone

    def takes(self, path: str, cells: Tensor, positions: int) -> bool:
        """Take what a batch holds where its rows have no token; whether all of it is padding.

        Args:
            path: The tensor's place in the batch.
            cells: What it holds there. Shape ``[any]``, ``[any, ...]``.
            positions: Number of places without a token in the batch.

        Returns:
            False until two places have held the value, and for good once one held another.
        """
        if not cells.numel():  # nothing is cut off
            return True
        before = self._seen.get(path, ())
        if before is None:
            return False
        first = cells.reshape(-1)[0]
        value, count = before or (first.item(), 0)
        if not bool((cells == value).all()):
            self._seen[path] = None
            return False
        count = min(count + positions, _ENOUGH)
        self._seen[path] = value, count
        return count == _ENOUGH

    def value(self, path: str) -> Any:
        """Return the value of a tensor's padding; ``None`` if none has been seen."""
        seen = self._seen.get(path)
        return None if seen is None else seen[0]

    def copy(self) -> "PaddingSeen":
        """Return a memory that takes what comes apart from this one."""
        copied = PaddingSeen()
        copied._seen = dict(self._seen)
        return copied

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge alike, as plain values."""
        return {path: None if seen is None else list(seen) for path, seen in self._seen.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""
        self._seen = {
            path: None if seen is None else (seen[0], seen[1]) for path, seen in state.items()
        }
