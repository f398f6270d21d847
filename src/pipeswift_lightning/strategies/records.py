"""Record ``self.log`` per micro-batch where the loss is, merge, and replay it on every rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torchmetrics import Metric

from pipeswift_lightning.runtime.formed import in_data_order
from pipeswift_lightning.strategies.staying_results import staying_results

__all__ = ["LogRecord", "MergedLog", "logged_alike", "merge_outputs", "merge_records"]
__all__ += ["recorded", "replay"]


WeightsOf = Callable[[str, bool], Sequence[float] | None]


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One call of ``self.log`` in one micro-batch."""

    name: str
    value: Tensor | None
    metric: str | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MergedLog:
    """One call of ``self.log`` for the whole batch, as one device would have made it."""

    name: str
    value: Tensor | None
    metric: str | None
    options: dict[str, Any] = field(default_factory=dict)


class recorded:  # noqa: N801 -- a context, as those of contextlib
    """Collect the calls of ``self.log`` (and ``log_dict``) instead of making them.

    Args:
        module: The module whose calls are collected; entering gives the list.
    """

    # No generator: that would take several times as long, for each micro-batch.
    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._records: list[LogRecord] = []

    def __enter__(self) -> list[LogRecord]:
        self._module.__dict__["log"] = self._log
        return self._records

    def __exit__(self, *exc_info: object) -> None:
        self._module.__dict__.pop("log", None)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        metric, tensor = None, None
        if isinstance(value, Tensor):
            tensor = _copied(value, name)
        elif isinstance(value, Metric):
            modules = self._module.named_modules()
            metric = next((n for n, m in modules if m is value), None)
            tensor = _detached(getattr(value, "_forward_cache", None))
        elif isinstance(value, Mapping):
            msg = (
                f"self.log({name!r}, {value!r}) logs a dict. Rule: self.log takes one value. "
                "Remedy: self.log_dict(...)"
            )
            raise TypeError(msg)
        else:
            tensor = _copied(torch.as_tensor(value), name)
        options = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}
        self._records.append(LogRecord(name, tensor, metric, options))


def _copied(value: Tensor, name: str) -> Tensor:
    """Return a tensor as it is now, without its history."""
    with torch._C.DisableTorchFunction():  # a look at each call, though what is here is present
        if type(value) is Tensor and not value.is_meta:  # a parameter may soon be elsewhere
            return value.detach().clone()
    copy = value.detach().clone()  # a value that has arrived here may stand for it
    if copy.is_meta:
        msg = (
            f"self.log({name!r}) logs a value that another stage computes. Rule: steps log "
            "what the last stage has (its layers' outputs, the loss, the batch). Remedy: log "
            "it after the network's call, from its output"
        )
        raise RuntimeError(msg)
    return copy


_LOG_ARGUMENTS = tuple(signature(LightningModule.log).parameters)[3:]  # after self, name, value


def _detached(value: Any) -> Tensor | None:
    return value.detach().clone() if isinstance(value, Tensor) else None


def merge_records(
    records: Sequence[Sequence[LogRecord]],
    sizes: Sequence[int],
    weights_of: WeightsOf | None = None,
) -> list[MergedLog]:
    """Merge the records of each micro-batch into those of the batch.

    Means are weighted by the micro-batch's samples (or by its ``batch_size`` argument), which is
    exact for a mean over samples; sums, minima and maxima are what they say.

    Args:
        records: For each micro-batch, its records.
        sizes: Samples of each micro-batch.
        weights_of: Gives other weights for a name's means, or ``None``; told whether it has a
            ``batch_size``.
    """
    grouped: dict[str, list[tuple[LogRecord, float]]] = {}
    samples: dict[str, float] = {}
    for i, mine in enumerate(records):
        for record in mine:
            name, given = record.name, record.options.get("batch_size")
            weights = weights_of(name, given is not None) if weights_of is not None else None
            count = float(sizes[i] if given is None else given)
            grouped.setdefault(name, []).append((record, count if weights is None else weights[i]))
            samples[name] = samples.get(name, 0.0) + count
    return [
        _merge_one(name, entries, int(samples[name]), sum(sizes))
        for name, entries in grouped.items()
    ]


def _merge_one(
    name: str, entries: list[tuple[LogRecord, float]], given: int, num_samples: int
) -> MergedLog:
    first = entries[0][0]
    options = dict(entries[-1][0].options)
    options["batch_size"] = given if options.get("batch_size") is not None else num_samples
    values = [(r.value, weight) for r, weight in entries if r.value is not None]
    if not values:
        return MergedLog(name, None, first.metric, options)
    stacked = torch.stack([v.double() for v, _ in values])
    weights = torch.tensor([w for _, w in values], dtype=torch.float64, device=stacked.device)
    merged = _reduced(stacked, weights, options.get("reduce_fx", "mean"))
    dtype = values[0][0].dtype
    return MergedLog(
        name,
        merged.to(dtype if dtype.is_floating_point else torch.get_default_dtype()),
        first.metric,
        options,
    )


def _reduced(values: Tensor, weights: Tensor, reduce_fx: str | Callable[..., Any]) -> Tensor:
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    match kind.lower():
        case "mean" | "avg":
            counted = weights != 0  # what counts for nothing may well be nan
            values, weights = values[counted], weights[counted]
            shaped = weights.reshape(-1, *[1] * (values.dim() - 1))
            return (values * shaped).sum(0) / weights.sum()
        case "sum":
            return values.sum(0)
        case "min" | "amin":
            return values.amin(0)
        case "max" | "amax":
            return values.amax(0)
        case _ if callable(reduce_fx):
            return torch.as_tensor(reduce_fx(values))
        case _:
            msg = (
                f"reduce_fx={reduce_fx!r} is not known. Rule: it is mean, sum, min, max or a "
                'function. Remedy: self.log(..., reduce_fx="mean"), say'
            )
            raise ValueError(msg)


def replay(
    module: LightningModule, logs: Sequence[MergedLog], device: torch.device, *, replicated: bool
) -> None:
    """Make the merged calls of ``self.log`` on this rank.

    Without replicas every rank logs the same, so there is nothing to synchronise; saying that it
    is spares the user Lightning's advice to do so.
    """
    logged = any(entry.metric is not None for entry in logs)
    metrics = dict(module.named_modules()) if logged else {}
    for entry in logs:
        value: Any = entry.value.to(device) if entry.value is not None else None
        if entry.metric is not None:
            metric: Any = metrics[entry.metric]
            metric._forward_cache = value
            metric._update_count = max(1, metric._update_count)
            metric._computed = None
            value = metric
        options = entry.options if replicated else {**entry.options, "sync_dist": True}
        with staying_results():
            module.log(entry.name, value, **options)


@contextmanager
def logged_alike(module: LightningModule, *, replicated: bool) -> Iterator[None]:
    """Let ``self.log`` log for real, where every rank of a pipeline logs the same."""
    log = module.log
    if not replicated:  # as in `replay`
        module.__dict__["log"] = partial(_log_synced, log)
    try:
        yield
    finally:
        module.__dict__.pop("log", None)


def _log_synced(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    given = dict(zip(_LOG_ARGUMENTS, args[2:], strict=False))
    log(*args[:2], **{**given, **kwargs, "sync_dist": True})


def merge_outputs(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    samples: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Merge what the step returned for each micro-batch into one output for the batch.

    Scalars are averaged with the weights (the micro-batches' samples, unless they are given);
    tensors with as many rows as their micro-batch has samples are concatenated, in the data's order
    if ``samples`` says which each has, and then padded with zeros to the longest; anything else
    keeps the last micro-batch's.

    Example:
        >>> merge_outputs([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}], [2, 1])
        {'loss': tensor(2.)}
    """
    outputs = [tree_map_only(Tensor, lambda t: t.detach(), output) for output in outputs]
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        return outputs[-1]
    chosen = sizes if weights is None else weights
    leaves = [
        _merge_leaf(list(column), sizes, chosen, samples)
        for column in zip(*(f[0] for f in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


def _merge_leaf(
    leaves: list[Any],
    sizes: Sequence[int],
    chosen: Sequence[float],
    samples: Sequence[Sequence[int]] | None,
) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves[-1]
    if all(leaf.dim() == 0 for leaf in leaves):
        if not leaves[0].is_floating_point():
            return leaves[-1]
        weights = torch.tensor(chosen, dtype=torch.float64, device=leaves[0].device)
        values = torch.stack([x.double() for x in leaves])
        return _reduced(values, weights, "mean").to(leaves[0].dtype)
    by_sample = all(x.dim() and x.shape[0] == n for x, n in zip(leaves, sizes, strict=True))
    if not by_sample or len({leaf.dim() for leaf in leaves}) > 1:
        return leaves[-1]
    if samples is None:
        return torch.cat(leaves) if len({x.shape[1:] for x in leaves}) == 1 else leaves[-1]
    return in_data_order(torch.cat(_as_long(leaves)), samples)


def _as_long(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with zeros at the end of each dim but the first, so that they fit."""
    longest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in leaves), strict=True)]
    padded = []
    for leaf in leaves:
        missing = [n - have for n, have in zip(longest, leaf.shape[1:], strict=True)]
        pads = [width for n in reversed(missing) for width in (0, n)]
        padded.append(functional.pad(leaf, pads) if any(missing) else leaf)
    return padded
