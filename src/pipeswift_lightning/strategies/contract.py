"""Refuse at start what a pipeline cannot do, with the reason and the remedy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
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
    "leave_incomplete",
    "one_optimizer",
    "pipelined",
    "warn_of_short_epochs",
]


class ContractError(RuntimeError):
    """The LightningModule uses something that a pipeline cannot honour."""


_INCOMPLETE = "_pipeswift_incomplete"
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


def check_layers(network: PipelinedNetwork, mesh: Mesh) -> None:
    """Check that each stage gets a layer, and that layers can be intercepted.

    Raises:
        ContractError: There are fewer layers than stages, a layer has a forward pre-hook, or
            something is compiled already.
    """
    layers, name = network.layers, network.name
    num_layers = len(layers)
    _check_not_compiled([network.module, *layers], name)
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
            "weight_norm, say), which would see values of other stages. Rule: a layer has none. "
            "Remedy: use torch.nn.utils.parametrizations, or put the layer into a module of its "
            "own, such as nn.Sequential(layer) within the block"
        )
        raise ContractError(msg)


def _check_not_compiled(modules: Sequence[nn.Module], name: str) -> None:
    in_place = any(module._compiled_call_impl is not None for module in modules)
    if in_place or any(isinstance(module, OptimizedModule) for module in modules):
        msg = (
            f"{name}, or a layer of it, has been compiled. Rule: a pipeline cuts the network at "
            "its layers, and compiled code cannot be cut. Remedy: leave it uncompiled, and "
            "PipeSwiftStrategy(compile=True) compiles each layer on its stage"
        )
        raise ContractError(msg)


def pipelined(networks: Sequence[PipelinedNetwork], mesh: Mesh) -> list[PipelinedNetwork]:
    """Return the networks that have a layer for each stage; the others stay whole everywhere.

    Raises:
        ContractError: There are none, one was built on the meta device or is compiled, or a layer
            has a forward pre-hook.
    """
    found = [n for n in networks if len(n.layers) >= mesh.num_stages and n.has_forward]
    for network in found:
        check_layers(network, mesh)
        if mesh.num_stages > 1 and any(p.is_meta for p in network.parameters()):
            msg = (
                f"{network.name} was built on the meta device, and every rank runs whole steps. "
                "Rule: there, a network has its data from the start. Remedy: build it with data, "
                "or let each step call one network once, under automatic optimisation"
            )
            raise ContractError(msg)
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


def leave_incomplete(module: LightningModule) -> None:
    """Note that a module's parameters are on several ranks, and do not come together again."""
    module.__dict__[_INCOMPLETE] = True


def check_module(module: LightningModule, *, fitting: bool) -> None:
    """Look at a module before it is given to the ranks; warn of what will differ.

    Raises:
        ContractError: It has been in a Trainer call that has failed.
    """
    if module.__dict__.get(_INCOMPLETE, False):
        msg = (
            f"this {type(module).__name__} was in a Trainer call that has failed, and holds only "
            "its rank's parameters since. Rule: a failed call leaves its module incomplete, since "
            "ranks that have failed cannot hand their parameters over. Remedy: make a new module; "
            "fit(..., ckpt_path=...) goes on from the last checkpoint"
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
                "each stage holds only its own. Rule: a callback looks at one stage's, or there is "
                "one stage. Remedy: average checkpoints afterwards; to freeze "
                "and thaw layers, give all parameters to the optimizer and set requires_grad in a "
                "hook"
            )
            raise ContractError(msg)


def warn_of_short_epochs(trainer: Trainer) -> None:
    """Warn if gradients are to be accumulated over more batches than an epoch has.

    Lightning steps on the last batch of an epoch, and divides by the number that was asked for.
    """
    factors = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            factors += callback.scheduling.values()
    batches = trainer.num_training_batches
    if max(factors) > batches:
        rank_zero_warn(
            f"accumulate_grad_batches={max(factors)}, but an epoch has {batches:.0f} batches. "
            "Rule: Lightning steps on an epoch's last batch too, with the sum of its losses "
            f"divided by {max(factors)}, so each step is smaller than meant. Remedy: "
            f"accumulate_grad_batches={batches:.0f} or less"
        )


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
                "parameters, but each stage holds only its own. Rule: an optimizer evaluates a "
                "step once. Remedy: a first-order one such as AdamW"
            )
            raise ContractError(msg)
