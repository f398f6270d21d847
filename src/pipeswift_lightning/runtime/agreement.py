"""Make sure that all ranks are about to do the same thing, before any of them computes."""

import hashlib
import time
from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

__all__ = ["Comparison", "DisagreementError", "require_agreement"]

_RULE = (
    "Rule: every rank of a pipeline draws the same batches and computes the same plan. "
    "Remedy: seed everything that shuffles or augments (seed_everything(s, workers=True)), "
    "use the same data, arguments and package versions on all ranks, and let no callback "
    "consume random numbers on one rank only"
)


_POLL_S = 0.005


class DisagreementError(RuntimeError):
    """Ranks that must agree do not."""


class Comparison:
    """A comparison of facts that is under way over the ranks of a group; each rank begins it.

    Costs one all-gather of 20 bytes; only a difference costs more.

    Args:
        facts: Named statements, such as the plan's digest and the batch's shapes.
        group: The ranks to compare; ``None`` for all.
        device: Where the group's backend expects tensors.
        remark: 32 bits that may differ from rank to rank.
        rule: What was expected and what to do, for the error's end.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        remark: int = 0,
        rule: str = _RULE,
    ) -> None:
        self._facts, self._rule = facts, rule
        self._group: dist.ProcessGroup | None = group
        text = "\x1f".join(f"{key}\x1e{value}" for key, value in facts.items())
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        message = bytearray(self._digest + remark.to_bytes(4, "little"))
        mine = torch.frombuffer(message, dtype=torch.uint8).to(device)
        self._every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work: dist.Work | None = dist.all_gather(
            self._every, mine, group=group, async_op=True
        )

    def result(self, patience_s: float | None = None) -> tuple[int, ...] | None:
        """Wait for the other ranks, once, and return the remarks of all.

        Args:
            patience_s: Give up after so many seconds: ``None`` is returned. ``None``: wait on.

        Raises:
            DisagreementError: On every rank of the group, naming each differing fact and both
                sides.
        """
        try:
            return self._result(patience_s)
        finally:  # a connection is open for as long as anything refers to it
            self._work, self._group, self._every = None, None, []

    def _result(self, patience_s: float | None) -> tuple[int, ...] | None:
        work = self._work
        if work is not None and patience_s is not None:
            end_s = time.monotonic() + patience_s
            while not work.is_completed():
                if time.monotonic() > end_s:
                    return None
                time.sleep(_POLL_S)
        if work is not None:
            work.wait()
        received = [other.cpu().numpy().tobytes() for other in self._every]
        if any(other[:16] != self._digest for other in received):
            _raise_difference(self._facts, self._group, self._rule)
        return tuple(int.from_bytes(other[16:], "little") for other in received)


def require_agreement(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    remark: int = 0,
    rule: str = _RULE,
) -> tuple[int, ...]:
    """Compare facts at once; arguments, result and errors are those of `Comparison`."""
    remarks = Comparison(facts, group, device, remark=remark, rule=rule).result()
    assert remarks is not None, "it waits for as long as it takes"
    return remarks


def _raise_difference(
    facts: Mapping[str, str], group: dist.ProcessGroup | None, rule: str
) -> NoReturn:
    everyone: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(facts), group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    lines = []
    for key in dict.fromkeys(k for side in everyone for k in side):
        sides: dict[str, list[int]] = {}
        for rank, side in zip(ranks, everyone, strict=True):
            sides.setdefault(side.get(key, "(absent)"), []).append(rank)
        if len(sides) > 1:
            parts = "; ".join(
                f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {v}" for v, r in sides.items()
            )
            lines.append(f"  {key}: {parts}")
    head = "the ranks of one job are about to do different things:"
    msg = "\n".join([head, *lines, rule])
    raise DisagreementError(msg)
