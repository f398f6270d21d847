"""Train a LightningModule as a pipeline.

Usage:
    python recipes/train.py                                  # four stages on the CPU
    python recipes/train.py trainer=gpu strategy.stages=4    # four stages; more GPUs replicate them
    python recipes/train.py strategy=auto trainer.devices=1  # plain Lightning, to compare
    python recipes/train.py data.path=FILE_OR_FOLDER         # text of your own
    python recipes/train.py experiment=gpt_tiny debug=fdr    # named set-ups
    python recipes/train.py --cfg job                        # show the configuration, run nothing

Each group is a folder of ``conf/``, each choice a file in it that says when to choose it.
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig

import pipeswift_lightning  # noqa: F401 -- registers strategy="pipeswift"


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train, and return the metric that a sweep compares."""
    seed_everything(cfg.seed, workers=True)
    data: LightningDataModule = instantiate(cfg.data)
    module: LightningModule = instantiate(cfg.model)
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=list(instantiate(cfg.callbacks).values()),
        logger=list(instantiate(cfg.logger).values()),
    )
    trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)
    metric = trainer.callback_metrics.get(cfg.metric)
    return None if metric is None else float(metric)


if __name__ == "__main__":
    main()
