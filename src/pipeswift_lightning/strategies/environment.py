"""Bring the default process group up, also after it has broken down."""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

__all__ = ["ensure_process_group", "forget_failures", "leave_process_group"]

_PATIENCE_S, _POLL_S = 120.0, 0.02
_RULE = (
    ", after an earlier Trainer call had failed. Rule: where a script catches the error of a "
    "Trainer call, the processes of all ranks go on alike. Remedy: mend the first error, or let "
    "each trial be a job of its own"
)


@dataclass(slots=True)
class _Left:
    """What is left of process groups that have failed: the ranks meet again over their store.

    A new store would want the old one's port. A rank that comes early would meet the others at the
    old one, and wait for ever once that is gone.
    """

    store: Store | None = None  # once a group has failed
    meetings: int = 0


_left = _Left()


def ensure_process_group(
    environment: ClusterEnvironment | None,
    *,
    world_size: int,
    backend: str | None,
    device: torch.device,
    timeout: timedelta,
) -> bool:
    """Create the default process group, unless one of the right size is there.

    Returns:
        Whether it was created here.

    Raises:
        RuntimeError: A process group of another size is there, or ranks do not come again.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            msg = (
                f"a process group of {dist.get_world_size()} ranks is already there, but the "
                f"Trainer asks for {world_size} devices. Rule: they are equal. Remedy: destroy "
                "the old group (torch.distributed.destroy_process_group()) before this Trainer"
            )
            raise RuntimeError(msg)
        return False
    if world_size == 1 or environment is None:
        # No port and no network for a single process.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return True
    chosen = backend or _get_default_process_group_backend_for_device(device)
    device_id = device if device.type != "cpu" else None
    if _left.store is not None:
        rank = environment.global_rank()
        store = _meet_again(_left.store, rank, world_size)
        dist.init_process_group(
            chosen,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device_id,
        )
        return True
    _init_dist_connection(environment, chosen, timeout=timeout, device_id=device_id)
    return True


def leave_process_group() -> None:
    """Close the default process group, whose ranks have failed."""
    if dist.get_world_size() > 1:
        _left.store = _left.store or _get_default_store()
    with suppress(RuntimeError):
        dist.destroy_process_group()


def forget_failures() -> None:
    """Begin anew: the other ranks' processes have ended, and new ones will be started."""
    _left.store, _left.meetings = None, 0


def _meet_again(store: Store, rank: int, world_size: int) -> PrefixStore:
    """Return a store for one more process group, once all ranks have come.

    Raises:
        RuntimeError: Some do not come.
    """
    _left.meetings += 1
    store = PrefixStore(f"pipeswift/after failure {_left.meetings}", store)
    missing, end = list(range(world_size)), time.monotonic() + _PATIENCE_S
    try:
        store.set(f"rank {rank}", "here")
        while missing and time.monotonic() < end:  # a store's own wait cannot be interrupted
            missing = [other for other in missing if not store.check([f"rank {other}"])]
            time.sleep(_POLL_S * bool(missing))
    except RuntimeError as error:
        msg = f"the process that the ranks meet at (rank 0, or the launcher) is gone{_RULE}"
        raise RuntimeError(msg) from error
    if missing:
        msg = f"ranks {missing} have not come to this call within {_PATIENCE_S:g} s{_RULE}"
        raise RuntimeError(msg)
    return store
