"""A Hydra application's frame: mistakes of the command line in one line, each with its remedy."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    CompactHydraException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.pipeswift_lightning_searchpath import conf_folder
from pipeswift_lightning.jobs.refusal import Refusal, refused
from pipeswift_lightning.strategies.hydra_job import SWEEP_PID_VARIABLE, recorded_application

__all__ = ["application", "explain"]

_FULL = "HYDRA_FULL_ERROR"


@contextmanager
def application(config_name: str = "train") -> Iterator[None]:
    """Run a function of ``hydra.main`` in this block.

    A wrong key or option on the command line ends the program with one line that names the likely
    right one, and exit code 2. So does a `Refusal`, and a value that an object of this package does
    not take. All other errors of the job keep their whole traceback, and with
    ``HYDRA_FULL_ERROR=1`` these too. And the jobs of joblib's and submitit's launchers learn which
    script starts the ranks.

    Args:
        config_name: The application's primary configuration, from which right keys are known.

    Example:
        >>> with application("train"):
        ...     pass  # main()
    """
    before = os.environ.get(_FULL)
    os.environ[_FULL] = "1"  # Hydra raises its errors, instead of printing them in its own way
    try:
        _follow_the_sweep()
        with recorded_application():
            yield
    except InstantiationException as error:
        cause = refused(error)
        if before == "1" or cause is None:
            raise  # a constructor's own error, most often: where it was raised has to be seen
        _end(Refusal(cause).line)
    except Refusal as refusal:
        if before == "1":
            raise refusal.error from None
        _end(refusal.line)
    except CompactHydraException as error:
        if before == "1":
            raise
        code = getattr(error, "exit_code", 2)  # the launcher's, if a job has failed
        _end(explain(error, sys.argv[1:], config_name), code=code)
    finally:
        if before is None:
            os.environ.pop(_FULL, None)
        else:
            os.environ[_FULL] = before


def _end(line: str, *, code: int = 2) -> NoReturn:
    sys.stderr.write(f"error: {line}\n")
    sys.exit(code)


def _follow_the_sweep() -> None:
    """In a job that a sweep has started, end when the sweep is gone, even if it was killed."""
    parent = os.environ.pop(SWEEP_PID_VARIABLE, None)
    if parent == str(os.getppid()):
        threading.Thread(target=_wait_for_the_end_of, args=[int(parent)], daemon=True).start()


def _wait_for_the_end_of(parent: int, poll_s: float = 1.0) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    sys.stderr.write(f"pipeswift: the sweep (pid {parent}) is gone. Ending this job as well.\n")
    os.kill(os.getpid(), signal.SIGTERM)


def explain(error: CompactHydraException, arguments: Sequence[str], config_name: str) -> str:
    """Return one line about an error of Hydra's, with the likely right name.

    Args:
        error: Raised when ``arguments`` were composed.
        arguments: The command line.
        config_name: The primary configuration.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _wrong_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {' '.join(error.message.split())}"
    key = getattr(error.__cause__, "full_key", None)
    if isinstance(error.__cause__, OmegaConfBaseException) and key:
        return _wrong_key(str(key), arguments, config_name)
    return " ".join(str(error).split())


def _wrong_option(error: MissingConfigException) -> str:
    missing: Any = error.missing_cfg_file
    group, _, name = str(missing).rpartition("/")
    options = list(error.options or ())
    return (
        f"{group}={name}: there is no such option.{_guess(name, options, f'{group}=')} "
        f"There are: {', '.join(options)}"
    )


def _wrong_key(key: str, arguments: Sequence[str], config_name: str) -> str:
    text = next((a for a in arguments if a.lstrip("+~").partition("=")[0] == key), key)
    known = _known_keys(arguments, config_name)
    return (
        f"{key}: there is no such key.{_guess(key, known, '')} To add a new one, write +{text}"
        if known
        else f"{key}: there is no such key. To add a new one, write +{text}"
    )


def _guess(name: str, known: Sequence[str], prefix: str) -> str:
    found = get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(prefix + match for match in found)}?" if found else ""


def _known_keys(arguments: Sequence[str], config_name: str) -> list[str]:
    """Return all keys and groups of the configuration with its choices of groups alone."""
    folder = conf_folder()
    if folder is None:
        return []
    groups = {str(path.parent.relative_to(folder)) for path in folder.rglob("*.yaml")}
    choices = [a for a in arguments if a.partition("=")[0] in groups and "," not in a]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            cfg = compose(config_name, choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException):
        return sorted(groups)
    return [*sorted(groups - {"."}), *_keys(cfg)]


def _keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    names: list[Any] = list(cfg)
    for name in map(str, names):
        key = f"{prefix}{name}"
        yield key
        child = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{key}.")
