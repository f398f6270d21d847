"""What loggers are told beside numbers, such as the plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["log_facts"]


def log_facts(loggers: Sequence[Logger], facts: Mapping[str, Any]) -> None:
    """Add facts to the configuration that each logger keeps; one that refuses them is told of.

    MLflow refuses a value that differs from the one it has, as when a run goes on with another
    plan. That is no reason to end a training.

    Example:
        >>> from lightning.pytorch.loggers.logger import DummyLogger
        >>> log_facts([DummyLogger()], {"job": {"stages": 2}})
    """
    for logger in loggers:
        try:
            logger.log_hyperparams(dict(facts))
        except Exception as error:  # noqa: BLE001 -- each logger has errors of its own
            rank_zero_warn(
                f"pipeswift: {type(logger).__name__} does not take {dict(facts)}: {error}. Rule: "
                "some loggers, as MLflow's, never change a value that they have. Training goes on "
                "without. Remedy: a new run of the logger for another plan"
            )
