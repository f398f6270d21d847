"""Where a run's costs come from: one rank has them, and all plan with the same."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.costs import CostError

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
        Exception: Whatever else has failed, such as a hook of the user's module; on every rank,
            as a `RuntimeError` where it cannot be sent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    box: list[T | Exception] = []
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box.append(compute())
        except Exception as error:  # noqa: BLE001 -- all are to know, none is to wait for costs
            failed = error
            box.append(_as_sent(error))
    else:
        box.append(CostError())
    dist.broadcast_object_list(box, src=0)
    if failed is not None:
        raise failed
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def _as_sent(error: Exception) -> Exception:
    """Return an error that other ranks can read, with where it comes from."""
    where = "pipeswift: on rank 0, which plans for all ranks from its first batch"
    error.add_note(where)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 -- errors may hold anything, and be made in any way
        sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        sent.add_note(where)
        return sent
    return error
