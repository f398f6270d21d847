"""The composed configuration as a tree: printed once, and kept beside the run's results."""

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.syntax import Syntax
from rich.tree import Tree

__all__ = ["config_tree", "show_config"]

FILE_NAME = "config_tree.log"
_FIRST = ("data", "model", "strategy", "trainer", "callbacks", "logger", "paths", "extras")


def config_tree(cfg: DictConfig) -> Tree:
    """Return a branch for each group, the most important first, with its values as YAML.

    Interpolations are resolved, so the tree shows what the job gets.
    """
    tree = Tree("configuration", guide_style="dim")
    names = [name for name in _FIRST if name in cfg]
    for name in [*names, *(str(key) for key in cfg if key not in names)]:
        value = cfg[name]
        text = OmegaConf.to_yaml(value, resolve=True) if OmegaConf.is_config(value) else str(value)
        tree.add(str(name)).add(Syntax(text.rstrip(), "yaml", background_color="default"))
    return tree


@rank_zero_only
def show_config(cfg: DictConfig, *, printed: bool) -> None:
    """Write the tree to ``config_tree.log`` in the run's folder, on rank 0; print it if asked."""
    tree = config_tree(cfg)
    if printed:
        Console().print(tree)
    folder = Path(cfg.paths.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE_NAME).open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(tree)
