"""Train a LightningModule as a pipeline.

Usage:
    python recipes/train.py                                  # four stages on the CPU
    python recipes/train.py trainer=gpu strategy.stages=4    # four stages; more GPUs replicate them
    python recipes/train.py strategy=auto trainer.devices=1  # plain Lightning, to compare
    python recipes/train.py data.path=FILE_OR_FOLDER         # text of your own
    python recipes/train.py experiment=gpt_tiny debug=fdr    # named set-ups
    python recipes/train.py -m strategy.micro_batches=4,8,16 # one job after the other
    python recipes/train.py -m hparams_search=pipeline       # search for the fastest plan
    python recipes/train.py --cfg job                        # show the configuration, run nothing

Each group is a folder of ``conf/``, each choice a file in it that says when to choose it.
"""

import hydra
from omegaconf import DictConfig

import pipeswift_lightning  # noqa: F401 -- registers strategy="pipeswift"
from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.training import train


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train, and return the metric that a sweep compares."""
    return train(cfg)


if __name__ == "__main__":
    with application("train"):
        main()
