"""What each argument of `PipeSwiftStrategy` may be."""

from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision

from pipeswift_lightning.plan.orders import ORDERS
from pipeswift_lightning.strategies.argument import (
    FLAG,
    PATH,
    TEXT,
    Argument,
    instance,
    is_count,
    is_number,
    is_positive,
    list_of,
    one_of,
)
from pipeswift_lightning.strategies.options import LossScope, LossWeight

__all__ = ["OPTION_ARGUMENTS"]

_LEAST_SILENCE_S = 0.5  # five of the watchdog's ticks
_MOST_SECONDS = 1e9  # what waits take at most, some thirty years
_COUNTS = list_of(is_count)


def _is_depth(value: Any) -> bool:
    return is_number(value) and 1 <= value <= 2


def _is_depths(value: Any) -> bool:
    return _COUNTS(value) and all(a >= b for a, b in pairwise(value))


def _is_none(value: Any) -> bool:
    return value is None


def _is_layers(value: Any) -> bool:
    return is_count(value, least=0)


def _is_settings(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_backend(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return all(
        part.rpartition(":")[2].lower() in dist.Backend.backend_list for part in value.split(",")
    )


def _is(word: str) -> Any:
    return lambda value: isinstance(value, str) and value == word


def _any(*checks: Any) -> Any:
    return lambda value: any(check(value) for check in checks)


_SET_BY_TRAINER = "leave it out: the Trainer sets it"

OPTION_ARGUMENTS: Mapping[str, Argument] = {
    "stages": Argument("a whole number, 1 or more", "stages=4, say", is_count).or_none(
        "a stage on each device"
    ),
    "micro_batches": Argument(
        'a whole number, 1 or more, a list of samples of each micro-batch, or "auto"',
        'micro_batches=8, micro_batches=[3, 3, 2] or micro_batches="auto"',
        _any(_is_none, is_count, _COUNTS, _is("auto")),
        ("auto",),
    ),
    "schedule": one_of("auto", "1f1b", "gpipe"),
    "warm_up": Argument(
        "a factor from 1 to 2, or a list with a depth for each stage, 1 or more, that never rises",
        "warm_up=1.5, or warm_up=[3, 2, 1], say",
        _any(_is_depth, _is_depths),
    ).or_none("the least"),
    "network": Argument(
        "the name of an attribute of the module, or a list of names",
        'network="model", say',
        _any(TEXT.fits, list_of(TEXT.fits)),
    ).or_none("a search"),
    "partition": Argument(
        'a list with the number of layers of each stage, 1 or more each, or "uniform"',
        'partition=[3, 2, 2, 1], say, or partition="uniform"',
        _any(_COUNTS, _is("uniform")),
        ("uniform",),
    ).or_none("a balanced one"),
    "loss": one_of(*map(str, LossScope)),
    "loss_weight": one_of(*map(str, LossWeight)),
    "weights": PATH.or_none("weights of the module's own making"),
    "dynamic_shapes": FLAG,
    "receive_window": Argument(
        "a whole number, 1 or more", "receive_window=2, say", is_count
    ).or_none("as many as memory allows"),
    "recompute": Argument(
        "True, False, a number of layers a stage, or a list of them, 0 or more each",
        "recompute=True, or recompute=2, say",
        _any(FLAG.fits, _is_layers, list_of(_is_layers)),
    ),
    "compile": Argument(
        "True, False, the name of a backend, or a mapping of torch.compile's arguments",
        'compile=True, or compile={"mode": "reduce-overhead"}, say',
        _any(FLAG.fits, TEXT.fits, _is_settings),
    ),
    "costs": Argument(
        'a path, or "measure"', 'costs="costs.json", say, or costs="measure"', PATH.fits
    ).or_none("no planning"),
    "trim": Argument(
        'True, False, or "auto"', 'trim="auto"', _any(FLAG.fits, _is("auto")), ("auto",)
    ),
    "memory_limit": Argument(
        "a number of bytes above 0, or a list with one for each stage",
        "memory_limit=16e9, say",
        _any(is_positive, list_of(is_positive)),
    ).or_none("no limit"),
    "order": one_of(*ORDERS),
    "buckets": Argument(
        "a whole number of tokens, 1 or more, or a list of them",
        "buckets=64, or buckets=[64, 128, 256], say",
        _any(is_count, _COUNTS),
    ).or_none("each micro-batch's own length"),
    "silence_s": Argument(
        f"a number of seconds, {_LEAST_SILENCE_S} or more, and finite",
        "silence_s=10, or silence_s=600 where ranks may be silent for long",
        lambda v: is_number(v) and _LEAST_SILENCE_S <= v <= _MOST_SECONDS,
    ),
    "process_group_backend": Argument(
        "the name of a backend of torch.distributed",
        'process_group_backend="gloo" or "nccl"',
        _is_backend,
        ("gloo", "nccl"),
    ).or_none("the device's"),
    "timeout": Argument(
        "a datetime.timedelta above 0",
        "timeout=timedelta(minutes=30)",
        lambda v: isinstance(v, timedelta) and v > timedelta(0),
    ),
    "cluster_environment": instance(ClusterEnvironment, _SET_BY_TRAINER),
    "checkpoint_io": instance(CheckpointIO, _SET_BY_TRAINER),
    "precision_plugin": instance(Precision, 'Trainer(precision="bf16-mixed"), say'),
}
