"""Compute gradients from a stage's outputs; sum them over stages, average over replicas."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

__all__ = ["broadcast_tensors", "differentiate", "own_gradients", "reduce_gradients"]
__all__ += ["sum_gradients"]

_BUCKET_BYTES = 25 << 20


def differentiate(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], *, retain: bool = False
) -> None:
    """Do as `torch.autograd.backward`, less its look at gradients that came in a known layout.

    Args:
        edges: Where the gradients enter the graph.
        gradients: One for each edge, of its shape and dtype.
        retain: Keep what the graph saved, for another pass.

    That look takes as long as the pass itself through a small stage, 20 us. What does not fit an
    edge the engine refuses too.
    """
    create_graph, inputs = False, ()
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        retain,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def reduce_gradients(
    own: Sequence[nn.Parameter],
    shared: Mapping[dist.ProcessGroup, Sequence[nn.Parameter]],
    replicas: dist.ProcessGroup | None,
) -> None:
    """Sum shared parameters' gradients over their stages, then average all over the replicas.

    The averaging of parameters that only this stage owns starts first and runs while the shared
    ones are summed, and while earlier stages are still in their cool-down: no stage waits for
    another here, except for shared parameters.

    Args:
        own: Parameters that this stage alone owns.
        shared: Parameters with several owners, by the group of their owners.
        replicas: The ranks that hold the same stage; ``None`` without data parallelism.

    A parameter that has no gradient on any rank of a reduction keeps ``None``, as on one device.
    """
    flights = [_Bucket(b, replicas, average=True) for b in _buckets(own)] if replicas else []
    for group, parameters in shared.items():
        for bucket in [_Bucket(b, group, average=False) for b in _buckets(parameters)]:
            bucket.finish()
    if replicas is not None:
        every = [p for parameters in shared.values() for p in parameters]
        flights += [_Bucket(b, replicas, average=True) for b in _buckets(every)]
    for flight in flights:
        flight.finish()


class _Bucket:
    """Gradients of one dtype in one flat buffer, with a flag each for 'has a gradient'."""

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup, *, average: bool
    ) -> None:
        self._parameters = parameters
        parts = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
            for p in parameters
        ]
        flags = [float(p.grad is not None) for p in parameters]
        self._flat = torch.cat([*parts, parts[0].new_tensor(flags)])
        if average:
            self._flat[: -len(flags)] /= dist.get_world_size(group)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self) -> None:
        """Wait, and put the results back."""
        if self._work is not None:
            self._work.wait()
        sizes = [p.numel() for p in self._parameters]
        *parts, flags = torch.split(self._flat, [*sizes, len(sizes)])
        missing = any(p.grad is None for p in self._parameters)
        used = flags.tolist() if missing else [1.0] * len(sizes)
        for parameter, part, flag in zip(self._parameters, parts, used, strict=True):
            if flag and parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            elif flag and parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group by dtype, up to 25 MB each, in the order given (the same on every rank)."""
    by_dtype: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype[parameter.dtype].append(parameter)
    for group in by_dtype.values():
        yield from _chunks(group)


def _chunks(tensors: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BUCKET_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@torch.no_grad()
def sum_gradients(
    gradients: Sequence[Tensor | None], like: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Return the sums of gradients over the ranks of ``group``; equal to the last bit on all.

    Args:
        gradients: Of each tensor; ``None`` where this rank has none.
        like: The tensors.
        group: The ranks, each of which has the same tensors.

    Returns:
        The sums; ``None`` where no rank has a gradient.
    """
    result: list[Tensor | None] = [None] * len(like)
    for dtype in dict.fromkeys(tensor.dtype for tensor in like):
        chosen = [i for i, tensor in enumerate(like) if tensor.dtype is dtype]
        mine = [gradients[i] for i in chosen]
        parts = [
            (torch.zeros_like(like[i]) if g is None else g).reshape(-1)
            for i, g in zip(chosen, mine, strict=True)
        ]
        flags = parts[0].new_tensor([float(g is not None) for g in mine])
        flat = torch.cat([*parts, flags])
        dist.all_reduce(flat, group=group)
        *sums, found = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
        for i, total, flag in zip(chosen, sums, found.tolist(), strict=True):
            if flag:
                result[i] = total.view_as(like[i])
    return result


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Copy the tensors of rank ``source`` to the other ranks of ``group`` (``None``: all)."""
    for tensor in tensors:
        if not tensor.numel():
            continue
        staged = tensor.detach().to(device).contiguous()
        dist.broadcast(staged, src=source, group=group)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)


@contextmanager
def own_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let a block collect gradients of its own in ``.grad``, unseen by the parameters' hooks."""
    held = [p.grad for p in parameters]
    tables = [t for p in parameters for t in (p._backward_hooks, _after_hooks(p)) if t]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        for table, saved in zip(tables, hooks, strict=True):
            table.update(saved)


def _after_hooks(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)
