"""Turn a checkpoint in shards into one file, in a single process.

Usage:
    python recipes/reshard.py source=RUN/sharded target=whole.ckpt           # the newest whole one
    python recipes/reshard.py source=RUN/sharded/step100 target=whole.ckpt   # this one
    python recipes/reshard.py source=RUN/sharded target=weights.safetensors  # the weights alone

A pipeline of any other size needs none of this: it resumes from the folder, by ``ckpt_path=``. The
file is for everything else: plain Lightning (``Trainer().fit(ckpt_path=)``, the optimizer's state
included), ``LightningModule.load_from_checkpoint``, and tools that read safetensors.
"""

import hydra
from hydra.utils import to_absolute_path
from omegaconf import DictConfig

from pipeswift_lightning.jobs.application import application
from pipeswift_lightning.jobs.refusal import refusing
from pipeswift_lightning.strategies.consolidate import consolidate


@hydra.main(version_base="1.3", config_path="../conf", config_name="reshard")
@refusing("reshard")
def main(cfg: DictConfig) -> None:
    """Write the file, and say what it was made of."""
    target = to_absolute_path(cfg.target)
    print(f"{target}: from {consolidate(to_absolute_path(cfg.source), target)}")


if __name__ == "__main__":
    with application("reshard"):
        main()
