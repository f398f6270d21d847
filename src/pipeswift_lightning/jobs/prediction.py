"""Predict the step time of a sweep's next member from what the members before it have measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from pipeswift_lightning.callbacks.measured_step import MeasuredStep
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.instructions import ScheduleError
from pipeswift_lightning.plan.microbatches import choose_num_micro_batches
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s

__all__ = ["PipelineShape", "StepPredictor"]

# Wherever they stand in the model's or the data's configuration, a step takes as long with another.
_TIMELESS = frozenset(
    ["betas", "eps", "learning_rate", "lr", "momentum", "seed", "warm_up_steps", "weight_decay"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What a configuration says of its pipeline.

    Args:
        num_stages: Stages.
        num_micro_batches: Micro-batches of a step.
        schedule: The schedule's name.
        warm_up: 1F1B's, as the strategy takes it.
    """

    num_stages: int
    num_micro_batches: int
    schedule: str
    warm_up: Any

    @classmethod
    def of(cls, cfg: DictConfig) -> "PipelineShape | None":
        """Return a configuration's shape; None if it describes no pipeline, or not its size."""
        strategy: Any = cfg.get("strategy") or {}
        devices = cfg.trainer.get("devices")
        stages = strategy.get("stages") or devices
        if "micro_batches" not in strategy or not isinstance(stages, int):
            return None
        chosen = strategy.micro_batches
        if OmegaConf.is_list(chosen):
            number = len(chosen)
        elif isinstance(chosen, int):
            number = chosen
        elif isinstance(size := OmegaConf.select(cfg, "data.batch_size"), int):
            number = choose_num_micro_batches(size, stages)
        else:
            return None
        warm_up: Any = strategy.get("warm_up")
        is_default = strategy.schedule == "auto" and strategy.get("costs") is None
        return cls(
            num_stages=stages,
            num_micro_batches=number,
            schedule="1f1b" if is_default else strategy.schedule,
            warm_up=list(warm_up) if OmegaConf.is_list(warm_up) else warm_up,
        )

    def step_s(self, forward_s: float, backward_s: float) -> float | None:
        """Return the simulated step if work were divided equally and messages took no time.

        Args:
            forward_s: Seconds of all stages' and micro-batches' forwards together.
            backward_s: The same of the backwards.
        """
        p, m = self.num_stages, self.num_micro_batches
        costs = StepCosts.uniform(
            p, m, forward_s=forward_s / (p * m), backward_s=backward_s / (p * m)
        )
        try:
            return makespan_s(build_schedule(self.schedule, p, m, warm_up=self.warm_up), costs)
        except (ScheduleError, ValueError):
            return None  # impossible: the job itself says why


class StepPredictor:
    """Predict steps by simulating each member's schedule with the work that others have measured.

    The prediction is meant as a lower bound: equal stages, instant messages, no step of the
    optimizer. Measured are the seconds of forwards and backwards, over all stages; with different
    numbers of micro-batches measured, each micro-batch's fixed cost is a fitted straight line's
    slope. Members that differ in more than the pipeline (model, data, kind of devices, layers
    compiled or recomputed) are not compared: nothing is predicted until one of the same kind has
    run, and the best step is that of its kind. Learning rates, seeds and the like do not matter.
    One stage is predicted from members of one stage alone: what several have measured holds the
    cost of the cuts too.

    Needs the callback `MeasuredStep` in the members' configuration, which writes what is read here.
    """

    def __init__(self) -> None:
        self._learned: list[tuple[str, PipelineShape, int, float, float]] = []
        self._best_s: dict[str, float] = {}

    def learn(self, cfg: DictConfig, folder: Path) -> None:
        """Read what a member has measured, if it has."""
        shape, measured = PipelineShape.of(cfg), MeasuredStep.read(folder)
        if shape is None or measured is None:
            return
        forward_s = sum(map(sum, measured.costs.forward_s))
        backward_s = sum(map(sum, measured.costs.backward_s))
        kind = _kind(cfg)
        number = measured.costs.num_micro_batches
        self._learned.append((kind, shape, number, forward_s, backward_s))
        self._best_s[kind] = min(measured.step_s, self._best_s.get(kind, measured.step_s))

    def best_measured_s(self, cfg: DictConfig) -> float | None:
        """Return the shortest step that a member like this one has measured; None if none has."""
        return self._best_s.get(_kind(cfg))

    def predict(self, cfg: DictConfig) -> float | None:
        """Return the seconds of a step; None if nothing is known about such a job."""
        shape = PipelineShape.of(cfg)
        kind = _kind(cfg)
        if shape is None:
            return None
        known = [
            (m, f, b)
            for other, by, m, f, b in self._learned
            if other == kind and (shape.num_stages > 1 or by.num_stages == 1)
        ]
        if not known:
            return None
        numbers = [m for m, _, _ in known]
        m = shape.num_micro_batches
        return shape.step_s(
            _at(m, numbers, [f for _, f, _ in known]), _at(m, numbers, [b for _, _, b in known])
        )


def _at(x: int, numbers: list[int], seconds: list[float]) -> float:
    """Return the value at ``x`` of the line through the least value at each number.

    A line that falls is noise: the least value is returned then.
    """
    least: dict[int, float] = {}
    for number, value in zip(numbers, seconds, strict=True):
        least[number] = min(value, least.get(number, value))
    if len(least) > 1:
        slope, start = np.polyfit(list(least), list(least.values()), 1)
        if slope > 0 and start + slope * x > 0:
            return float(start + slope * x)
    return min(least.values())


def _kind(cfg: DictConfig) -> str:
    """Return what has to be equal for members to do the same work."""
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, Mapping)
    kept = {name: _without_timeless(values.get(name)) for name in ("model", "data")}
    for group, names in (
        ("trainer", ("accelerator", "precision")),
        ("strategy", ("compile", "recompute")),
    ):
        chosen = dict(values.get(group) or {})
        kept[group] = {name: chosen.get(name) for name in names}
    return json.dumps(kept, sort_keys=True, default=str)


def _without_timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_timeless(v) for k, v in value.items() if k not in _TIMELESS}
    return value
