"""SLURM's requeue signal: save between two steps, on all ranks, not wherever the signal comes."""

import signal
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

__all__ = ["DeferredRequeue"]


class DeferredRequeue(Callback):
    """Runs Lightning's own requeue handler at the end of a batch, once any rank has been signalled.

    Lightning saves within the handler. In the middle of a pipeline's step the ranks stand at
    different places then, a signal may reach only some of them, and saving needs all.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._number: signal.Signals | None = None
        self._signalled = False
        self._step = 0

    @classmethod
    def needed(cls, trainer: Trainer) -> bool:
        """Whether Lightning would requeue by itself, and nothing defers that yet."""
        environment = trainer._accelerator_connector.cluster_environment
        return (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and not any(isinstance(c, cls) for c in trainer.callbacks)  # type: ignore[attr-defined]
        )

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def _install(self, trainer: Trainer) -> None:
        """Take the handler's place; not before Lightning has installed it, and once."""
        if self._handler is not None:
            return
        environment = trainer._accelerator_connector.cluster_environment
        assert isinstance(environment, SLURMEnvironment)
        self._signalled, self._step = False, trainer.global_step
        self._number = environment.requeue_signal
        if self._number is not None:
            self._handler = signal.signal(self._number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated, and would be lost
        self._step = trainer.global_step
        if not trainer.strategy.reduce_boolean_decision(self._signalled, all=False):
            return
        self._signalled = False
        if callable(self._handler):
            self._handler(self._number, None)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._number is not None and self._handler is not None:
            signal.signal(self._number, self._handler)
        self._handler = None
