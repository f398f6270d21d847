"""From a network to its profile, on one rank or on many."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from pipeswift_lightning.plan.profile import CostProfile
from pipeswift_lightning.runtime.profiler.examples import shape_of
from pipeswift_lightning.runtime.profiler.measure import (
    ProfileOptions,
    Subject,
    layer_profiles,
    measure,
)
from pipeswift_lightning.runtime.profiler.origin import origin_of
from pipeswift_lightning.runtime.profiler.probe import ProfileError

__all__ = ["called", "profile_network"]


def called(network: nn.Module, micro_batch: Any) -> Any:
    """Call ``network`` on a micro-batch: a tensor, a tuple of arguments, or a dict of them."""
    if isinstance(micro_batch, Mapping):
        return network(**micro_batch)
    return network(*micro_batch) if isinstance(micro_batch, tuple) else network(micro_batch)


def profile_network(
    subject: Subject,
    micro_batches: Sequence[Any],
    *,
    shapes: Sequence[tuple[int, int]] | None = None,
    options: ProfileOptions | None = None,
    tell: Callable[[float], None] | None = None,
) -> CostProfile:
    """Measure every layer of a network on this rank.

    Layers that are not on the device yet are copied there one by one. Parameters, buffers,
    gradients, the random state and the modules' modes are as they were afterwards.

    Args:
        subject: The network.
        micro_batches: Real micro-batches of several shapes (see `example_micro_batches`).
        shapes: For each, the pair (samples, tokens of each); by default what `shape_of` finds.
        options: How often to measure.
        tell: Is called between passes, with the share that is done.

    Raises:
        ProfileError: There is no micro-batch, or the network cannot be measured.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> subject = Subject(net, list(net), net, torch.device("cpu"))
        >>> profile = profile_network(subject, [torch.ones(2, 4), torch.ones(8, 4)])
        >>> [layer.samples[1].saved_bytes for layer in profile.layers]  # 8 x 4 x 4 bytes, twice
        [128, 128]
    """
    options = options or ProfileOptions()
    check(micro_batches)
    measured = measure(subject, micro_batches, options, tell=tell)
    trace = subject.trace(micro_batches[0])
    return CostProfile(
        shapes=tuple(shapes or map(shape_of, micro_batches)),
        layers=layer_profiles(subject, trace, [measured], options.optimizer_factor),
        origin=origin_of(subject.module, subject.layers, subject.device, options.settings),
    )


def check(micro_batches: Sequence[Any]) -> None:
    """Raise if there is nothing to measure with."""
    if not micro_batches:
        message = (
            "no micro-batches to measure with. Rule: one of each of several shapes. Remedy: "
            "example_micro_batches(batch) cuts them out of one batch"
        )
        raise ProfileError(message)
