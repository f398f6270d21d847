"""Let norms of gradients see all stages: Lightning's clipping, and torch's own in a user's hook."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from pipeswift_lightning.strategies.collectives import Collectives
from pipeswift_lightning.strategies.optimizers import clip_by_global_norm
from pipeswift_lightning.strategies.session import PipelineSession

__all__ = ["GlobalNorms"]

_INNER = "_get_total_norm"  # what clip_grad_norm_ calls, under whatever name it was imported
_PUBLIC = "get_total_norm"


class GlobalNorms:
    """Makes a norm that is taken of gradients the norm over all stages.

    ``torch.nn.utils.clip_grad_norm_`` in a hook or a step, on every stage, would see that stage's
    gradients only: the stages would scale theirs by different numbers, without a word.

    Args:
        session: Knows the parameters that are here.
        collectives: Reach the other stages.
    """

    def __init__(self, session: PipelineSession, collectives: Collectives) -> None:
        self._session = session
        self._collectives = collectives
        self._original: Callable[..., Tensor] | None = None

    def install(self, plugin: Precision) -> None:
        """Take the place of Lightning's clipping, and of torch's norm where there are stages.

        The plugin's instance is patched, not its class: the class's name is a checkpoint key.
        """
        plugin.__dict__["clip_grad_by_norm"] = self._clip
        utilities: Any = torch.nn.utils
        if self._session.num_stages > 1:
            self._original = getattr(utilities.clip_grad, _INNER)
            setattr(utilities.clip_grad, _INNER, self._total_norm)
            setattr(utilities, _PUBLIC, self._total_norm)

    def remove(self, plugin: Precision) -> None:
        """Give back what `install` took; nothing if that is done."""
        plugin.__dict__.pop("clip_grad_by_norm", None)
        original, self._original = self._original, None
        if original is not None:
            utilities: Any = torch.nn.utils
            setattr(utilities.clip_grad, _INNER, original)
            setattr(utilities, _PUBLIC, original)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        counted, sum_up = self._session.counted_parameters(), self._collectives.sum_over_stages
        clip_by_global_norm(parameters, clip_val, counted, sum_up)

    @torch.no_grad()
    def _total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
        foreach: bool | None = None,  # noqa: FBT001
    ) -> Tensor:
        """Return the norm over all stages if ``tensors`` are gradients; else as torch does.

        A stage that holds none of them takes part with nothing.

        Raises:
            RuntimeError: It is not finite, and that was to be an error; on every stage.
        """
        assert self._original is not None
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owner = {id(p.grad): id(p) for p in self._session.module.parameters() if p.grad is not None}
        if any(id(tensor) not in owner for tensor in given):
            return self._original(given, norm_type, error_if_nonfinite, foreach)
        counted = self._session.counted_parameters()
        mine = [tensor for tensor in given if owner[id(tensor)] in counted]
        local = self._original(mine, norm_type, False, foreach)  # noqa: FBT003
        norms = self._collectives.gather_over_stages(
            "summing gradient norms over the stages", local.item()
        )
        every = torch.tensor(norms, dtype=torch.float64)
        total: Tensor = torch.linalg.vector_norm(every, float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            msg = (
                f"the norm of order {norm_type} of the gradients is {total.item()}; by stage: "
                f"{norms}. Rule: error_if_nonfinite=True. Remedy: look at the stage whose norm is "
                "not finite, or set error_if_nonfinite=False"
            )
            raise RuntimeError(msg)
        first = next(iter(self._session.module.parameters()))  # one dtype, on stages without any
        return total.to(device=self._session.device, dtype=first.dtype)
