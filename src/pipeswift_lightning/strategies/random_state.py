"""The global random generators: the same on all ranks at the start, and kept in checkpoints."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["get_random_state", "set_random_state", "share_random_state"]


def share_random_state(device: torch.device) -> None:
    """Copy rank 0's global generators to every rank; rank 0's own state stays as it was.

    Lightning's parallel strategies reset the seed here instead; that would make shuffling differ
    from a single device.
    """
    if dist.get_world_size() == 1:
        return
    box: list[Any] = [get_random_state(None)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0, device=device if device.type != "cpu" else None)
    if dist.get_rank() != 0:
        set_random_state(box[0], None)


def get_random_state(device: torch.device | None) -> dict[str, Any]:
    """Return the state of torch's, Python's and NumPy's generators, as plain values and tensors.

    Args:
        device: Its generator too, if it is a GPU.
    """
    version, words, gauss = random.getstate()
    # numpy's legacy global state is what users' data sets draw from
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "seed": torch.initial_seed(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device | None) -> None:
    """Put back what `get_random_state` has returned."""
    torch.default_generator.manual_seed(state["seed"])  # so that initial_seed() agrees too
    torch.default_generator.set_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
