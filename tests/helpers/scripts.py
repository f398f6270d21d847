"""Processes that become a script: as fresh ones do, but with the slow imports behind them."""

import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.helpers.distributed import fork_server

__all__ = ["started"]


def started(
    script: str | Path,
    *arguments: str,
    said: Path,
    folder: Path | None = None,
    environment: Mapping[str, str],
) -> BaseProcess:
    """Start a process that runs ``script`` as its main module, in ``folder``.

    What it starts in turn, such as the other ranks, are processes from nothing, as a user's are.

    Args:
        script: A Python file.
        arguments: Of its command line.
        said: Where its output goes.
        folder: Its working directory; this process's, if None.
        environment: Variables of its own.
    """
    what = (str(script), arguments, said, folder or Path.cwd(), dict(environment))
    process = fork_server().Process(target=_become, args=what)
    process.start()
    return process


def _become(
    script: str, arguments: tuple[str, ...], said: Path, folder: Path, variables: dict[str, str]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(variables)
    os.chdir(folder)
    with said.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
