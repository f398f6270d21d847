"""What re-balancing gains when one stage's device is slow, and what a move costs.

    python -m benchmarks.rebalance                        # 3 stages, the middle one slower
    python -m benchmarks.rebalance --slow 1.5 --window 8

Layers sleep 8 ms and 16 ms (``--sleep``) for each of 8 micro-batches; rank 1's take ``slow`` times
as long. Longer sleeps are measured better on a machine that others use.
Each line is one move of `Rebalance`: the stages' numbers of layers, the median step of the window
before it, what was predicted, the median of the window after it, and how long training stood still.
``least`` is the simulated step of the best partition for the true times, messages taking none.

Then the same layers, of ``width`` and with AdamW's state, move to and fro without a reason: how
long that takes, for how many bytes.
"""

import argparse
import itertools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.ranks import Ranks, run_ranks, spread
from benchmarks.stages import Sleep
from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import Rebalance
from pipeswift_lightning.plan.costs import StepCosts
from pipeswift_lightning.plan.schedules import build_schedule
from pipeswift_lightning.plan.simulator import makespan_s
from pipeswift_lightning.runtime.mesh import MeshGroups

LAYERS = 12
SLOW_RANK = 1


class _Layer(nn.Module):
    def __init__(self, width: int, slow: float, sleep_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._slow, self._sleep_s = slow, sleep_s  # 0: it does not sleep

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if x.is_meta or not self._sleep_s:
            return y
        sleep_s = self._sleep_s * (self._slow if dist.get_rank() == SLOW_RANK else 1.0)
        return Sleep.apply(y, sleep_s, 2 * sleep_s)


class _Module(LightningModule):
    def __init__(self, width: int, slow: float, sleep_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(_Layer(width, slow, sleep_s) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 -- Lightning's
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Shuttle(Callback):
    """Moves one layer over each cut, and back, after every step."""

    def __init__(self) -> None:
        self.moves: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:  # noqa: ARG002 -- likewise
        strategy: Any = trainer.strategy
        sizes = [len(layers) for layers in strategy.partition.ranges]
        first = 1 if sizes[0] == LAYERS // len(sizes) else -1
        sizes[0] += first
        sizes[-1] -= first
        self.moves.append(strategy.repartition(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--slow", nargs="*", type=float, default=[1.25, 1.5, 2.0, 3.0])
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.008, help="seconds of a layer's forward")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", nargs="*", type=int, default=[256, 1024, 2048])
    options = parser.parse_args()
    print("slow  stages                  step ms  predicted ms  measured ms  least ms  stood ms")
    for slow in options.slow:
        for move in run_ranks(_main, options.stages, ("heal", slow), options)[0]:
            print(f"{slow:4}  {move}")
    print("width  moved MB  stood ms")
    for width in options.width:
        (line,) = run_ranks(_main, options.stages, ("shuttle", width), options)[0]
        print(f"{width:5}  {line}")


def _main(groups: MeshGroups, report: Any, case: tuple[str, Any], options: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kind, value = case
    found = _heal(value, options) if kind == "heal" else [_shuttle(value, options)]
    if groups.rank == 0:
        report(found)


def _heal(slow: float, options: argparse.Namespace) -> list[str]:
    callback = Rebalance(every_n_steps=options.window, window=options.window, cool_down=0)
    # The first steps look at whole batches; then a window, moves of two windows each, and a spare.
    module = _Module(8, slow, options.sleep)
    _fit(module, 8, callback, 6 * (options.window + 2), options)
    least_s = _least_s(slow, options)
    lines = []
    for move in callback.moves:
        decision = move.decision
        sizes = [[len(r) for r in p.ranges] for p in (decision.partition, decision.best)]
        after_s = float("nan") if move.judgement is None else move.judgement.step_s
        kept = "" if move.judgement is None or move.judgement.kept else "  (undone)"
        lines.append(
            f"{sizes[0]} -> {sizes[1]}  {1e3 * decision.step_s:7.1f}  "
            f"{1e3 * decision.predicted_s:7.1f} ({-decision.gain:+.0%})  "
            f"{1e3 * after_s:6.1f} ({after_s / decision.step_s - 1:+.0%})  {1e3 * least_s:8.1f}  "
            f"{1e3 * move.seconds:8.1f}{kept}"
        )
    return lines or ["nothing moved"]


def _shuttle(width: int, options: argparse.Namespace) -> str:
    shuttle = _Shuttle()
    _fit(_Module(width, 1.0, 0.0), width, shuttle, 21, options)
    moves = shuttle.moves[1:]  # before the first, there is no state of the optimizer
    stood = spread([1e3 * move.seconds for move in moves], 1)
    return f"{moves[0].num_bytes / 1e6:8.1f}  {stood}"


def _fit(
    module: LightningModule, width: int, callback: Callback, steps: int, options: argparse.Namespace
) -> None:
    trainer = Trainer(
        strategy=PipeSwiftStrategy(micro_batches=options.micro_batches, loss="per_sample"),
        accelerator="cpu",
        devices=options.stages,
        plugins=[Ranks()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[callback],
    )
    torch.manual_seed(0)
    data = torch.randn(options.micro_batches * steps, width)
    trainer.fit(module, DataLoader(data, batch_size=options.micro_batches))


def _least_s(slow: float, options: argparse.Namespace) -> float:
    m, stages, sleep_s = options.micro_batches, options.stages, options.sleep
    schedule = build_schedule("1f1b", stages, m)

    def step_s(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, LAYERS)
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        loads = [n * (slow if rank == SLOW_RANK else 1.0) for rank, n in enumerate(sizes)]
        costs = StepCosts(
            forward_s=[[sleep_s * load] * m for load in loads],
            backward_s=[[2 * sleep_s * load] * m for load in loads],
        )
        return makespan_s(schedule, costs)

    return min(map(step_s, itertools.combinations(range(1, LAYERS), stages - 1)))


if __name__ == "__main__":
    main()
