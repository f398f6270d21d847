"""What `recipes/profile.py` does with its configuration."""

from importlib.util import find_spec
from pathlib import Path

from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig
from rich.console import Console

from pipeswift_lightning.drawing.profile_bar import profile_bar
from pipeswift_lightning.drawing.profile_png import profile_png
from pipeswift_lightning.drawing.profile_table import profile_tables
from pipeswift_lightning.runtime.profiler import write_profile
from pipeswift_lightning.strategies.module_profile import profile_module

__all__ = ["profile"]


def profile(cfg: DictConfig) -> float:
    """Measure a module, write its profile and print it; returns the relative error."""
    seed_everything(cfg.seed, workers=True)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    trainer = instantiate(cfg.trainer, devices=1, num_nodes=1, logger=False)
    with profile_bar() as tell:
        wanted = instantiate(cfg.profile, _convert_="all")
        measured = profile_module(module, data, trainer, tell=tell, **wanted)
    folder = Path(cfg.paths.output_dir)
    write_profile(measured, folder / "profile.json")
    Console().print(profile_tables(measured))
    if find_spec("matplotlib") is not None:
        (folder / "profile.png").write_bytes(profile_png(measured))
    Console().print(f"written to {folder}", soft_wrap=True)
    return measured.relative_error
