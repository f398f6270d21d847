"""Give all ranks rank 0's random state, so that their loaders shuffle and augment alike."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["share_random_state"]


def share_random_state(device: torch.device) -> None:
    """Copy rank 0's global generators to every rank; rank 0's own state stays as it was.

    Lightning's parallel strategies reset the seed here instead; that would make shuffling differ
    from a single device.
    """
    if dist.get_world_size() == 1:
        return
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        # numpy's legacy global state is what users' data sets draw from
        box = [
            (
                torch.default_generator.get_state(),
                torch.initial_seed(),
                random.getstate(),
                np.random.get_state(),  # noqa: NPY002
            )
        ]
    dist.broadcast_object_list(box, src=0, device=device if device.type != "cpu" else None)
    if dist.get_rank() == 0:
        return
    state, seed, python_state, numpy_state = box[0]
    torch.default_generator.manual_seed(seed)  # so that initial_seed() agrees too
    torch.default_generator.set_state(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
