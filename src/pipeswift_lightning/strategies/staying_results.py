"""Spare Lightning to move a logged result to the device on which it is.

Each ``self.log`` moves the result that it adds to, whether it has to be moved or not, and a move
copies what the result knows about itself, deeply. That is most of the time of a call, and every
rank makes it between two steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

__all__ = ["staying_results"]


@contextmanager
def staying_results() -> Iterator[None]:
    """While a block runs, move only results that are elsewhere."""
    move = _ResultMetric.to

    def moved(result: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
        if len(args) == 1 and not kwargs and _is_on(result, args[0]):
            return result
        return move(result, *args, **kwargs)

    _ResultMetric.to = moved  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _ResultMetric.to = move  # type: ignore[method-assign]


def _is_on(result: _ResultMetric, device: Any) -> bool:
    """Whether all that a result of tensors would move is on ``device``."""
    if not (result.is_tensor and isinstance(device, torch.device)):
        return False
    tensors = [x for x in vars(result).values() if isinstance(x, Tensor)]
    return all(x.device == device for x in tensors)
