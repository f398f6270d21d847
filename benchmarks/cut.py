"""What a stage's run of the user's step costs for one micro-batch, by stage; one process, no waits.

    python -m benchmarks.cut

Four layers that do next to nothing, a stage each: so all is the cost of running the step, skipping
the layers of earlier stages and ending at the next one's. ``calls`` (of functions, as cProfile
counts them) are the same each time; the time is processor time, the best of 15 averages.
"""

import cProfile
import pstats
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.cut import LayerCut
from pipeswift_lightning.runtime.rng import reseeder

CPU = torch.device("cpu")
NUM_STAGES, WIDTH, SAMPLES = 4, 64, 8
_REPEATS = 20


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def main() -> None:
    network = nn.Sequential(*(_Scaled() for _ in range(NUM_STAGES)))
    cut = LayerCut(network, list(network), network_name="net", device=CPU)
    cut.install()
    batch = torch.randn(SAMPLES, WIDTH)

    def step() -> Tensor:
        return nn.functional.mse_loss(network(batch), batch)

    names = {id(p): name for name, p in network.named_parameters()}
    with torch.no_grad():
        trace = cut.discover(step, step_name="training_step", names=names)
    real = [layer.weight for layer in network]
    absent = nn.Parameter(torch.empty(WIDTH, device="meta"))
    print("stage      ms   calls")
    for stage in range(NUM_STAGES):
        for i, layer in enumerate(network):
            layer.weight = real[i] if i == stage else absent
        received = (torch.randn(SAMPLES, WIDTH, requires_grad=True),) if stage else ()

        def run(stage: int = stage, received: tuple[Tensor, ...] = received) -> None:
            cut.run(
                step,
                step_name="training_step",
                trace=trace,
                first=stage,
                last=stage + 1,
                received=received,
                reseed=reseeder(CPU, *range(6)),
            )

        print(f"{stage:5}  {1e3 * _best_s(run):6.3f}  {_calls(run):6}")


def _best_s(run: Callable[[], None]) -> float:
    averages = []
    for _ in range(16):  # the first warms up
        start = time.thread_time()
        for _ in range(_REPEATS):
            run()
        averages.append((time.thread_time() - start) / _REPEATS)
    return min(averages[1:])


def _calls(run: Callable[[], None]) -> int:
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls


if __name__ == "__main__":
    main()
