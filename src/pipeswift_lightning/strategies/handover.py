"""Hold a step's gradients between the pipeline's run and Lightning's backward."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

__all__ = ["GradientHandover", "skipped_loss", "with_leaf_loss"]


class GradientHandover:
    """Keeps new gradients aside until Lightning has called its hooks.

    Lightning runs ``training_step``, then ``zero_grad``, then ``backward``; a pipeline interleaves
    forward and backward, so its gradients exist before ``zero_grad`` runs. They wait here, and the
    accumulated ones of earlier batches wait outside meanwhile.
    """

    def __init__(self) -> None:
        self._accumulated: dict[str, Tensor | None] = {}
        self._new: list[tuple[nn.Parameter, Tensor]] = []

    def begin(self, module: nn.Module) -> None:
        """Put the gradients that are there aside."""
        self._new = []
        self._accumulated = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                self._accumulated[name] = parameter.grad
                parameter.grad = None

    def end(self, parameters: Mapping[str, nn.Parameter], *, skipped: bool) -> None:
        """Take the step's gradients, and put the accumulated ones back.

        A skipped batch has none, though earlier stages were told that theirs are zero.
        """
        for name, parameter in parameters.items():
            if parameter.grad is not None and not skipped:
                self._new.append((parameter, parameter.grad))
            parameter.grad = self._accumulated.get(name)
        self._accumulated = {}

    def hand_over(self) -> None:
        """Add the step's gradients to those that are there."""
        for parameter, gradient in self._new:
            held = parameter.grad
            parameter.grad = gradient if held is None else held.add_(gradient)
        self._new = []


def skipped_loss(device: torch.device) -> Tensor:
    """Return a loss for a step that returned ``None``: nan, which depends on nothing.

    Lightning lets no step of several processes return ``None``, since one could skip a batch that
    the others train on. The stages of one pipeline have agreed to skip it.
    """
    rank_zero_warn(
        "training_step returned None: all stages skip this batch. If this was on purpose, ignore "
        "this warning"
    )
    return torch.full((), float("nan"), device=device, requires_grad=True)


def with_leaf_loss(output: Any) -> Any:
    """Give Lightning a loss that it may call backward on; the gradients are already there."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_()
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"].detach().requires_grad_()}
    return output
