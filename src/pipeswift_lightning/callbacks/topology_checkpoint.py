"""Checkpoints that every rank writes a part of, with the topology, resumable on any other."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from pipeswift_lightning.callbacks.pipeline import CallbackError
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory, FoundCheckpoint
from pipeswift_lightning.strategies.argument import (
    COUNT,
    FLAG,
    PATH,
    Argument,
    checked,
    is_positive,
)

__all__ = ["SAVE_NOW", "TopologyCheckpoint", "require_own_signals"]

SAVE_NOW = "SAVE_NOW"


_DEADLY = {
    "SIGKILL": "ends a process at once",
    "SIGSTOP": "stops a process at once",
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"), "says that the process has failed"),
}
_ARGUMENTS = {
    "dirpath": PATH,
    "every_n_steps": COUNT.or_none("none"),
    "every_minutes": Argument("a number above 0", "every_minutes=10, say", is_positive).or_none(
        "none"
    ),
    "keep": COUNT.or_none("all of them"),
    "asynchronous": FLAG,
    "signals": Argument(
        "a list of names of signals",
        'signals=["SIGUSR1"], or signals=[] for none',
        lambda value: (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(isinstance(name, str) for name in value)
        ),
    ),
    "watch_file": FLAG,
}


@runtime_checkable
class _SavesShards(Protocol):
    """What a strategy must offer."""

    def save_sharded(
        self, dirpath: str | Path, *, fresh: bool, asynchronous: bool, keep: int | None
    ) -> Path: ...

    def require_writable(self, dirpath: Path) -> None: ...

    def note_epoch_start(self) -> None: ...

    def poll_saves(self) -> None: ...

    def finish_saves(self) -> None: ...

    def any_rank(self, wish: bool) -> bool: ...  # noqa: FBT001


class TopologyCheckpoint(Callback):
    """Save in shards, every so often or when told to; each save is resumable on any topology.

    A save is made at the end of a batch whose optimizer step is done; if validation or the end of
    the epoch is due then, after it, so that a resumed run misses nothing. `ModelCheckpoint` goes on
    working beside it.

    Args:
        dirpath: Folder of the checkpoints ``step<N>/``, on a file system that all ranks share. One
            run writes to it at a time.
        every_n_steps: Optimizer steps between saves; ``None`` for none.
        every_minutes: Minutes between saves, by rank 0's clock; ``None`` for none.
        keep: How many of the newest to keep; ``None`` for all.
        asynchronous: Copy at once, and write in a thread while training goes on. The copy takes the
            memory of a rank's parameters and optimizer state once more, on the host.
        signals: Names of signals that ask for a save, on any rank: ``["SIGUSR1"]``. The handler
            sets a flag; the save follows at the end of the batch. Under SLURM, not the one at which
            Lightning requeues.
        watch_file: Whether a file ``<dirpath>/SAVE_NOW`` asks for a save. It is removed when the
            save begins.

    With ``every_minutes``, ``signals`` or ``watch_file`` the ranks agree after each optimizer step,
    by one small reduction.

    Raises:
        CallbackError: An argument is out of its range.
        CheckpointError: At the start of a fit, some rank cannot write to ``dirpath``.

    Example:
        >>> TopologyCheckpoint.latest("no/such/folder") is None
        True
    """

    @checked(_ARGUMENTS, CallbackError)
    def __init__(
        self,
        dirpath: str | Path,
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = 2,
        asynchronous: bool = True,
        signals: Sequence[str] = (),
        watch_file: bool = True,
    ) -> None:
        self.dirpath = Path(dirpath)
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep = keep
        self.asynchronous = asynchronous
        self.watch_file = watch_file
        self._signals = [_signal(name) for name in signals]
        self._handlers: dict[signal.Signals, Any] = {}
        self._asked = False  # set by a signal's handler, which does nothing else
        self._due = False
        self._step = 0
        self._saved_s = time.monotonic()

    @staticmethod
    def latest(dirpath: str | Path) -> Path | None:
        """Return the newest whole checkpoint in ``dirpath``; ``None`` if there is none.

        ``trainer.fit(..., ckpt_path=TopologyCheckpoint.latest(dirpath))`` begins or resumes. Its
        bytes are compared with their checksums when it is loaded; if some are damaged, the one
        before it is taken, with a warning.
        """
        newest = CheckpointDirectory(Path(dirpath)).newest()
        return None if newest is None else FoundCheckpoint(newest)

    # -- set-up -------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _strategy(trainer).require_writable(self.dirpath)
            environment = trainer._accelerator_connector.cluster_environment
            require_own_signals(environment, self._signals)
            trainer.callbacks = _placed_last(self, trainer.callbacks)  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step, self._saved_s = trainer.global_step, time.monotonic()
        self._asked = self._due = False
        for number in self._signals:
            self._handlers[number] = signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True

    # -- when a save is due -------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).note_epoch_start()
        self._save_if_due(trainer, fresh=True)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = _strategy(trainer)
        strategy.poll_saves()
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        self._step = trainer.global_step
        if self.every_n_steps is not None and self._step % self.every_n_steps == 0:
            self._due = True
        if self._signals or self.watch_file or self.every_minutes is not None:
            self._due = strategy.any_rank(self._wishes(trainer) or self._due)
        if not _something_follows(trainer):
            self._save_if_due(trainer, fresh=False)

    def _wishes(self, trainer: Trainer) -> bool:
        """Whether this rank has been asked for a save; rank 0 alone looks at file and clock."""
        wish, self._asked = self._asked, False
        if trainer.is_global_zero:
            if self.every_minutes is not None:
                wish |= time.monotonic() - self._saved_s >= 60 * self.every_minutes
            if self.watch_file and (self.dirpath / SAVE_NOW).exists():
                (self.dirpath / SAVE_NOW).unlink()
                wish = True
        return wish

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if not trainer.sanity_checking and trainer.state.fn == "fit" and not is_last:
            self._save_if_due(trainer, fresh=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_if_due(trainer, fresh=True)
        _strategy(trainer).finish_saves()
        self._restore_handlers()

    def _save_if_due(self, trainer: Trainer, *, fresh: bool) -> None:
        if self._due:
            self._due = False
            _strategy(trainer).save_sharded(
                self.dirpath, fresh=fresh, asynchronous=self.asynchronous, keep=self.keep
            )
            self._saved_s = time.monotonic()

    # -- the end ------------------------------------------------------------------------------

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def require_own_signals(environment: object, signals: Sequence[signal.Signals]) -> None:
    """Refuse a signal at which Lightning requeues the job by itself.

    Raises:
        ValueError: It is one of ``signals``.
    """
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        taken = environment.requeue_signal
        if taken is not None and taken in signals:
            msg = (
                f"signals names {taken.name}, at which Lightning requeues the job. Rule: one "
                "signal, one meaning. Remedy: SLURMEnvironment(auto_requeue=False) in the "
                "Trainer's plugins, or another signal"
            )
            raise ValueError(msg)


def _placed_last(callback: Callback, callbacks: Sequence[Callback]) -> list[Callback]:
    """Let the others update their states before they are saved; Lightning's own go after all."""
    others = [c for c in callbacks if c is not callback]
    before = [c for c in others if not isinstance(c, Checkpoint)]
    return [*before, callback, *(c for c in others if isinstance(c, Checkpoint))]


def _something_follows(trainer: Trainer) -> bool:
    """Whether the epoch's end or a validation follows this batch."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop.batch_progress.is_last_batch or bool(
        trainer.enable_validation and loop._should_check_val_fx(fetcher)
    )


def _strategy(trainer: Trainer) -> _SavesShards:
    strategy = trainer.strategy
    if not isinstance(strategy, _SavesShards):
        msg = (
            f"TopologyCheckpoint with strategy {type(strategy).__name__}. Rule: it saves what "
            'strategy="pipeswift" has spread over stages. Remedy: Trainer(strategy="pipeswift"), '
            "with devices=1 too; or ModelCheckpoint"
        )
        raise ValueError(msg)
    return strategy


def _signal(name: str) -> signal.Signals:
    number = signal.Signals.__members__.get(name)
    if number is None:
        msg = (
            f"signals names {name!r}. Rule: each is the name of a signal. Remedy: one of "
            f"{', '.join(s.name for s in signal.Signals if s.name not in _DEADLY)}"
        )
        raise CallbackError(msg)
    if name in _DEADLY:
        msg = (
            f"signals names {name}, which cannot be handled: it {_DEADLY[name]}. Rule: a signal "
            'that asks for a save leaves the process running. Remedy: signals=["SIGUSR1"], say'
        )
        raise CallbackError(msg)
    return number
