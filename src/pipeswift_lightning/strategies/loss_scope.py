"""Whether the user's loss sees one micro-batch at a time or the whole batch."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pipeswift_lightning.strategies.options import LossScope
from pipeswift_lightning.strategies.records import MergedLog, merge_outputs, merge_records
from pipeswift_lightning.strategies.whole_batch import WholeBatchProgram

__all__ = ["LossPolicy", "difference"]

_ALWAYS_CHECKED = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class LossPolicy:
    """Chooses the scope of each training step, alike on every rank.

    A loss that is a mean over samples may be taken micro-batch by micro-batch, each weighted by
    its samples, which lets a backward begin early. Whether it is one cannot be seen in the code.
    So ``"auto"`` takes the first steps whole, which is always exact, and compares them with what
    the micro-batches give: the loss and every logged value. If all agree, later steps run
    micro-batch by micro-batch, and the check is repeated after 4, 8, 16, ... steps; at the first
    difference the whole batch is kept for good.
    """

    def __init__(self, chosen: LossScope) -> None:
        self._chosen = chosen
        self._steps = 0
        self._whole = chosen is LossScope.WHOLE_BATCH

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to choose alike."""
        return {"chosen": str(self._chosen), "steps": self._steps, "whole": self._whole}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, unless the user has chosen otherwise since."""
        if state["chosen"] == self._chosen:
            self._steps, self._whole = state["steps"], state["whole"]

    def next_step(self) -> tuple[LossScope, bool]:
        """Return the scope of the next training step, and whether to check it."""
        if self._chosen is LossScope.PER_SAMPLE:
            return LossScope.PER_SAMPLE, False
        if self._whole:
            return LossScope.WHOLE_BATCH, False
        step, self._steps = self._steps, self._steps + 1
        check = step < _ALWAYS_CHECKED or step & (step - 1) == 0
        return (LossScope.WHOLE_BATCH if check else LossScope.PER_SAMPLE), check

    def learn(self, what_differs: str | None) -> None:
        """Take the result of a check: the first value that differs, or ``None``."""
        if what_differs is not None and not self._whole:
            self._whole = True
            if self._steps > _ALWAYS_CHECKED:
                rank_zero_warn(
                    "pipeswift: some of the steps since the last check weighted micro-batches by "
                    "their samples, which the loss of this batch does not allow. Set "
                    'PipeSwiftStrategy(loss="whole_batch") to rule that out from the start.'
                )
            rank_zero_info(
                f"pipeswift: {what_differs} of a batch is not the mean of its micro-batches', so "
                "the loss sees whole batches: exact, in GPipe's order, with all micro-batches in "
                'flight. PipeSwiftStrategy(loss="per_sample") would weight micro-batches by their '
                "samples instead."
            )


def difference(program: WholeBatchProgram) -> str | None:
    """Return the first value that the micro-batches do not give alike (last stage)."""
    sizes = program.call.sizes
    if len(sizes) == 1:
        return None
    if program.sizes != sizes:  # rows that are no samples: nothing to weight micro-batches by
        return "the loss"
    outputs, records = program.by_micro_batch()
    output, logs = program.result()
    if not _alike(_loss(output), _loss(merge_outputs(outputs, sizes))):
        return "the loss"
    merged = {entry.name: entry for entry in merge_records(records, sizes)}
    for entry in logs:
        if entry.name not in merged or not _same_log(entry, merged[entry.name]):
            return f"the logged value {entry.name!r}"
    return None


def _loss(output: object) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _same_log(whole: MergedLog, merged: MergedLog) -> bool:
    return _alike(whole.value, merged.value)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    tolerance = _TOLERANCE.get(a.dtype, 1e-2)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=0.0, equal_nan=True)
