"""What each value of the smaller recipes' configurations may be, looked at before they begin."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

from pipeswift_lightning.plan.orders import ORDERS
from pipeswift_lightning.plan.schedules import SCHEDULES
from pipeswift_lightning.plan.workload import Layout
from pipeswift_lightning.strategies.argument import (
    COUNT,
    FLAG,
    TEXT,
    Argument,
    is_count,
    is_number,
    is_path,
    is_positive,
    list_of,
    one_of,
)

__all__ = ["SETTINGS", "SettingError", "check_settings"]


class SettingError(ValueError):
    """A value of a recipe's configuration does not make sense."""


def _is_seconds(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_file(value: Any) -> bool:
    return is_path(value) and Path(to_absolute_path(str(value))).is_file()


def _is_folder(value: Any) -> bool:
    return is_path(value) and Path(to_absolute_path(str(value))).exists()


def _is_target(value: Any) -> bool:
    if not is_path(value):
        return False
    target = Path(to_absolute_path(str(value)))
    return target.parent.is_dir() and not target.is_dir()


def _is_schedule(value: Any) -> bool:
    return isinstance(value, str) and value in SCHEDULES


def _are_schedules(value: Any) -> bool:
    """Whether these can be compared: a step of prediction is no alternative to one of training."""
    return list_of(_is_schedule)(value) and ("forward_only" not in value or len(set(value)) == 1)


def _is_drawn(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"name", "warm_up"}:
        return False
    depth = value.get("warm_up")
    deep = depth is None or is_number(depth) or list_of(is_count)(depth)
    return deep and _is_schedule(value.get("name"))


_SECONDS = Argument("a number of seconds, 0 or more", "{name}=0.001, say", _is_seconds)
_ABOVE_ZERO = Argument("a number above 0", "{name}=1.0, say", is_positive)
_COUNTS = Argument(
    "a list of whole numbers, 1 or more each", "{name}=[1,2,4], say", list_of(is_count)
)
_OF_STAGES = Argument(
    "a list with a number above 0 for each stage", "{name}=[1.0,2.0], say", list_of(is_positive)
)
_COSTS = Argument(
    "a file that is there", "costs=profile.json, as recipes/profile.py writes it", _is_file
)
_TARGET = Argument("a file in a folder that is there", "make the folder first", _is_target)
_LINK = {"latency_s": _SECONDS, "bandwidth_bytes_per_s": _ABOVE_ZERO}

SETTINGS: Mapping[str, Mapping[str, Argument]] = {
    "plan": {
        "costs": _COSTS.or_none("the mock costs"),
        "lengths": _COUNTS.or_none("the mock lengths"),
        "micro_batches": Argument(
            "a whole number, 1 or more, or a list of them",
            "micro_batches=8, or micro_batches=[4,8]",
            lambda value: is_count(value) or list_of(is_count)(value),
        ).or_none("multiples of the stages"),
        "schedules": Argument(
            "a list of 1f1b and gpipe, or of forward_only alone, for prediction",
            "schedules=[1f1b,gpipe], or schedules=[forward_only]",
            _are_schedules,
        ),
        "width": COUNT,
        "workload.num_stages": COUNT,
        "workload.layout": one_of(*map(str, Layout)),
        "workload.overlap": FLAG,
        "workload.slowdown": _OF_STAGES.or_none("equal devices"),
        "workload.capacity_bytes": _OF_STAGES.or_none("no limit"),
        "workload.max_tokens": _ABOVE_ZERO,
        "workload.reorder": FLAG,
        "workload.order": one_of(*ORDERS),
        **{f"mock_link.{name}": argument for name, argument in _LINK.items()},
        "mock_costs.num_blocks": COUNT,
        "mock_costs.dim": COUNT,
        "mock_costs.vocabulary": COUNT,
        "mock_costs.flops_per_s": _ABOVE_ZERO,
        "mock_costs.fixed_s": _SECONDS,
        "mock_costs.relative_error": Argument("a share, 0 or more", "0.05, say", _is_seconds),
        "mock_lengths.number": COUNT,
        "mock_lengths.median": _ABOVE_ZERO,
        "mock_lengths.spread": Argument("a number, 0 or more", "0.9, say", _is_seconds),
        "mock_lengths.longest": COUNT,
        "mock_lengths.seed": Argument(
            "a whole number, 0 or more", "seed=0", lambda value: is_count(value, least=0)
        ),
    },
    "simulate": {
        "costs": _COSTS.or_none("equal costs"),
        "stages": COUNT,
        "micro_batches": COUNT,
        "forward_s": _ABOVE_ZERO,
        "backward_s": _ABOVE_ZERO,
        "samples": COUNT,
        "length": COUNT,
        "order": one_of(*ORDERS),
        "schedules": Argument(
            f"a list of schedules, each a name ({', '.join(SCHEDULES)}) and perhaps a warm_up",
            "'schedules=[{name: 1f1b, warm_up: 2.0}, {name: gpipe}]'",
            list_of(_is_drawn),
        ),
        **{f"link.{name}": argument for name, argument in _LINK.items()},
        "overlap": FLAG,
        "width": COUNT,
    },
    "reshard": {
        "source": Argument(
            "a folder that is there: a checkpoint in shards, or one that holds such",
            "source=run/sharded, the dirpath of a TopologyCheckpoint",
            _is_folder,
        ),
        "target": Argument(
            "the name of a file that is to be written, *.ckpt or *.safetensors",
            "target=whole.ckpt",
            is_path,
        ),
    },
    "compare": {
        "sweep": Argument(
            "a folder that is there", "sweep=logs/train/multiruns/START, say", _is_folder
        ),
        "target": _TARGET.or_none("compare.png in the sweep's folder"),
    },
    "dashboard": {
        "runs": Argument(
            "a folder, or a list of folders",
            "runs=logs/train, say",
            lambda value: is_path(value) or list_of(is_path)(value),
        ),
        "target": _TARGET,
        "title": TEXT,
        "entity": TEXT.or_none("a page instead of W&B"),
        "project": TEXT,
        "dry_run": FLAG,
    },
    "profile": {
        "seed": Argument(
            "a whole number, 0 or more", "seed=42", lambda value: is_count(value, least=0)
        ).or_none("another one each time"),
        "profile.path": Argument(
            "a file, or the name of one that is to be written",
            "profile.path=costs.json",
            lambda value: is_path(value) and not Path(to_absolute_path(str(value))).is_dir(),
        ).or_none("none"),
        "profile.network": TEXT.or_none("a search"),
        "profile.samples": _COUNTS.or_none("a quarter, a half and all of a batch's"),
        "profile.lengths": _COUNTS.or_none("quarters of the batch's"),
        "profile.options.repeats": COUNT,
        "profile.options.max_s": _ABOVE_ZERO,
        "profile.options.optimizer_factor": _SECONDS,
        "profile.options.processor_time": FLAG,
    },
}


def check_settings(cfg: DictConfig, recipe: str) -> None:
    """Look at a recipe's configuration before anything runs.

    Args:
        cfg: The configuration.
        recipe: Its name, a key of `SETTINGS`.

    Raises:
        SettingError: A value is not what it may be.
    """
    for key, argument in SETTINGS[recipe].items():
        group = key.rpartition(".")[0]
        if group and OmegaConf.select(cfg, group) is None:
            continue  # left out, or another object in its place
        value = OmegaConf.select(cfg, key)
        if not argument.fits(value):
            raise SettingError(argument.refusal(key, _plain(value)))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
