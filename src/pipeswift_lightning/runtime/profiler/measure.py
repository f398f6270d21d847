"""Measure what each layer of a network costs at several shapes of micro-batches."""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeswift_lightning.plan.profile import LayerProfile, LayerSample
from pipeswift_lightning.runtime.batching import fresh_containers
from pipeswift_lightning.runtime.cut import LayerCut
from pipeswift_lightning.runtime.profiler.clock import Clock, clock_for
from pipeswift_lightning.runtime.profiler.copies import StandIns
from pipeswift_lightning.runtime.profiler.probe import Pass, Probe, ProfileError, What
from pipeswift_lightning.runtime.rng import preserved_rng
from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["Measured", "ProfileOptions", "Subject", "layer_profiles", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How a network is measured.

    Args:
        repeats: Measurements of each shape; their median counts.
        max_s: No further repetition begins after so many seconds.
        optimizer_factor: Bytes of the optimizer's state for each byte of a trained parameter; 2
            for Adam, which keeps two moments (see `optimizer_factor`).
        processor_time: On a CPU, count processor time: for machines that others use at the same
            time. Only with one thread, and only if no layer waits for anything.
        settings: What else decides the costs, such as the precision; by it and the network's
            structure a profile is known again.

    Raises:
        ProfileError: A number is too small.
    """

    repeats: int = 5
    max_s: float = 60.0
    optimizer_factor: float = 2.0
    processor_time: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.repeats < 1 or not self.max_s >= 0 or not self.optimizer_factor >= 0:
            message = (
                f"repeats={self.repeats}, max_s={self.max_s}, optimizer_factor="
                f"{self.optimizer_factor} measure nothing. Rule: 1 repetition or more, the others "
                "0 or more. Remedy: leave them out"
            )
            raise ProfileError(message)


class Subject:
    """A network to measure: its layers, and how they are called.

    Args:
        module: The module that holds all parameters which a step uses.
        layers: The layers, as registered: their order is found.
        run: Runs one step (up to its loss, if there is one) on a micro-batch.
        device: Where the layers are to run.
        trace: The order of the layers and what flows between them, if that is known already.
        network: The module whose call runs the layers; by default ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        run: Callable[[Any], Any],
        device: torch.device,
        trace: StepTrace | None = None,
        network: nn.Module | None = None,
    ) -> None:
        self.module, self.layers, self.device = module, tuple(layers), device
        self._network = network or module
        self._run = run
        self._trace = trace

    def step(self, micro_batch: Any) -> Callable[[], Any]:
        """Return the step on a micro-batch, ready to run once."""
        batch = tree_map_only(Tensor, self._placed, micro_batch)
        return lambda: self._run(fresh_containers(batch))

    def _placed(self, tensor: Tensor) -> Tensor:
        # Its own tensor, so that no gradient reaches the caller's.
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

    def trace(self, micro_batch: Any) -> StepTrace:
        """Return the order of the layers; found on the first call."""
        if self._trace is None:
            absent = frozenset(map(id, self.module.parameters()))
            stand_ins = StandIns(self.modules(), self.device, absent=absent)
            with preserved_rng(self.device), stand_ins.in_place():
                self._trace = self._discovered(self.step(micro_batch))
        return self._trace

    def _discovered(self, step: Callable[[], Any]) -> StepTrace:
        cut = LayerCut(self._network, self.layers, network_name="network", device=self.device)
        names = {id(p): name for name, p in self.module.named_parameters()}
        cut.install()
        try:
            return cut.discover(step, step_name="step", names=names)
        finally:
            cut.remove()

    def modules(self) -> list[nn.Module]:
        """Return every module that takes part, once each."""
        roots = (self.module, *self.layers)
        return list({id(child): child for root in roots for child in root.modules()}.values())

    def parameters_of(self, position: int, trace: StepTrace) -> list[nn.Parameter]:
        """Return the parameters that a stage of this layer alone would hold, each once."""
        found = {id(p): p for p in self.layers[trace.order[position]].parameters()}
        named = dict(self.module.named_parameters())
        for name, gaps in trace.parameter_gaps.items():
            if name in named and position in {max(gap - 1, 0) for gap in gaps}:
                found[id(named[name])] = named[name]
        return list(found.values())

    def name_of(self, position: int, trace: StepTrace) -> str:
        """Return a layer's name in the module; its class, if it lies outside."""
        layer = self.layers[trace.order[position]]
        names = {id(child): name for name, child in self.module.named_modules()}
        return names.get(id(layer)) or type(layer).__name__


@dataclass(slots=True)
class Measured:
    """What a rank has measured.

    Attributes:
        layers: Of the layers that were measured, by position, a sample for each shape, in which
            ``output_bytes`` is yet 0.
        value_bytes: For each shape, the size of each value of the trace that was seen.
    """

    layers: dict[int, list[LayerSample]]
    value_bytes: list[dict[int, int]]


def measure(
    subject: Subject,
    micro_batches: Sequence[Any],
    options: ProfileOptions,
    owned: Collection[int] | None = None,
    tell: Callable[[float], None] | None = None,
) -> Measured:
    """Measure layers, and leave no trace: weights, buffers, gradients, random state, modes.

    Each repetition runs every micro-batch once, so that a slow moment of the machine falls on all
    shapes alike.

    Args:
        subject: The network.
        micro_batches: Real ones, one for each shape.
        options: How often, and how long at most.
        owned: Positions (in call order) of the layers to measure; ``None`` for all. The others do
            not run: what they would give to these is drawn at random.
        tell: Is called after each pass, with the share that is done.
    """
    trace = subject.trace(micro_batches[0])
    positions = sorted(range(trace.num_layers) if owned is None else owned)
    steps = [subject.step(micro_batch) for micro_batch in micro_batches]
    start_s = time.perf_counter()
    versions = [p._version for p in subject.module.parameters()]
    clock = clock_for(subject.device, processor_time=options.processor_time)
    quiet = _undisturbed(subject.device)
    with quiet, _probe(subject, trace, positions, clock).in_place() as probe:
        run = _telling(probe.run, len(steps), options.repeats, tell)
        memory = [run(step, What.MEMORY) for step in steps]
        run(steps[-1], What.FULL)  # the first backward sets much up
        full: list[list[Pass]] = [[] for _ in steps]
        inputs: list[list[Pass]] = [[] for _ in steps]
        for repeat in range(options.repeats):
            for i, step in enumerate(steps):
                full[i].append(run(step, What.FULL))
                if repeat % 2 == 0:
                    inputs[i].append(run(step, What.INPUTS))
            if time.perf_counter() - start_s > options.max_s:
                break
    if versions != [p._version for p in subject.module.parameters()]:
        message = (
            "a forward changes parameters in place. Rule: measuring leaves no trace. Remedy: keep "
            "what forwards change in buffers, or plan without a profile"
        )
        raise ProfileError(message)
    samples = {
        position: [
            LayerSample(
                forward_s=statistics.median(p.forward_s[position] for p in full[i]),
                backward_s=statistics.median(p.backward_s[position] for p in full[i]),
                input_gradient_s=statistics.median(p.backward_s[position] for p in inputs[i]),
                input_bytes=memory[i].input_bytes[position],
                saved_bytes=memory[i].saved_bytes[position],
            )
            for i in range(len(steps))
        ]
        for position in positions
    }
    return Measured(samples, [p.value_bytes for p in memory])


def _telling(
    run: Callable[[Callable[[], Any], What], Pass],
    num_steps: int,
    repeats: int,
    tell: Callable[[float], None] | None,
) -> Callable[[Callable[[], Any], What], Pass]:
    """Return ``run`` that tells what share of a measurement's passes is done, between them."""
    if tell is None:
        return run
    total, done = 1 + num_steps * (1 + repeats + (repeats + 1) // 2), 0

    def telling(step: Callable[[], Any], what: What) -> Pass:
        nonlocal done
        result = run(step, what)
        done += 1
        tell(done / total)
        return result

    return telling


def _probe(subject: Subject, trace: StepTrace, positions: Sequence[int], clock: Clock) -> Probe:
    """Return a probe of these layers, which need not be on the device."""
    every = [subject.layers[index] for index in trace.order]
    device = subject.device
    inside = {id(child) for layer in every for child in layer.modules()}
    outside = [child for child in subject.modules() if id(child) not in inside]
    mine = [every[position] for position in positions]
    tensors = chain(*(layer.parameters() for layer in mine))
    elsewhere = not _is_on(device, tensors)
    absent = set()
    if len(positions) < trace.num_layers:
        needed = {id(p) for k in positions for p in subject.parameters_of(k, trace)}
        ends = positions[-1] == trace.num_layers - 1  # the loss may use parameters of its own
        in_gaps = set(trace.parameter_gaps)
        absent = {
            id(p)
            for name, p in subject.module.named_parameters()
            if id(p) not in needed and (name in in_gaps or not ends)
        }
    return Probe(
        subject.layers,
        trace,
        clock,
        device,
        StandIns(outside, device, absent=frozenset(absent)),
        {
            position: StandIns(list(layer.modules()), device, keep=not elsewhere)
            for position, layer in zip(positions, mine, strict=True)
        },
        at_once=elsewhere,
    )


def _is_on(device: torch.device, parameters: Iterable[nn.Parameter]) -> bool:
    return all(p.device == device for p in parameters)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the garbage collector out of the times, and the generators as they were."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with preserved_rng(device):
            yield
    finally:
        if was_enabled:
            gc.enable()


def layer_profiles(
    subject: Subject, trace: StepTrace, parts: Sequence[Measured], factor: float
) -> tuple[LayerProfile, ...]:
    """Put together what ranks have measured; all layers must be among it."""
    samples = {position: s for part in parts for position, s in part.layers.items()}
    missing = [position for position in range(trace.num_layers) if position not in samples]
    if missing:
        message = (
            f"layers {missing} (in call order) were measured by no rank. Rule: each layer is "
            "owned by one rank. Remedy: leave `owned` out, and they are shared equally"
        )
        raise ProfileError(message)
    sizes: list[dict[int, int]] = [{} for _ in max((part.value_bytes for part in parts), key=len)]
    for part in parts:
        for i, seen in enumerate(part.value_bytes):
            sizes[i].update(seen)
    profiles = []
    for position in range(trace.num_layers):
        parameters = subject.parameters_of(position, trace)
        trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        sent = trace.carried(position + 1)
        profiles.append(
            LayerProfile(
                name=subject.name_of(position, trace),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
                gradient_bytes=trained,
                optimizer_bytes=round(factor * trained),
                samples=tuple(
                    replace(sample, output_bytes=sum(sizes[i].get(v, 0) for v in sent))
                    for i, sample in enumerate(samples[position])
                ),
            )
        )
    return tuple(profiles)
