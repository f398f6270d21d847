"""Let any Hydra application choose from this package's groups, once the package is installed."""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from typing_extensions import override

__all__ = ["PipeSwiftSearchPathPlugin", "conf_folder"]


def conf_folder() -> Path | None:
    """Return the folder of the groups: the wheel's copy, or the source checkout's own.

    The package is found, not imported: Hydra loads this plugin in every application.
    """
    spec = find_spec("pipeswift_lightning")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "strategy" / "pipeswift.yaml").is_file():
            return folder
    return None


class PipeSwiftSearchPathPlugin(SearchPathPlugin):
    """Append this package's ``conf/`` to Hydra's search path; the application's own comes first."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = conf_folder()
        if folder is not None:
            search_path.append(provider="pipeswift-lightning", path=f"file://{folder}")


def _sweep() -> str | None:
    from pipeswift_lightning.strategies.hydra_job import sweep_of_this_job

    return sweep_of_this_job()


# ``${pipeswift.sweep:}`` in any application: the name of the sweep's folder, null outside a sweep.
OmegaConf.register_new_resolver("pipeswift.sweep", _sweep, replace=True)
