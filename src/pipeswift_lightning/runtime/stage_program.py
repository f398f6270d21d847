"""What an executor asks: a stage to compute, and the other ranks whether it may go on."""

from collections.abc import Hashable
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Admission", "StageProgram"]


class Admission(Protocol):
    """Lets a run send and wait, or raises."""

    def __call__(self, *, patience_s: float | None = None) -> object:
        """Return when it may; after ``patience_s`` in any case."""
        ...


class StageProgram(Protocol):
    """What a stage computes; the executor decides when."""

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        """Run the stage on one micro-batch.

        Args:
            stage: The stage.
            micro_batch: The micro-batch's id.
            received: What the stage before sent (``None`` on the first stage).

        Returns:
            The structure of tensors for the next stage; on the last stage a scalar loss to
            differentiate, or ``None``.
        """
        ...

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        """Differentiate the loss of one micro-batch (on the last stage)."""
        ...

    def signature(self, micro_batch: int) -> Hashable:
        """Return what determines the shapes of the micro-batch's activations."""
        ...
