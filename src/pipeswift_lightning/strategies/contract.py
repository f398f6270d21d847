"""Refuse at start what a pipeline cannot do, with the reason and the remedy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.strategies.network import PipelinedNetwork
from pipeswift_lightning.strategies.optimizers import unwrapped

__all__ = [
    "ContractError",
    "check_callbacks",
    "check_layers",
    "check_module",
    "check_optimizers",
    "evaluated_once",
    "one_optimizer",
    "pipelined",
]


class ContractError(RuntimeError):
    """The LightningModule uses something that a pipeline cannot honour."""


_SEVERAL = (
    "configure_optimizers returned several optimizers. Rule: automatic optimisation steps one "
    "optimizer a batch. Remedy: set self.automatic_optimization = False and step them in "
    "training_step, or put all parameters into the groups of one optimizer (each group may have "
    "its own learning rate)"
)


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Give the pipeline's remedy for several optimizers: Lightning's own is no way here.

    Raises:
        ContractError: Several optimizers.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" in str(error):
            raise ContractError(_SEVERAL) from None
        raise


def check_layers(layers: Sequence[nn.Module], mesh: Mesh, name: str) -> None:
    """Check that each stage gets a layer, and that layers can be intercepted.

    Raises:
        ContractError: There are fewer layers than stages, or a layer has a forward pre-hook.
    """
    num_layers = len(layers)
    _check_hooks(layers, mesh, name)
    if mesh.num_stages > num_layers:
        msg = (
            f"{name} has {num_layers} layers, but {mesh.num_stages} stages are asked for. Rule: "
            f"each stage has a layer. Remedy: stages={num_layers} or fewer (devices beyond that "
            "replicate the pipeline), or return finer layers from configure_pipeline()"
        )
        raise ContractError(msg)


def _check_hooks(layers: Sequence[nn.Module], mesh: Mesh, name: str) -> None:
    hooked = [i for i, layer in enumerate(layers) if layer._forward_pre_hooks]
    if mesh.num_stages > 1 and hooked:
        msg = (
            f"layer {hooked[0]} of {name} has a forward pre-hook (old-style spectral_norm or "
            "weight_norm, say), which would see values of other stages. Remedy: use "
            "torch.nn.utils.parametrizations, or put the layer into a module of its own, such as "
            "nn.Sequential(layer) within the block"
        )
        raise ContractError(msg)


def pipelined(networks: Sequence[PipelinedNetwork], mesh: Mesh) -> list[PipelinedNetwork]:
    """Return the networks that have a layer for each stage; the others stay whole everywhere.

    Raises:
        ContractError: There are none, or a layer has a forward pre-hook.
    """
    found = [n for n in networks if len(n.layers) >= mesh.num_stages and n.has_forward]
    for network in found:
        _check_hooks(network.layers, mesh, network.name)
    if not found:
        layers = ", ".join(f"{n.name} has {len(n.layers)} layers" for n in networks)
        most = max(len(n.layers) for n in networks)
        msg = (
            f"{layers}, but {mesh.num_stages} stages are asked for. Rule: of the networks that a "
            f"step calls, one has a layer for each stage. Remedy: stages={most} or fewer (devices "
            "beyond that replicate the pipeline), or return finer layers from "
            'configure_pipeline(), or PipeSwiftStrategy(network="self")'
        )
        raise ContractError(msg)
    return found


def check_module(module: LightningModule, precision: Precision, *, fitting: bool) -> None:
    """Check what can be seen before the first batch.

    Raises:
        ContractError: fp16 with a gradient scaler.
    """
    if getattr(precision, "scaler", None) is not None:
        msg = (
            'precision="16-mixed" needs one gradient scale on all stages, which is not built yet. '
            'Remedy: precision="bf16-mixed" (no scaler), or 32-true'
        )
        raise ContractError(msg)
    batch_norms = [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
    ]
    if fitting and batch_norms:
        rank_zero_warn(
            f"{len(batch_norms)} BatchNorm layers ({batch_norms[0]}, ...) will normalise each "
            "micro-batch by its own statistics, as gradient accumulation does; results differ "
            "from one device on the whole batch. GroupNorm and LayerNorm are exact."
        )


def check_callbacks(callbacks: Sequence[object], mesh: Mesh) -> None:
    """Check that no callback needs all parameters on one rank.

    Raises:
        ContractError: A callback reads all parameters, and there are several stages.
    """
    needs_all = StochasticWeightAveraging | WeightAveraging | BaseFinetuning
    for callback in callbacks:
        if mesh.num_stages > 1 and isinstance(callback, needs_all):
            msg = (
                f"the callback {type(callback).__name__} reads all parameters on every rank, but "
                "each stage holds only its own. Remedy: average checkpoints afterwards; to freeze "
                "and thaw layers, give all parameters to the optimizer and set requires_grad in a "
                "hook"
            )
            raise ContractError(msg)


def check_optimizers(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Check what ``configure_optimizers`` returned.

    Raises:
        ContractError: Several optimizers under automatic optimisation, or one that evaluates the
            step more than once.
    """
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ContractError(_SEVERAL)
    for optimizer in optimizers:
        if isinstance(unwrapped(optimizer), torch.optim.LBFGS):
            msg = (
                "LBFGS evaluates the step several times and needs inner products over all "
                "parameters, but each stage holds only its own. Remedy: a first-order optimizer "
                "such as AdamW"
            )
            raise ContractError(msg)


def evaluated_once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure that an optimizer may evaluate once a step.

    One that evaluates it again does so to compare or combine what it has seen, most often by norms
    over all parameters (sharpness-aware minimisation, line searches), which no stage has.
    """
    name, calls = type(unwrapped(optimizer)).__name__, 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            msg = (
                f"{name} evaluates the step more than once before it updates parameters. Rule: an "
                "optimizer sees one evaluation, since what it computes over all parameters "
                "would differ from stage to stage. Remedy: a first-order optimizer such as AdamW, "
                "or stages=1"
            )
            raise ContractError(msg)
        return closure()

    return once
