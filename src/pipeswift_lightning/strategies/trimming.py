"""Whether padding is cut off, and when that is compared with leaving it."""

from collections.abc import Mapping
from typing import Any

from pipeswift_lightning.runtime.batching import tensors_by_path
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["Trimming"]


class Trimming:
    """What the user wants, and what checks have found, for each step hook by itself.

    Args:
        wanted: The option: true, false, or ``"auto"``.
    """

    def __init__(self, wanted: bool | str) -> None:  # noqa: FBT001 -- the user's own argument
        self._wanted = wanted
        self._kept: set[str] = set()  # hooks of steps that need their padding
        self._looked: set[str] = set()  # what was cut off when checks have compared
        self._checks: dict[str, int] = {}

    def applies(self, hook: str) -> bool:
        """Whether the micro-batches of a step hook are trimmed."""
        return self._wanted is not False and hook not in self._kept

    def is_checked(self, planned: StepCall, cut: str) -> bool:
        """Whether a step's trimmed micro-batches are to be compared with untrimmed ones.

        They are when what is cut off is new, a tensor or its padding, and now and then. Packed ones
        are not: that the loss may see micro-batches has been found with them.

        Args:
            planned: The step.
            cut: What is cut off, in words.
        """
        if self._wanted != "auto" or planned.packed or not _is_cut(planned):
            return False
        # With several loaders, a step may do other things with the batches of each.
        kind = " ".join([planned.hook, *map(str, planned.rest[1:])])
        mark = f"{kind}: {cut}"
        new = mark not in self._looked
        self._looked.add(mark)
        count = self._checks.get(kind, 0)
        self._checks[kind] = count + 1
        return new or count & (count - 1) == 0

    def keep_padding(self, hook: str) -> None:
        """Trim no more in steps of this hook: the padding matters."""
        self._kept.add(hook)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to trim alike, as plain values."""
        return {
            "kept": sorted(self._kept),
            "looked": sorted(self._looked),
            "checks": dict(self._checks),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has returned."""
        self._kept |= set(state["kept"])
        self._looked, self._checks = set(state["looked"]), dict(state["checks"])


def _is_cut(planned: StepCall) -> bool:
    """Whether a micro-batch lacks padding that the batch has."""
    whole = dict(tensors_by_path(planned.batch))
    return planned.trimmed and any(
        tensor.shape[1:] != whole[path].shape[1:]
        for part in planned.micro_batches
        for path, tensor in tensors_by_path(part)
    )
