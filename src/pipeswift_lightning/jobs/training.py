"""Train what a configuration describes."""

import os
import warnings
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig

from pipeswift_lightning.jobs.clean_up import leaving_nothing_behind
from pipeswift_lightning.jobs.config_tree import show_config
from pipeswift_lightning.jobs.objective import objective
from pipeswift_lightning.jobs.same_config import SameConfig

__all__ = ["train"]


def train(cfg: DictConfig) -> float | None:
    """Train, and return what a sweep compares.

    Afterwards the process is as it was: children have ended, the process group is gone, loggers'
    runs are closed, the environment's variables are restored. So jobs may follow one another.

    Args:
        cfg: Composed from ``conf/train.yaml``, or of the same form.

    Returns:
        The value that ``cfg.optimized_metric`` names, on rank 0; None on the others.

    Raises:
        ObjectiveError: Nothing has that name after training.
        DisagreementError: The ranks were given different configurations; it names the keys.
    """
    with leaving_nothing_behind() as job, warnings.catch_warnings():
        _extras(cfg)
        seed_everything(cfg.seed, workers=True)
        data: LightningDataModule = instantiate(cfg.data)
        module: LightningModule = instantiate(cfg.model)
        trainer: Trainer = instantiate(
            cfg.trainer,
            strategy=instantiate(cfg.strategy),
            callbacks=[SameConfig(cfg), *_values(cfg.callbacks)],
            logger=_values(cfg.logger),
        )
        job.trainer = trainer
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)
        return objective(trainer, cfg.optimized_metric) if trainer.is_global_zero else None


def _values(group: DictConfig) -> list[Any]:
    return list(instantiate(group).values())


def _extras(cfg: DictConfig) -> None:
    extras = cfg.get("extras")
    if extras is None:
        return
    if extras.ignore_warnings:
        warnings.filterwarnings("ignore")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show_config(cfg, printed=extras.print_config)
