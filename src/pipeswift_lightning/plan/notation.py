"""A text form of schedules that reads as a picture, and reads back.

One line a rank, one cell an instruction. ``F0`` is the Forward of micro-batch 0 and ``B0`` its
Backward, on the stage with the number of the rank; ``F0@5`` is on stage 5. In lowered rows
``sa0>1`` sends an activation to rank 1, ``ra0<0`` posts its receive from rank 0, ``sg0>0`` and
``rg0<1`` do the same with a gradient, ``x0`` frees; the stage comes before the peer: ``sa0@5>1``.
``.`` is a unit of idle time, and means nothing to the parser.
"""

import re
from collections.abc import Callable, Mapping

from pipeswift_lightning.plan.dependencies import unit_starts
from pipeswift_lightning.plan.instructions import (
    Backward,
    Forward,
    Free,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
)

__all__ = ["ParseError", "draw", "parse"]

_CELL = re.compile(r"(F|B|x)(\d+)(?:@(\d+))?|(sa|sg|ra|rg)(\d+)(?:@(\d+))?([<>])(\d+)")
_LOCAL: Mapping[str, Callable[[int, int], Instruction]] = {"F": Forward, "B": Backward, "x": Free}
_WITH_PEER: Mapping[str, Callable[[int, int, int], Instruction]] = {
    "sa>": SendActivation,
    "ra<": ReceiveActivation,
    "sg>": SendGradient,
    "rg<": ReceiveGradient,
}


class ParseError(ValueError):
    """A text that is not a schedule; the message names line and cell, both counted from 1."""


def draw(schedule: Schedule) -> str:
    """Return the schedule as text, one line a rank; ``parse`` reads it back.

    Compute-only cells stand in the column of their start when each takes one unit of time. A rank
    that gets stuck has its remaining cells without gaps. Lowered rows are not aligned.

    Example:
        >>> rows = ((Forward(0, 0), Forward(0, 1)), (Forward(1, 0), Forward(1, 1)))
        >>> print(draw(Schedule(rows, num_stages=2)))
        F0 F1
        .  F0 F1
    """
    cells = [[_cell(i, rank) for i in row] for rank, row in enumerate(schedule.rows)]
    if not schedule.is_lowered:
        width = max(len(cell) for row in cells for cell in row)
        cells = [
            [cell.ljust(width) for cell in _spread(row, starts)]
            for row, starts in zip(cells, unit_starts(schedule), strict=True)
        ]
    return "\n".join(" ".join(row or ["."]).rstrip() for row in cells)


def parse(text: str) -> Schedule:
    """Return the schedule that ``text`` shows. Blank lines and ``.`` cells are skipped.

    Raises:
        ParseError: A cell is not an instruction; names line, cell and the forms there are.
        ScheduleError: The cells are instructions but make no schedule, e.g. a stage is missing.

    Example:
        >>> parse("F0 B0").rows
        ((Forward(stage=0, micro_batch=0), Backward(stage=0, micro_batch=0)),)
    """
    numbered = [(n, line.split()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = tuple(
        tuple(
            _instruction(cell, rank, f"line {number}, cell {place}")
            for place, cell in enumerate(line, 1)
            if cell != "."
        )
        for rank, (number, line) in enumerate(numbered)
    )
    return Schedule(rows, num_stages=1 + max((i.stage for row in rows for i in row), default=-1))


def _cell(instruction: Instruction, rank: int) -> str:
    cell = str(instruction)
    return cell.replace(f"@{rank}", "", 1) if instruction.stage == rank else cell


def _spread(cells: list[str], starts: tuple[int, ...]) -> list[str]:
    """Fill idle units with dots so that the cell with start ``t`` is the ``t``-th of the line."""
    line: list[str] = []
    for position, cell in enumerate(cells):
        if position < len(starts):
            line.extend("." for _ in range(starts[position] - len(line)))
        line.append(cell)
    return line


def _instruction(cell: str, rank: int, place: str) -> Instruction:
    found = _CELL.fullmatch(cell)
    kind = "" if found is None else (found[1] or found[4] + found[7])
    if found is not None and kind in _LOCAL:
        return _LOCAL[kind](int(found[3] or rank), int(found[2]))
    if found is not None and kind in _WITH_PEER:
        return _WITH_PEER[kind](int(found[6] or rank), int(found[5]), int(found[8]))
    message = (
        f"{place}: {cell!r} is no instruction; write F0 or B0 (compute), sa0>1 or sg0>1 (send to "
        "rank 1), ra0<1 or rg0<1 (receive), x0 (free) or '.', with @stage after the micro-batch"
    )
    raise ParseError(message)
