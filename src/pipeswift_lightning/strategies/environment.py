"""Bring the default process group up."""

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from torch._C._distributed_c10d import HashStore

__all__ = ["ensure_process_group"]


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
        RuntimeError: A process group of another size is there.
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
    _init_dist_connection(environment, chosen, timeout=timeout, device_id=device_id)
    return True
