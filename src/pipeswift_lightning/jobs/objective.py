"""What a sweep compares: a logged metric, or a number of the job's report."""

import math
from collections.abc import Iterator, Mapping

from lightning.pytorch import Trainer

__all__ = ["ObjectiveError", "objective"]


class ObjectiveError(ValueError):
    """Nothing has the name of the value that was asked for."""


def objective(trainer: Trainer, name: str | None) -> float | None:
    """Return the value called ``name`` after training.

    Args:
        trainer: Its ``fit`` has ended.
        name: A logged metric (``val/loss``), or a number in the report of a callback that has one,
            as `JobReport` has (``job_completion_s``, ``step_s.median``). None: no value is asked.

    Raises:
        ObjectiveError: There is no such value, or it is no finite number.
    """
    if name is None:
        return None
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        report = getattr(callback, "report", None)
        if isinstance(report, Mapping):
            values.update(_numbers(report))
    value = values.get(name)
    if value is None or not math.isfinite(value):
        found = "is not there" if value is None else f"is {value}"
        message = (
            f"optimized_metric={name} {found}. Rule: a metric that the module logs, or a number of "
            f"the job's report; both are known when training ends. There are: "
            f"{', '.join(sorted(values)) or 'none'}"
        )
        raise ObjectiveError(message)
    return value


def _numbers(report: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in report.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
