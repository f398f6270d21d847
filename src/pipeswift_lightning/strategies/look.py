"""Look at a step before it runs: how its layers hang together, and what else it does."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils._pytree import tree_map_only

from pipeswift_lightning.plan.planner import Plan
from pipeswift_lightning.runtime.batching import batch_checksum, describe_batch, tensor_versions
from pipeswift_lightning.runtime.cut import LayerCut
from pipeswift_lightning.runtime.network_call import CutError
from pipeswift_lightning.runtime.ownership import ParameterTable
from pipeswift_lightning.runtime.rng import reseeder
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.metrics import SharedMetrics
from pipeswift_lightning.strategies.module_state import unchanged
from pipeswift_lightning.strategies.options import LossScope
from pipeswift_lightning.strategies.records import recorded
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["LATE", "batch_facts", "look_at_step", "step_facts"]

LATE = (
    "a step calls its network more than once, or differentiates by itself, which earlier steps did "
    "not, while gradients accumulate. Rule: with accumulate_grad_batches, the first steps show how "
    'all steps run. Remedy: PipeSwiftStrategy(loss="transparent")'
)


def look_at_step(
    module: LightningModule,
    cut: LayerCut,
    metrics: SharedMetrics,
    call: StepCall,
    micro_batch: Any,
) -> StepTrace:
    """Run a step on values without data; the module, its metrics and the batch stay as they are.

    Raises:
        CutError: The step cannot be cut, or changes its batch in place.
    """
    # A copy: the code after the network runs as well, as far as it can.
    micro_batch = tree_map_only(torch.Tensor, torch.clone, micro_batch)
    step = call.bound(module, micro_batch)
    before = tensor_versions(micro_batch)
    after: list[list[int]] = []
    reseeder(cut.device, *call.seed)(0, False)  # noqa: FBT003 -- a gap, not a layer
    untouched = metrics.untouched(), unchanged(module)
    with recorded(module), untouched[0], untouched[1], torch.no_grad(), call.context():
        trace = cut.discover(
            step,
            step_name=call.hook,
            names=ParameterTable.of(module).names,
            at_return=lambda: after.append(tensor_versions(micro_batch)),
        )
    if (after[0] if after else tensor_versions(micro_batch)) != before:
        msg = (
            f"{call.hook} changes its batch in place. Rule: a step runs more than once on the "
            "same batch (on each stage, and for its loss). Remedy: write x = x / 2 instead of "
            "x /= 2"
        )
        raise CutError(msg)
    return trace


def batch_facts(module: LightningModule, hook: str, batch: Any) -> dict[str, str]:
    """Return what the ranks of a pipeline must agree on before they run a step."""
    return {
        "hook": hook,
        "batches in an epoch": str(module.trainer.num_training_batches),
        "batch": describe_batch(batch),
        "samples (checksum)": str(batch_checksum(batch)),
    }


def step_facts(
    module: LightningModule, call: StepCall, plan: Plan, order: Sequence[int], scope: LossScope
) -> dict[str, str]:
    """Return what the stages must agree on for one run: the batch, and what is done with it."""
    return {
        "plan": plan.digest,
        "micro-batches": str(call.samples or call.sizes),
        "layers": str(order),
        "loss": scope,
        "weights": str(call.weighting),
        **batch_facts(module, call.hook, call.batch),
    }
