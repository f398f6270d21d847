"""The closure that an optimizer evaluates: forward, backward, gradients."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from pipeswift_lightning.strategies.contract import ContractError

__all__ = ["once"]


def once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """Return ``closure``, which refuses to be evaluated a second time in one step.

    Optimizers that do so (SAM) look at all gradients in between, and each stage has its own only.

    Raises:
        ContractError: From the second evaluation.

    Example:
        >>> import torch
        >>> step = once(lambda: 1, torch.optim.SGD([torch.zeros(1)], 0.1))
        >>> step()
        1
    """
    evaluations = 0

    def counted() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations > 1:
            msg = (
                f"{type(optimizer).__name__} evaluates a training step more than once. Rule: over "
                "several stages, an optimizer sees one evaluation a step: what it would compute "
                "from all gradients in between (SAM's norm, a line search) would be one stage's. "
                "Remedy: a first-order optimizer such as AdamW"
            )
            raise ContractError(msg)
        return closure()

    return counted
