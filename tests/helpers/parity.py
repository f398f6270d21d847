"""Run the same fit in plain Lightning and in a pipeline, and say where the two differ."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.watchdog import Watchdog

TOLERANCE = 1e-10
# Tests that expect an error on each rank catch it there. On a busy machine the main thread may not
# come to it within the half second that a user's process is given before it is ended.
Watchdog.__init__.__kwdefaults__["grace_s"] = 20.0


class RankEnvironment(ClusterEnvironment):
    """The ranks that the harness has started, as Lightning wants to see them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        assert size == self.world_size()

    def global_rank(self) -> int:
        return int(os.environ["RANK"])  # there is no process group after a failure

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.global_rank()

    def local_rank(self) -> int:
        return self.global_rank()

    def node_rank(self) -> int:
        return 0


class RecordingLogger(Logger):
    """Keeps what a logger is given."""

    name = "recording"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.history.append((step, {k: float(v) for k, v in metrics.items()}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass
class Outcome:
    """What a user can see of a fit."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    logged: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Recording(Callback):
    """Notes the loss and the learning rate of each batch, and the metrics at the end."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.outcome.losses.append(float("nan") if loss is None else float(loss))
        if trainer.optimizers:
            self.outcome.rates += [g["lr"] for g in trainer.optimizers[0].param_groups]

    def on_train_end(self, trainer, module) -> None:
        outcome = self.outcome
        outcome.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        outcome.bar = {k: float(v) for k, v in trainer.progress_bar_metrics.items()}
        outcome.steps, outcome.epochs = trainer.global_step, trainer.current_epoch


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for text in (".*does not have many workers.*", ".*log_every_n_steps.*", ".*val_dataloader.*"):
        warnings.filterwarnings("ignore", text)
    warnings.filterwarnings("ignore", ".*prefix.*|.*isinstance\\(treespec, LeafSpec\\).*")


def make_trainer(strategy: Any, outcome: Outcome | None = None, **kwargs: Any) -> Trainer:
    """A Trainer on the harness's ranks (or on one device), that records and prints nothing."""
    quiet()
    alone = isinstance(strategy, str) and strategy == "auto"
    outcome = outcome if outcome is not None else Outcome()
    callbacks = [*kwargs.pop("callbacks", []), Recording(outcome)]
    kwargs.setdefault("enable_checkpointing", False)
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if alone else RankEnvironment().world_size(),
        plugins=[*kwargs.pop("plugins", []), *([] if alone else [RankEnvironment()])],
        logger=kwargs.pop("logger", RecordingLogger()),
        callbacks=callbacks,
        enable_progress_bar=kwargs.pop("enable_progress_bar", False),
        enable_model_summary=False,
        log_every_n_steps=1,
        precision=kwargs.pop("precision", "64-true"),
        **{"num_sanity_val_steps": 0, **kwargs},
    )


def lone_trainer(strategy: Any, **kwargs: Any) -> Trainer:
    """A Trainer on one device, in this very process, that writes and prints nothing."""
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def _seed() -> None:
    torch.manual_seed(7)


def fit(
    make_module: Callable[[], LightningModule],
    make_loaders: Callable[[], Any],
    strategy: Any,
    *,
    ckpt_path: str | None = None,
    seed: Callable[[], Any] = _seed,
    **kwargs: Any,
) -> Outcome:
    """Fit a fresh module and return what came of it. ``strategy`` is "auto" for plain Lightning."""
    seed()
    module = make_module()
    loaders = make_loaders()
    outcome = Outcome()
    callbacks = kwargs.pop("callbacks", None)
    kwargs["callbacks"] = callbacks() if callable(callbacks) else list(callbacks or ())
    trainer = make_trainer(strategy, outcome, **kwargs)
    train, val = loaders if isinstance(loaders, tuple) else (loaders, None)
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    collect(outcome, trainer, module)
    let_go(trainer)
    return outcome


def collect(outcome: Outcome, trainer: Trainer, module: LightningModule) -> None:
    outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    outcome.parameters |= {n: b.detach().clone() for n, b in module.named_buffers()}
    if isinstance(trainer.logger, RecordingLogger):
        outcome.logged = trainer.logger.history


def let_go(trainer: Trainer) -> None:
    """Close the groups of a trainer's mesh, so that many fits fit into one process."""
    strategy = trainer.strategy
    if isinstance(strategy, PipeSwiftStrategy) and strategy._groups is not None:
        groups, strategy._groups = strategy._groups, None
        dist.barrier()
        every = [groups.pipeline, groups.replicas, *groups.edges.values(), *groups.shared.values()]
        for group in every:
            dist.destroy_process_group(group)


def on_rank_zero(run: Callable[[], Any]) -> Any:
    """Run on rank 0 alone, and give the result to all."""
    box = [run() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def plain(
    make_module: Callable[[], LightningModule], make_loaders: Callable[[], Any], **kwargs: Any
) -> Outcome:
    """Fit on a single device, with plain Lightning; on rank 0, for all."""
    return on_rank_zero(lambda: fit(make_module, make_loaders, "auto", **kwargs))


def differences(
    got: Outcome, want: Outcome, *, tolerance: float = TOLERANCE, logged: bool | None = None
) -> list[str]:
    """Say where two outcomes differ; a logger exists on rank 0 only."""
    found: list[str] = []
    if got.parameters.keys() != want.parameters.keys():
        found.append(f"names {sorted(got.parameters.keys() ^ want.parameters.keys())}")
    for name in got.parameters.keys() & want.parameters.keys():
        mine, other = got.parameters[name], want.parameters[name]
        if mine.is_meta or mine.shape != other.shape:
            found.append(f"{name}: {mine.device}{list(mine.shape)} for {list(other.shape)}")
        elif mine.numel() and not (mine - other).abs().max().item() <= tolerance:
            found.append(f"{name}: off by {(mine - other).abs().max().item():.1e}")
    found += _scalars("losses", got.losses, want.losses, tolerance)
    found += _scalars("rates", got.rates, want.rates, tolerance)
    found += _scalars("gradients", got.gradients, want.gradients, tolerance)
    found += _mapping("callback_metrics", got.metrics, want.metrics, tolerance)
    found += _mapping("progress bar", got.bar, want.bar, tolerance)
    if (got.steps, got.epochs) != (want.steps, want.epochs):
        found.append(f"{got.steps} steps, {got.epochs} epochs for {want.steps}, {want.epochs}")
    if logged is None:
        logged = dist.get_rank() == 0
    if logged:
        found += _histories(got.logged, want.logged, tolerance)
    if got.extra != want.extra:
        found.append(f"extra {got.extra} for {want.extra}")
    return found


def _scalars(what: str, got: Sequence[float], want: Sequence[float], tolerance: float) -> list[str]:
    if len(got) != len(want):
        return [f"{len(got)} {what} for {len(want)}"]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not abs(a - b) <= tolerance and not (a != a and b != b):
            return [f"{what}[{i}]: {a!r} for {b!r}"]
    return []


def _mapping(
    what: str, got: Mapping[str, float], want: Mapping[str, float], tolerance: float
) -> list[str]:
    if got.keys() != want.keys():
        return [f"{what}: keys {sorted(got)} for {sorted(want)}"]
    off = [
        f"{k}={got[k]!r} for {want[k]!r}"
        for k in got
        if not abs(got[k] - want[k]) <= tolerance and not (got[k] != got[k] and want[k] != want[k])
    ]
    return [f"{what}: {', '.join(off)}"] if off else []


def _histories(got: Iterable[Any], want: Iterable[Any], tolerance: float) -> list[str]:
    mine, other = list(got), list(want)
    if [step for step, _ in mine] != [step for step, _ in other]:
        return [f"logged at steps {[s for s, _ in mine]} for {[s for s, _ in other]}"]
    for (step, a), (_, b) in zip(mine, other, strict=True):
        found = _mapping(f"logged at step {step}", a, b, tolerance)
        if found:
            return found
    return []


class Failures:
    """Collects the combinations that failed, so that one run shows all of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, name: str, differences: Sequence[str]) -> None:
        if differences:
            self.found.append(f"{name}:\n    " + "\n    ".join(list(differences)[:6]))

    def check(self) -> None:
        """Fail with every difference of this rank."""
        assert not self.found, f"{len(self.found)} failures\n" + "\n".join(self.found)


def compare(
    failures: Failures,
    name: str,
    make_module: Callable[[], LightningModule],
    make_loaders: Callable[[], Any],
    strategy: Mapping[str, Any],
    want: Outcome,
    **kwargs: Any,
) -> Outcome:
    """Fit in a pipeline and note where it differs from ``want``."""
    try:
        got = fit(make_module, make_loaders, PipeSwiftStrategy(**strategy), **kwargs)
    except BaseException as error:
        error.add_note(f"in {name}; failures before: {failures.found}")
        raise
    failures.add(name, differences(got, want))
    return got
