"""Every rank must run the same job: its whole configuration is compared before the first step."""

import hashlib
import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from pipeswift_lightning.runtime.agreement import require_agreement
from pipeswift_lightning.strategies.mesh_strategy import MeshStrategy

__all__ = ["SameConfig", "config_facts"]

log = logging.getLogger(__name__)
_RULE = (
    "Rule: every rank of a job runs the same configuration. Remedy: start the ranks from one "
    "command with one set of overrides; use no random values, time or variables of one process "
    "in the configuration, and do not start `--multirun` by torchrun: each rank would sweep"
)


class SameConfig(Callback):
    """Compare the configuration over all ranks when a Trainer call is set up.

    It costs one all-gather of 20 bytes. A difference is an error on all ranks that names each key
    that differs and what each rank has for it.

    Args:
        cfg: This rank's configuration.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._facts = config_facts(cfg)
        text = "\n".join(f"{key}={value}" for key, value in self._facts.items())
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        log.info(f"rank {trainer.global_rank}: configuration {self._digest}")
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy):
            strategy.require_agreement("comparing the configuration", self._facts, _RULE)
        elif trainer.world_size > 1 and isinstance(strategy, ParallelStrategy):
            require_agreement(self._facts, None, strategy.root_device, rule=_RULE)


def config_facts(cfg: DictConfig) -> dict[str, str]:
    """Return each value of a configuration by its key, as the command line writes it.

    Example:
        >>> config_facts(OmegaConf.create({"trainer": {"devices": 2}, "tags": ["a", "b"]}))
        {'trainer.devices': '2', 'tags': "['a', 'b']"}
    """
    facts: dict[str, str] = {}
    _add(OmegaConf.to_container(cfg, resolve=True), "", facts)
    return facts


def _add(value: Any, key: str, facts: dict[str, str]) -> None:
    if isinstance(value, dict) and (value or not key):
        for name, child in value.items():
            _add(child, f"{key}.{name}" if key else str(name), facts)
    else:
        facts[key] = str(value)
