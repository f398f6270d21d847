"""A small Trainer run in which one thing goes wrong: the same in a script and in forked ranks."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.relocation import Relocation


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What runs, and what goes wrong in it.

    Attributes:
        fault: Where: a key of ``PLACES``, or empty.
        action: What happens there: a key of ``ACTIONS``.
        rank: Whose fault it is.
        step: In which step (from 0); evaluation has its own count.
        micro_batch: In which micro-batch, where that makes sense.
        folder: Where ranks write: ``pid<r>``, ``stderr<r>``, ``struck``.
        devices: Number of ranks.
        options: Arguments of the strategy.
        trainer: Further arguments of the Trainer.
        variant: Names a subclass of the module in ``VARIANTS``.
        callbacks: Names further ones in ``CALLBACKS``.
        other_options: Options of the victim only.
    """

    fault: str = ""
    action: str = "raise"
    rank: int = 1
    step: int = 2
    micro_batch: int = 1
    folder: str = ""
    devices: int = 4
    batch_size: int = 8
    num_batches: int = 200
    num_layers: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    variant: str = "Module"
    callbacks: tuple[str, ...] = ()
    other_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def num_micro_batches(self) -> int:
        return int(self.options.get("micro_batches", 4))

    @property
    def num_samples(self) -> int:
        return self.num_batches * self.batch_size

    def strike(self) -> None:
        """Do the damage, and note when."""
        (Path(self.folder) / "struck").write_text(str(time.monotonic()))
        ACTIONS[self.action]()


def _raise() -> None:
    raise ValueError("the user's own error")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _exit_quietly() -> None:
    os._exit(7)


def _interrupt_parent() -> None:
    os.kill(os.getppid(), signal.SIGINT)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "stop": _stop,
    "interrupt": _interrupt,
    "interrupt_parent": _interrupt_parent,
    "exit": _exit_quietly,
}


class Trap:
    """Strikes at the n-th visit of its place, on one rank."""

    def __init__(self, scenario: Scenario, place: str) -> None:
        self._scenario = scenario
        self._armed = scenario.fault == place
        self._visits = 0

    def visit(self, rank: int, at: int) -> None:
        if not self._armed or rank != self._scenario.rank:
            return
        self._visits += 1
        if self._visits == at + 1:
            self._scenario.strike()


class _Sprung(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spring: Callable[[], None]) -> Tensor:
        ctx.spring = spring
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.spring()
        return gradient, None


class Layer(nn.Module):
    """A linear layer with traps in forward, in backward and in evaluation."""

    def __init__(self, scenario: Scenario, rank: Callable[[], int]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._at = scenario.step * scenario.num_micro_batches + scenario.micro_batch
        self._rank = rank
        self._traps = {p: Trap(scenario, p) for p in ("forward", "backward", "eval_forward")}

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            place = "forward" if self.training else "eval_forward"
            self._traps[place].visit(self._rank(), self._at)
        y = self.linear(x)
        return torch.tanh(_Sprung.apply(y, self._spring) if y.requires_grad else y)

    def _spring(self) -> None:
        self._traps["backward"].visit(self._rank(), self._at)


class Samples(Dataset[Tensor]):
    def __init__(self, scenario: Scenario, rank: Callable[[], int]) -> None:
        self._num = scenario.num_samples
        self._at = scenario.step * scenario.batch_size
        self._rank = rank
        self._trap = Trap(scenario, "loader")

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Tensor:
        self._trap.visit(self._rank(), self._at)
        return torch.full((8,), index / self._num) + torch.arange(8) / 8


class TrappedSGD(torch.optim.SGD):
    def __init__(self, parameters: Iterator[nn.Parameter], trap: Callable[[], None]) -> None:
        super().__init__(parameters, lr=0.01)
        self._trap = trap

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        result = super().step(closure)  # type: ignore[arg-type]
        self._trap()
        return result


class Module(LightningModule):
    """The user's module: an ordinary one."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.net = nn.Sequential(*(Layer(scenario, self._rank) for _ in range(scenario.num_layers)))
        at = scenario.step * scenario.num_micro_batches + scenario.micro_batch
        self._at = at
        self._traps = {p: Trap(scenario, p) for p in ("loss", "validation_step", "optimizer")}

    def _rank(self) -> int:
        return self.global_rank

    def loss(self, x: Tensor, place: str) -> Tensor:
        y = self.net(x)
        if not y.is_meta:
            self._traps[place].visit(self._rank(), self._at)
        return ((y - x) ** 2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch, "loss")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch, "validation_step"))

    def configure_optimizers(self) -> Any:
        return TrappedSGD(
            self.parameters(),
            lambda: self._traps["optimizer"].visit(self._rank(), self.scenario.step),
        )

    def train_dataloader(self) -> Any:
        return self._loader(self.scenario.num_batches)

    def val_dataloader(self) -> Any:
        return self._loader(self.scenario.num_batches)

    def _loader(self, num_batches: int) -> Any:
        data = Samples(self.scenario, self._rank)
        size = self.scenario.batch_size
        return DataLoader(torch.utils.data.Subset(data, range(num_batches * size)), size)


class Callbacks(Callback):
    """Traps between steps."""

    def __init__(self, scenario: Scenario) -> None:
        self._at = scenario.step
        self._traps = {p: Trap(scenario, p) for p in ("setup", "between", "validation_end")}

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._traps["setup"].visit(trainer.global_rank, 0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self._traps["between"].visit(trainer.global_rank, self._at)

    def on_validation_end(self, trainer, module) -> None:
        self._traps["validation_end"].visit(trainer.global_rank, 0)


class CallsTwice(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(self.net(batch)).mean()


class CallsNever(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return batch.mean()


class ManualOptimization(Module):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step_loss(batch))
        optimizer.step()

    def step_loss(self, batch: Tensor) -> Tensor:
        return self.loss(batch, "loss")


class UsesParameters(ManualOptimization):
    def step_loss(self, batch: Tensor) -> Tensor:
        return sum(p.pow(2).sum() for p in self.net.parameters()) + super().step_loss(batch)


class TwiceSGD(torch.optim.SGD):
    """Looks around before it steps, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class LooksTwice(Module):
    def configure_optimizers(self) -> Any:
        return TwiceSGD(self.parameters(), lr=0.01)


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        halves = self.net[:2].parameters(), self.net[2:].parameters()
        return [torch.optim.SGD(half, lr=0.01) for half in halves], []


class SkipsOneMicroBatch(Module):
    """Returns no loss where a micro-batch begins with sample 4."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch, "loss")
        return (
            None if round(float(batch[0, 0]) * len(self.train_dataloader().dataset)) == 4 else loss
        )


class _Filter(nn.Module):
    """Drops samples by their values: the shape depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x[:1] * self.weight if x[0, 0] > 0.01 else x * self.weight


class DataDependentShapes(Module):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.net.insert(0, _Filter())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).mean()


class ShorterLoader(Module):
    """The victim's loader has fewer batches than the others'."""

    def _loader(self, num_batches: int) -> Any:
        return super()._loader(num_batches - 2 * (self._rank() == self.scenario.rank))


class _Stream(IterableDataset[Tensor]):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._loader)


class ShorterStream(ShorterLoader):
    """The same, and nobody can know in advance."""

    def _loader(self, num_batches: int) -> Any:
        return DataLoader(_Stream(super()._loader(num_batches)), batch_size=None)


class OtherSamples(Module):
    """The victim draws other samples, as an unseeded shuffle would."""

    def _loader(self, num_batches: int) -> Any:
        loader = super()._loader(num_batches)
        return reversed_batches(loader) if self._rank() == self.scenario.rank else loader


def reversed_batches(loader: Any) -> Any:
    order = list(reversed(range(len(loader.dataset))))
    return DataLoader(torch.utils.data.Subset(loader.dataset, order), loader.batch_size)


class OtherShape(Module):
    def _loader(self, num_batches: int) -> Any:
        loader = super()._loader(num_batches)
        return DataLoader(
            loader.dataset, 8 if self._rank() == self.scenario.rank else loader.batch_size
        )


class SavesOnException(Callback):
    """Waits for all ranks, in a hook that runs on the failing rank only."""

    def on_exception(self, trainer, module, exception) -> None:
        trainer.save_checkpoint(Path(module.scenario.folder) / "last.ckpt")


class OneRankWaits(Callback):
    """The classic: a collective in a branch that one rank takes."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_rank == module.scenario.rank and batch_idx == module.scenario.step:
            trainer.strategy.barrier("only here")


class MovesLayers(Callback):
    """Gives the stages other layers after a step, with a trap between two tensors that travel."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        scenario = module.scenario
        if batch_idx != scenario.step:
            return
        trap, put = Trap(scenario, "move"), Relocation._put

        def trapped(relocation: Relocation, tensor: Tensor, stage: int) -> None:
            trap.visit(trainer.global_rank, scenario.micro_batch)
            put(relocation, tensor, stage)

        Relocation._put = trapped  # type: ignore[method-assign]
        sizes = [len(layers) for layers in trainer.strategy.partition.ranges]
        trainer.strategy.repartition([sizes[0] - 1, *sizes[1:-1], sizes[-1] + 1])


VARIANTS: dict[str, type[Module]] = {
    cls.__name__: cls
    for cls in (
        Module,
        CallsTwice,
        CallsNever,
        ManualOptimization,
        TwoOptimizers,
        LooksTwice,
        UsesParameters,
        SkipsOneMicroBatch,
        DataDependentShapes,
        ShorterLoader,
        ShorterStream,
        OtherSamples,
        OtherShape,
    )
}
CALLBACKS: dict[str, type[Callback]] = {
    c.__name__: c for c in (SavesOnException, OneRankWaits, MovesLayers)
}


def run(scenario: Scenario) -> None:
    """Train; raises what goes wrong."""
    torch.manual_seed(1)
    module = VARIANTS[scenario.variant](scenario)
    options = {"micro_batches": 4, "loss": "per_sample", "silence_s": 2.0, **scenario.options}
    if int(os.environ.get("LOCAL_RANK", "0")) == scenario.rank:
        options.update(scenario.other_options)
    strategy = PipeSwiftStrategy(**options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=scenario.devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Callbacks(scenario), *(CALLBACKS[c]() for c in scenario.callbacks)],
        **{
            "max_epochs": 1000,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            **scenario.trainer,
        },
    )
    trainer.fit(module)
