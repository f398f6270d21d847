"""Measure what each layer of a module costs, on this device and on its own data.

Usage:
    python recipes/profile.py                                   # the example, on the CPU
    python recipes/profile.py trainer=gpu experiment=hf_causal  # the groups of recipes/train.py
    python recipes/profile.py profile.samples=[1,2,4] profile.lengths=[64,128,384]
    python recipes/profile.py profile.path=costs.json            # use it again while it holds
    python recipes/profile.py --cfg job                         # show the configuration only

Prints a table and the error on shapes that the fit has not seen. Writes ``profile.json``, which
``recipes/plan.py costs=`` and ``recipes/simulate.py costs=`` take, and, if matplotlib is installed,
``profile.png``.
"""

import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="../conf", config_name="profile")
def main(cfg: DictConfig) -> float:
    """Measure, and return the relative error, which a sweep compares."""
    # Here, since whatever the other recipes load may ask for this file by mistake; see below.
    from pipeswift_lightning.jobs.profiling import profile
    from pipeswift_lightning.jobs.refusal import refusing

    return refusing("profile")(profile)(cfg)


if __name__ == "__main__":
    from pipeswift_lightning.jobs.application import application

    with application("profile"):
        main()
else:  # A script's folder is first on Python's path: cProfile gets the real `profile` from here.
    spec = spec_from_file_location(__name__, Path(sysconfig.get_path("stdlib"), "profile.py"))
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])
