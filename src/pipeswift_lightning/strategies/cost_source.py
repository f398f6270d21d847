"""Where a run's costs come from: one rank has them, and all plan with the same."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.costs import CostError
from pipeswift_lightning.runtime.profiler import ProfileError

__all__ = ["from_rank_zero", "read_costs"]

T = TypeVar("T")


def read_costs(path: str, num_layers: int) -> CostModel:
    """Read a file of costs.

    Args:
        path: What ``CostModel.to_json()`` wrote.
        num_layers: Layers that a step of this network calls.

    Raises:
        CostError: There is no such file, it holds no costs, or those of another network.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        msg = (
            f"costs={path!r} cannot be read: {error}. Rule: costs is a file that "
            'CostModel.to_json() wrote, or "measure". Remedy: costs="measure" makes one'
        )
        raise CostError(msg) from error
    model = CostModel.from_json(text)
    if len(model.layers) != num_layers:
        msg = (
            f"costs={path!r} has {len(model.layers)} layers, but a step calls {num_layers}. Rule: "
            'the costs are of the same network. Remedy: measure them again (costs="measure")'
        )
        raise CostError(msg)
    return model


def from_rank_zero(compute: Callable[[], T]) -> T:
    """Compute on the first rank, and return the result on all of them.

    Raises:
        CostError: The first rank found the costs wrong; on every rank.
        ProfileError: It could not measure them; on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    box: list[T | Exception] = []
    if dist.get_rank() == 0:
        try:
            box.append(compute())
        except (
            ValueError,
            ProfileError,
        ) as error:  # of the costs, or nothing fits them: all ranks are to know
            box.append(error)
    else:
        box.append(CostError())
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
