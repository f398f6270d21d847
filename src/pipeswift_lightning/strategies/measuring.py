"""Measure the layers' costs at the first batch, and keep them beside the checkpoints."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.profile import CostProfile
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.packed import PackedBatch
from pipeswift_lightning.runtime.profiler import (
    ProfileOptions,
    Subject,
    example_micro_batches,
    measure_overhead,
    origin_of,
    profile_network,
    read_profile,
    shape_of,
    shared_link,
    write_profile,
)
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.runtime.transport import C10dTransport
from pipeswift_lightning.strategies.assembly_times import AssemblyPart, AssemblyTimes
from pipeswift_lightning.strategies.cost_source import read_costs
from pipeswift_lightning.strategies.module_state import unchanged
from pipeswift_lightning.strategies.network import PipelinedNetwork
from pipeswift_lightning.strategies.options import MEASURE
from pipeswift_lightning.strategies.records import recorded
from pipeswift_lightning.strategies.step import StepCall

__all__ = ["Between", "CostSource", "completed", "cost_path", "keep_costs"]
__all__ += ["measured_costs"]

COST_FILE = "pipeswift_costs.json"


@dataclass(frozen=True, slots=True)
class Between:
    """What it takes to go from stage to stage.

    Attributes:
        link: A message on its way; ``None``: there is no link.
        overhead_s: The stage itself, for each Forward and Backward, in seconds.
    """

    link: Link | None = None
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CostSource:
    """Gives a run its costs, before the module is cut.

    Args:
        costs: A file, or ``"measure"``; ``None``: there are none.
        module: The user's module.
        network: Its network.
        groups: Of the mesh.
        laid_aside: While it is entered, layers are not intercepted.
        assembly: Times the measuring, as a part of its own.
    """

    costs: str | None
    module: LightningModule
    network: PipelinedNetwork
    groups: MeshGroups
    laid_aside: Callable[[], AbstractContextManager[None]]
    assembly: AssemblyTimes

    @property
    def measures(self) -> bool:
        """Whether the costs are measured."""
        return self.costs == MEASURE

    def reader(
        self, trace: StepTrace, call: StepCall, device: torch.device
    ) -> Callable[[], CostModel]:
        """Return what reads or measures the costs on one rank; a collective of the pipeline.

        Args:
            trace: The order of the layers.
            call: The first step.
            device: Where layers run.
        """
        assert self.costs is not None
        if not self.measures:
            return partial(read_costs, self.costs, trace.num_layers)
        transport = C10dTransport(self.groups, device)
        with self.assembly.timing(AssemblyPart.PROFILE):
            stages, pipeline = self.groups.mesh.num_stages, self.groups.pipeline
            link = shared_link(transport, stages, pipeline)
            between = Between(link, measure_overhead(transport, stages, link, pipeline))
        return partial(self.measured, trace, call, device, between)

    def measured(
        self, trace: StepTrace, call: StepCall, device: torch.device, between: Between
    ) -> CostModel:
        """Measure the costs in this process, or take them from the run's file."""
        with self.assembly.timing(AssemblyPart.PROFILE), self.laid_aside():
            return measured_costs(self.module, self.network, trace, call, device, between)


def cost_path(trainer: Trainer) -> Path:
    """Return where a run keeps its costs: beside its checkpoints, else in its folder.

    That is a folder of this machine: checkpoints, and the run's folder, may be on a remote store.
    """
    folders = [getattr(callback, "dirpath", None) for callback in _callbacks(trainer)]
    local = (f for f in (*folders, trainer.default_root_dir) if f and "://" not in str(f))
    return Path(next(local, Path.cwd())) / COST_FILE


def keep_costs(profile: CostProfile, path: Path) -> None:
    """Write a profile for the next run; where that cannot be, this run goes on all the same."""
    try:
        write_profile(profile, path)
    except OSError as error:
        rank_zero_warn(
            f"pipeswift: the measured costs could not be kept in {path}: {error}. This run uses "
            "them all the same; the next one measures again. Give ModelCheckpoint or the Trainer "
            "a folder that can be written (dirpath, default_root_dir)."
        )


def completed(profile: CostProfile, between: Between, path: Path) -> CostProfile:
    """Return a kept profile with what it lacks, as one that a single stage has written does.

    What it has stays, though it was measured anew: a resumed run plans as the one before.
    """
    overhead_s = profile.overhead_s or between.overhead_s
    whole = profile.with_link(profile.link or between.link, overhead_s)
    if whole != profile:
        keep_costs(whole, path)
    return whole


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def measured_costs(
    module: LightningModule,
    network: PipelinedNetwork,
    trace: StepTrace,
    call: StepCall,
    device: torch.device,
    between: Between,
) -> CostModel:
    """Return the costs of a run's file, if they are of this network on this device; else measure.

    The module is whole, and its layers are not intercepted. All is left as it was.

    Args:
        module: The user's module.
        network: Its network.
        trace: The order of the layers.
        call: The first step; micro-batches of several shapes are cut out of its batch.
        device: Where layers run.
        between: What was measured between stages.
    """

    def run(batch: Any) -> Any:
        with recorded(module), call.context():
            return call.bound(module, batch)()

    path = cost_path(module.trainer)
    # Not the hook: layers cost alike in a sanity check, in training and in prediction.
    settings = {"precision": str(module.trainer.precision)}
    options = ProfileOptions(settings=settings)
    origin = origin_of(module, network.layers, device, settings)
    found: CostProfile | None = read_profile(path, origin)
    if found is not None:
        return completed(found, between, path).model()
    # Sanity checks come first, without gradients: costs are of training all the same.
    with torch.inference_mode(mode=False), torch.enable_grad(), unchanged(module):
        subject = Subject(module, network.layers, run, device, trace, network.module)
        micro_batches, shapes = _examples(call)
        clones = tree_map_only(Tensor, torch.clone, micro_batches)
        profile = profile_network(subject, clones, shapes=shapes, options=options)
    profile = profile.with_link(between.link, between.overhead_s)
    keep_costs(profile, path)
    return profile.model()


def _examples(call: StepCall) -> tuple[list[Any], list[tuple[int, int]]]:
    if not isinstance(call.source, PackedBatch):
        examples = example_micro_batches(call.batch)
        return examples, [shape_of(example) for example in examples]
    # A row of samples costs what its tokens and the squares of their lengths say.
    lengths = call.source.lengths
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    parts = [order[:1], order[-1:], order[: len(order) // 2], order[len(order) // 2 :], order]
    used = [part for part in parts if part]
    shapes = [
        (len(part), max(1, round(sum(lengths[i] for i in part) / len(part)))) for part in used
    ]
    return [call.source.select(part) for part in used], shapes
