"""What a command of one job refuses is one line, since most often its arguments are wrong."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig

from pipeswift_lightning.jobs.settings import check_settings

__all__ = ["Refusal", "refused", "refusing"]

T = TypeVar("T")
_OURS = "pipeswift_lightning."


class Refusal(SystemExit):
    """Ends the program with exit code 2; `application` says why.

    It is no ``Exception``: Hydra would put a line of its own before ours.

    Args:
        error: What was refused, by this package or by the operating system.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(2)
        self.error = error

    @property
    def line(self) -> str:
        """Value, rule and remedy."""
        error = self.error
        if isinstance(error, OSError) and error.filename is not None:
            return (
                f"{error.filename}: {error.strerror}. Rule: a file that is named is there and can "
                "be read, and a folder can be written to. Remedy: correct the name, or set "
                "HYDRA_FULL_ERROR=1 to see where it is used"
            )
        return " ".join(str(error).split())


def refusing(recipe: str) -> Callable[[Callable[[DictConfig], T]], Callable[[DictConfig], T]]:
    """Return a decorator for the function of ``hydra.main``, below it.

    The configuration is looked at first. What this package refuses then, and files that cannot be
    used, end the program by a `Refusal`; in a sweep, where other jobs follow, by the error itself.

    Args:
        recipe: Its name, a key of `SETTINGS`.
    """

    def decorate(main: Callable[[DictConfig], T]) -> Callable[[DictConfig], T]:
        @wraps(main)
        def run(cfg: DictConfig) -> T:
            try:
                check_settings(cfg, recipe)
                return main(cfg)
            except Exception as error:
                cause = refused(error)
                if cause is not None and HydraConfig.get().mode is not RunMode.MULTIRUN:
                    raise Refusal(cause) from error
                raise

        return run

    return decorate


def refused(error: Exception) -> Exception | None:
    """Return what this package, or the operating system about a named file, refuses by an error.

    None if it is an error of another kind, whose place has to be seen.
    """
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if not isinstance(cause, Exception):
        return None
    named = isinstance(cause, OSError) and cause.filename is not None
    return cause if named or type(cause).__module__.startswith(_OURS) else None
