"""How well a profile predicts shapes that it has not seen, and what it costs to make one.

    python -m benchmarks.profiling                    # 8 transformer blocks on the CPU
    python -m benchmarks.profiling --processor-time   # on a machine that others use
    python -m benchmarks.profiling --device cuda --dim 2048 --lengths 256 512 1024 2048

An embedding, blocks with PyTorch's own attention and a head with its loss are profiled at some
shapes. Then each unseen shape's forward and backward, of the whole network as it is, is timed and
compared with the fit, in rounds that alternate with those of all other shapes. "held out" is the
error that the profile itself reports; the times are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeswift_lightning.plan.cost_model import Shape
from pipeswift_lightning.plan.profile import CostProfile
from pipeswift_lightning.runtime.profiler import (
    ProfileOptions,
    Subject,
    example_micro_batches,
    profile_network,
)


class _Model(nn.Module):
    def __init__(self, num_blocks: int, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, max(1, dim // 64), 4 * dim, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 256, 512])
    parser.add_argument("--unseen", type=int, nargs="+", default=[48, 96, 192, 384])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    read = time.process_time if options.processor_time else time.perf_counter
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _Model(options.blocks, options.dim, options.vocabulary).to(device)
    rows, length = max(options.samples), max(options.lengths)
    tokens = torch.randint(options.vocabulary, (rows, length), device=device)
    micro_batches = example_micro_batches(tokens, sizes=options.samples, lengths=options.lengths)
    start_s = read()
    profile = profile_network(
        Subject(model, list(model.blocks), model, device),
        micro_batches,
        options=ProfileOptions(
            repeats=options.repeats, processor_time=options.processor_time, max_s=600
        ),
    )
    took_s = read() - start_s
    shapes = list(product(options.samples, options.unseen))
    _report(profile, shapes, _measured(model, tokens, shapes, options.rounds, read), took_s)


def _measured(
    model: nn.Module,
    tokens: Tensor,
    shapes: list[tuple[int, int]],
    rounds: int,
    read: Callable[[], float],
) -> list[float]:
    times: list[list[float]] = [[] for _ in shapes]
    for round_ in range(rounds + 1):  # the first one warms up
        for seconds, (b, n) in zip(times, shapes, strict=True):
            _finish(tokens.device)
            start_s = read()
            model(tokens[:b, :n]).backward()
            _finish(tokens.device)
            if round_:
                seconds.append(read() - start_s)
    return [statistics.median(seconds) for seconds in times]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(
    profile: CostProfile, shapes: list[tuple[int, int]], measured_s: list[float], took_s: float
) -> None:
    print(f"{profile.origin.device}; {len(profile.layers)} layers, {len(profile.shapes)} shapes")
    print("samples  tokens of each  measured ms  predicted ms   error")
    layers = profile.model().layers
    errors = []
    for (b, n), seconds in zip(shapes, measured_s, strict=True):
        shape = Shape.padded([n] * b)
        predicted_s = sum(x.forward.seconds(shape) + x.backward.seconds(shape) for x in layers)
        errors.append(predicted_s / seconds - 1)
        print(
            f"{b:7d}  {n:14d}  {1e3 * seconds:11.1f}  {1e3 * predicted_s:12.1f}  {errors[-1]:+6.1%}"
        )
    rms = statistics.fmean(e * e for e in errors) ** 0.5
    middle = statistics.median(map(abs, errors))
    print(f"unseen shapes: median |error| {middle:.1%}, root mean square {rms:.1%}")
    print(f"held out, as the profile says: {profile.relative_error:.1%}")
    one_step_s = statistics.fmean(measured_s)
    print(f"profiling took {took_s:.1f} s, as {took_s / one_step_s:.0f} of these forward-backwards")


if __name__ == "__main__":
    main()
