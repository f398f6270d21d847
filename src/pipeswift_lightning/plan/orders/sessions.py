"""Micro-batches of one session keep their order, whatever else is reordered."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import numpy as np

from pipeswift_lightning.plan.evaluator import Ints
from pipeswift_lightning.plan.ordering import OrderError

__all__ = ["Repair", "session_groups", "session_repair"]

Repair: TypeAlias = Callable[[Ints], Ints]


def session_groups(samples_of: Sequence[Sequence[Hashable]]) -> tuple[int, ...]:
    """Return one session for each micro-batch, from the sessions of its samples.

    Micro-batches that share a session, directly or through others, get the same number.

    Args:
        samples_of: Session of each sample of each micro-batch; None belongs to no session.

    Example:
        >>> session_groups([["a"], ["b", "c"], ["a"], ["c"], [None]])
        (0, 1, 0, 1, 4)
    """
    group = list(range(len(samples_of)))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    first: dict[Hashable, int] = {}
    for i, sessions in enumerate(samples_of):
        for session in sessions:
            if session is not None:
                a, b = sorted((root(first.setdefault(session, i)), root(i)))
                group[b] = a
    return tuple(root(i) for i in range(len(samples_of)))


def session_repair(sessions: Sequence[Hashable] | None, num_micro_batches: int) -> Repair | None:
    """Return what puts the micro-batches of each session back in order, or None if nothing can be.

    A session's micro-batches keep the positions that the session has in the order.

    Args:
        sessions: Session of each micro-batch. Shape ``[m]``. None: all are independent.
        num_micro_batches: ``m``.

    Raises:
        OrderError: ``sessions`` has another length.

    Example:
        >>> repair = session_repair(["a", "b", "a", "c"], 4)
        >>> repair(np.array([[2, 3, 0, 1], [0, 1, 2, 3]])).tolist()
        [[0, 3, 2, 1], [0, 1, 2, 3]]
    """
    if sessions is None:
        return None
    if len(sessions) != num_micro_batches:
        message = (
            f"sessions={list(sessions)} names {len(sessions)} sessions. Rule: one for each of the "
            f"{num_micro_batches} micro-batches. Remedy: name each one's session"
        )
        raise OrderError(message)
    number: dict[Hashable, int] = {}
    session_of = np.array([number.setdefault(session, len(number)) for session in sessions])
    if len(number) == num_micro_batches:
        return None
    members = np.argsort(session_of, kind="stable")

    def repair(orders: Ints) -> Ints:
        places = np.argsort(session_of[orders], axis=1, kind="stable")
        out = np.empty_like(orders)
        np.put_along_axis(out, places, np.broadcast_to(members, orders.shape), axis=1)
        return out

    return repair
