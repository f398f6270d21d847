"""What recomputation saves and costs: the same deep stack, with and without.

    python -m benchmarks.recompute                 # a stage of 16 transformer layers
    python -m benchmarks.recompute --rounds 15

Memory is what the graph of one micro-batch holds between its forward and its backward: the bytes of
the distinct storages that autograd saves, parameters not counted. Time is processor time of forward
and backward, in interleaved rounds; the ratio's median with quartiles.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.recompute import Recomputation

_WIDTH = 256
_SAMPLES, _LENGTH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True, norm_first=True)
        for _ in range(options.layers)
    ]
    stage = nn.Sequential(*layers)
    recomputation = Recomputation(layers)
    recomputation.install()
    chosen = {"none": 0, "half": options.layers // 2, "all": options.layers}
    held = {}
    for name, count in chosen.items():
        recomputation.choose(range(count))
        held[name] = _held_bytes(stage)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, count in chosen.items():
            recomputation.choose(range(count))
            times[name].append(_cpu_s(stage))
    print("recomputed  held MB  memory ratio  time ratio")
    for name in chosen:
        ratios = [a / b for a, b in zip(times[name], times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(
            f"{name:10}  {held[name] / 1e6:7.1f}  {held[name] / held['none']:12.3f}  "
            f"{middle:.3f} [{low:.3f}, {high:.3f}]"
        )


def _batch() -> Tensor:
    return torch.randn(_SAMPLES, _LENGTH, _WIDTH, requires_grad=True)


def _held_bytes(stage: nn.Module) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = stage(_batch())
    total = sum(held.values())
    del output
    return total


def _cpu_s(stage: nn.Module) -> float:
    x = _batch()
    start = time.process_time()
    stage(x).sum().backward()
    seconds = time.process_time() - start
    stage.zero_grad()
    return seconds


if __name__ == "__main__":
    main()
