"""Costs from the floating-point operations that layers do, without doing them.

Where nothing is measured: the step runs on the meta device, where operations have shapes only, and
`torch.utils.flop_counter` counts them, forward and backward.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.profile import CostProfile, LayerSample
from pipeswift_lightning.runtime.absent import AbsentMode, absent_output, left, to_absent
from pipeswift_lightning.runtime.layer_wrapper import LayerWrapper
from pipeswift_lightning.runtime.profiler.copies import StandIns
from pipeswift_lightning.runtime.profiler.examples import shape_of
from pipeswift_lightning.runtime.profiler.measure import Measured, Subject, layer_profiles
from pipeswift_lightning.runtime.profiler.network import check
from pipeswift_lightning.runtime.profiler.probe import OTHER_NUMBER, ProfileError
from pipeswift_lightning.runtime.rng import preserved_rng
from pipeswift_lightning.runtime.structure import leaves_of, mapped
from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["flops_model"]

_META = torch.device("meta")
_ERROR = 0.25  # What devices reach of their peak differs that much from layer to layer.


def flops_model(
    subject: Subject,
    micro_batches: Sequence[Any],
    *,
    flops_per_s: float,
    fixed_s: float = 0.0,
    optimizer_factor: float = 2.0,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> CostModel:
    """Return the costs of a network by counting; nothing is computed, every rank finds the same.

    A layer that cannot run without data counts as two operations for each of its weights and each
    position of its first argument, and twice that backward. So do gaps, backward.

    Args:
        subject: The network; its parameters may be on the meta device.
        micro_batches: Of several shapes.
        flops_per_s: What a device reaches; about 0.4 of its peak.
        fixed_s: Time of a layer's forward, and of its backward, however small the micro-batch.
        optimizer_factor: As for `ProfileOptions`.
        shapes: As for `profile_network`.

    Raises:
        ProfileError: There is no micro-batch, or ``flops_per_s`` is not above 0.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> subject = Subject(net, list(net), net, torch.device("cpu"))
        >>> model = flops_model(subject, [torch.ones(2, 4), torch.ones(9, 4)], flops_per_s=1.0)
        >>> [round(layer.forward.token_s) for layer in model.layers]  # 2 x 4 x 8 a sample
        [64, 0, 64]
    """
    check(micro_batches)
    _check_rate(flops_per_s)
    trace = subject.trace(micro_batches[0])
    absent = frozenset(map(id, subject.module.parameters()))
    stand_ins = StandIns(subject.modules(), subject.device, absent=absent)
    with preserved_rng(subject.device), stand_ins.in_place():
        counted = [_Counter(subject, trace, stand_ins).count(x) for x in micro_batches]
    samples = {
        position: [
            LayerSample(
                forward_s=fixed_s + counter.forward[position] / flops_per_s,
                backward_s=fixed_s + counter.backward[position] / flops_per_s,
                saved_bytes=counter.saved_bytes[position],
                input_bytes=counter.input_bytes[position],
            )
            for counter in counted
        ]
        for position in range(trace.num_layers)
    }
    measured = Measured(samples, [counter.value_bytes for counter in counted])
    profile = CostProfile(
        shapes=tuple(shapes or map(shape_of, micro_batches)),
        layers=layer_profiles(subject, trace, [measured], optimizer_factor),
    )
    return replace(profile.model(), relative_error=_ERROR, origin=None)


def _check_rate(flops_per_s: float) -> None:
    if not flops_per_s > 0:
        message = (
            f"flops_per_s={flops_per_s} takes for ever. Rule: above 0. Remedy: about 0.4 of the "
            "device's peak"
        )
        raise ProfileError(message)


class _Counter(LayerWrapper):
    """Counts one step."""

    def __init__(self, subject: Subject, trace: StepTrace, stand_ins: StandIns) -> None:
        super().__init__(subject.layers)
        self._subject, self._trace, self._stand_ins = subject, trace, stand_ins
        self._mode = AbsentMode(subject.device, absent_parameters=False)
        self._flops = FlopCounterMode(display=False)
        self._gap_start = 0
        self._next = 0
        self._seen: dict[int, Any] = {}
        self.forward: defaultdict[int, int] = defaultdict(int)
        self.backward: defaultdict[int, int] = defaultdict(int)
        self.saved_bytes: defaultdict[int, int] = defaultdict(int)
        self.input_bytes: defaultdict[int, int] = defaultdict(int)
        self.value_bytes: dict[int, int] = {}

    def count(self, micro_batch: Any) -> "_Counter":
        """Run the step as far as it goes without data: at least through all layers."""
        step = self._subject.step(micro_batch)
        self.choose(self._trace.order)
        self.install()
        try:
            with self._flops, self._mode:
                step()
                self._end_gap()
        except RuntimeError:
            if self._next < self._trace.num_layers:
                raise
            self._end_gap()  # the loss needs a value; what led to it is counted
        finally:
            self.remove()
        return self

    @override
    def call(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        position = self._next
        if position >= self._trace.num_layers or self._trace.order[position] != index:
            message = (
                f"a step called layer {index} of the network out of its order. Rule: each step "
                "calls the layers in the same order. Remedy: batches of one kind"
            )
            raise ProfileError(message)
        self._end_gap()
        self._next += 1
        with left(self._mode), torch.enable_grad():
            args, kwargs = mapped(_given, (args, kwargs))
            self.input_bytes[position] = self._note(
                leaves_of((args, kwargs)), self._trace.inputs[position]
            )
            try:
                output = self._count(position, original, args, kwargs)
            except (RuntimeError, NotImplementedError):
                output = self._guessed(position, original, args, kwargs)
            self._note(leaves_of(output), self._trace.outputs[position])
        self._gap_start = self._flops.get_total_flops()
        return output

    def _count(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        start = self._flops.get_total_flops()
        with ExitStack() as stack:

            def note(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen and not self._stand_ins.hold(tensor):
                    self._seen[storage._cdata] = storage
                    self.saved_bytes[position] += storage.nbytes()
                return tensor

            stack.enter_context(saved_tensors_hooks(note, lambda tensor: tensor))
            output = original(*args, **kwargs)
        middle = self._flops.get_total_flops()
        roots = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        self.forward[position] += middle - start
        self.backward[position] += self._flops.get_total_flops() - middle
        return to_absent(output)

    def _guessed(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        layer = self._subject.layers[self._trace.order[position]]
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        places = max((x.numel() // x.shape[-1] for x in tensors[:1] if x.dim()), default=1)
        flops = 2 * places * sum(p.numel() for p in layer.parameters() if p.dim() > 1)
        self.forward[position] += flops
        self.backward[position] += 2 * flops
        return absent_output(original, args, kwargs)

    def _end_gap(self) -> None:
        flops = self._flops.get_total_flops() - self._gap_start
        position = max(self._next - 1, 0)
        self.forward[position] += flops
        self.backward[position] += 2 * flops  # absent values have no graph to count

    def _note(self, leaves: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> int:
        if any(leaf >= len(leaves) for leaf, _ in pairs):
            raise ProfileError(OTHER_NUMBER)
        sizes = {v: leaves[leaf].numel() * leaves[leaf].element_size() for leaf, v in pairs}
        self.value_bytes.update(sizes)
        return sum(sizes.values())


def _given(leaf: Any) -> Any:
    """Return an argument of a layer on the meta device; gradients flow to activations."""
    if isinstance(leaf, Tensor) and leaf.is_meta and leaf.is_floating_point():
        return torch.empty_like(to_absent(leaf)).requires_grad_()
    return to_absent(leaf)
