"""One gradient scale on all stages: fp16 training skips a step everywhere or nowhere."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["forget_stages", "share_found_inf"]


def share_found_inf(
    scaler: torch.amp.GradScaler | None,
    device: torch.device,
    sum_over_stages: Callable[[Tensor], None],
) -> None:
    """Make ``scaler`` look for overflow on all stages, not on this one alone.

    Each stage sees its own gradients only. A stage that skipped a step alone would part from the
    others for good, and so would its scale. The instance is changed, not its class.

    Args:
        scaler: This rank's; all ranks' must have the same settings. ``None``: there is none.
        device: Where this stage computes.
        sum_over_stages: Adds a tensor up over the stages, in place.

    Example:
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        >>> share_found_inf(scaler, torch.device("cpu"), lambda found: None)
        >>> scaler.get_scale()
        4.0
    """
    if scaler is None or not scaler.is_enabled():
        return
    # Only the last stage ever scales a loss, and a scaler that has not scaled has no scale.
    scaler.scale(torch.zeros((), device=device))
    unscale = scaler.unscale_

    def unscale_and_share(optimizer: Optimizer) -> None:
        unscale(optimizer)
        # torch offers no other access to it (FSDP's scaler does the same).
        found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)][
            "found_inf_per_device"
        ]
        everywhere = torch.zeros((), device=device)
        for local in found.values():
            everywhere += local.to(device)
        sum_over_stages(everywhere)
        found.clear()
        found[device] = everywhere  # also where no parameter of this stage has a gradient

    scaler.__dict__["unscale_"] = unscale_and_share


def forget_stages(scaler: torch.amp.GradScaler | None) -> None:
    """Take back what `share_found_inf` did, once the stages are gone; nothing if it did nothing."""
    if scaler is not None:
        scaler.__dict__.pop("unscale_", None)
