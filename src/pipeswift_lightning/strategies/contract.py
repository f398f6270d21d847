"""Refuse at start what a pipeline cannot do, with the reason and the remedy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer

from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.strategies.network import PipelinedNetwork
from pipeswift_lightning.strategies.optimizers import unwrapped

__all__ = ["ContractError", "check_layers", "check_module", "check_optimizers", "one_optimizer"]


class ContractError(RuntimeError):
    """The LightningModule uses something that a pipeline cannot honour."""


_SEVERAL = (
    "configure_optimizers returned several optimizers. Rule: a pipeline steps one optimizer a "
    "batch, by automatic optimisation. Remedy: put all parameters into the groups of one optimizer "
    '(each group may have its own learning rate), or strategy="ddp" for this module'
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
    hooked = [i for i, layer in enumerate(layers) if layer._forward_pre_hooks]
    if mesh.num_stages > 1 and hooked:
        msg = (
            f"layer {hooked[0]} of {name} has a forward pre-hook (old-style spectral_norm or "
            "weight_norm, say), which would see values of other stages. Remedy: use "
            "torch.nn.utils.parametrizations, or put the layer into a module of its own, such as "
            "nn.Sequential(layer) within the block"
        )
        raise ContractError(msg)
    if mesh.num_stages > num_layers:
        msg = (
            f"{name} has {num_layers} layers, but {mesh.num_stages} stages are asked for. Rule: "
            f"each stage has a layer. Remedy: stages={num_layers} or fewer (devices beyond that "
            "replicate the pipeline), or return finer layers from configure_pipeline()"
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


def check_module(module: LightningModule, *, fitting: bool) -> None:
    """Check what can be seen before the first batch.

    Raises:
        ContractError: Manual optimisation.
    """
    if fitting and not module.automatic_optimization:
        msg = (
            f"{type(module).__name__} sets automatic_optimization=False. Rule: the pipeline runs "
            "forward and backward of several micro-batches interleaved, so training_step cannot "
            "call manual_backward() or step optimizers itself (GANs and other modules with "
            "several optimizers). Remedy: use automatic optimisation with one optimizer, or "
            'strategy="ddp" for this module'
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


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check what ``configure_optimizers`` returned.

    Raises:
        ContractError: Several optimizers, or one that evaluates the step more than once.
    """
    if len(optimizers) > 1:
        raise ContractError(_SEVERAL)
    for optimizer in optimizers:
        if isinstance(unwrapped(optimizer), torch.optim.LBFGS):
            msg = (
                "LBFGS evaluates the step several times and needs inner products over all "
                "parameters, but each stage holds only its own. Remedy: a first-order optimizer "
                "such as AdamW"
            )
            raise ContractError(msg)
