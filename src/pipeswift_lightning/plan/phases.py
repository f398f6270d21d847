"""A row in two halves: its forwards, and its backwards, which may come much later."""

from collections.abc import Sequence

from pipeswift_lightning.plan.instructions import (
    Forward,
    Instruction,
    ReceiveActivation,
    SendActivation,
)

__all__ = ["split_phases"]

_FORWARD = (Forward, ReceiveActivation, SendActivation)


def split_phases(
    row: Sequence[Instruction],
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Split a lowered row of a training schedule into its forward and its backward phase.

    Each keeps its order, so messages still match: activations and gradients have edges of their
    own. The gradients' receives, which a lowered row posts during the forwards, move to the
    backward phase with the rest: other runs may come in between, and not every forward gets a
    backward.

    Args:
        row: One rank's row, as ``lowering.lower`` made it.

    Returns:
        Forwards with the activations' messages; and the rest.

    Example:
        >>> from pipeswift_lightning.plan.lowering import lower
        >>> from pipeswift_lightning.plan.schedules import gpipe
        >>> forward, backward = split_phases(lower(gpipe(2, 1)).rows[0])
        >>> [type(i).__name__ for i in forward]
        ['Forward', 'SendActivation']
        >>> [type(i).__name__ for i in backward]
        ['ReceiveGradient', 'Backward', 'Free']
    """
    forward = tuple(i for i in row if isinstance(i, _FORWARD))
    return forward, tuple(i for i in row if not isinstance(i, _FORWARD))
