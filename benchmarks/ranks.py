"""Ranks of a benchmark: processes of this machine that talk over gloo."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from pipeswift_lightning.runtime.mesh import Mesh, MeshGroups

__all__ = ["Ranks", "run_ranks", "spread"]

_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.2

Body = Callable[..., None]


def run_ranks(body: Body, num_ranks: int, *args: Any) -> list[Any]:
    """Run ``body(groups, report, *args)`` in so many new processes, each a stage.

    Args:
        body: A function of a module. ``groups`` are those of a pipeline over all ranks, and
            ``report(value)`` adds to what is returned.
        num_ranks: Number of processes; each has one thread for computation.
        args: More arguments.

    Returns:
        What the ranks have reported, each rank's in order.

    Raises:
        SystemExit: A rank has failed; its error is on the terminal.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    reported: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(body, rank, num_ranks, folder, results, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            while not results.empty():
                reported.append(results.get())
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
            time.sleep(_POLL_S)
    while not results.empty():
        reported.append(results.get())
    if any(process.exitcode for process in processes):
        raise SystemExit(1)
    return reported


def _main(
    body: Body, rank: int, num_ranks: int, folder: str, results: Any, args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    groups = MeshGroups.create(Mesh.of(world_size=num_ranks, num_stages=num_ranks), rank)
    groups.warm(torch.device("cpu"))
    body(groups, results.put, *args)
    dist.destroy_process_group()


class Ranks(ClusterEnvironment):
    """Tells a Trainer that the processes of `run_ranks` are there already."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median and the quartiles.

    Example:
        >>> spread([1, 2, 3, 4, 5], 1)
        '3.0 [2.0, 4.0]'
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
