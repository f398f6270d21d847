"""Start the processes from a notebook or an interpreter, where there is no script to run again."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from pipeswift_lightning.runtime.failure import PipelineFailure

__all__ = ["NotebookLauncher"]


class NotebookLauncher(_MultiProcessingLauncher):
    """Lightning's fork launcher, which tells an exception to the other ranks.

    The processes begin as copies of the interpreter, so modules defined in cells work. Afterwards
    the module has the trained weights here too, unless the processes have built it themselves
    (``configure_model``, or on the meta device): then they are in a checkpoint only. As for
    Lightning's ``ddp_notebook``, CUDA and autograd must not have been used before in the
    interpreter, and one Trainer fits once.

    Args:
        strategy: The strategy.
        on_failure: Told each exception that ends a Trainer call; returns what to raise.
        check: Given the Trainer, refuses what is wrong already, before any process is started.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        *,
        on_failure: Callable[[BaseException], BaseException],
        check: Callable[[Any], None],
    ) -> None:
        super().__init__(strategy, start_method="fork")
        self._on_failure = on_failure
        self._check = check

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self._check(trainer)
        told = partial(_telling, self._on_failure, function)
        return super().launch(told, *args, trainer=trainer, **kwargs)

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        module = trainer.lightning_module
        is_here = not is_overridden("configure_model", module)
        if worker_output.weights_path is not None and not (
            is_here and all(not p.is_meta for p in module.parameters())
        ):
            rank_zero_warn(
                f"pipeswift: {type(module).__name__} was built in the processes that trained it, "
                "so it has not the trained weights in this interpreter. Load them from a "
                "checkpoint: ModelCheckpoint and load_from_checkpoint(), or TopologyCheckpoint."
            )


def _telling(
    on_failure: Callable[[BaseException], BaseException],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        cause = on_failure(error)
        if isinstance(cause, PipelineFailure):
            raise cause.with_traceback(None) from None
        raise
