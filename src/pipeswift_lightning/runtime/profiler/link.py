"""Latency and bandwidth between neighbouring ranks of a pipeline."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.profile import fit_link
from pipeswift_lightning.runtime.transport import Transport

__all__ = ["measure_link"]

_SIZES = (8, 1 << 16, 1 << 19, 1 << 21)
_WARM_UP = 2


def measure_link(
    transport: Transport, num_stages: int, *, sizes: Sequence[int] = _SIZES, repeats: int = 9
) -> Link | None:
    """Measure the link to the next stage; every rank of the pipeline calls this.

    Messages go there and back, pair by pair from the first stage on, so that no two pairs share a
    wire at the same time. Half the median round trip counts.

    Args:
        transport: Channels to the neighbours.
        num_stages: Number of stages.
        sizes: Bytes of the messages.
        repeats: Round trips of each size.

    Returns:
        The link from this stage to the next; ``None`` on the last.
    """
    stage = transport.position
    if stage > 0:
        for size in sizes:
            _answer(transport, stage - 1, size, _WARM_UP + repeats)
    if stage + 1 >= num_stages:
        return None
    return fit_link(
        [(size, _round_trip_s(transport, stage + 1, size, repeats) / 2) for size in sizes]
    )


def _answer(transport: Transport, peer: int, size: int, times: int) -> None:
    message = _message(transport, size)
    for _ in range(times):
        transport.receive(message, peer).wait()
        transport.send(message, peer).wait()
    _finish(transport.device)


def _round_trip_s(transport: Transport, peer: int, size: int, repeats: int) -> float:
    message, answer = _message(transport, size), _message(transport, size)
    seconds = []
    for _ in range(_WARM_UP + repeats):
        _finish(transport.device)
        start_s = time.perf_counter()
        transport.send(message, peer).wait()
        transport.receive(answer, peer).wait()
        _finish(transport.device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[_WARM_UP:])


def _message(transport: Transport, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=transport.device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":  # there a wait orders streams only
        torch.cuda.synchronize(device)
