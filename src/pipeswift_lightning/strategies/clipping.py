"""Let norm clipping see all stages."""

from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from pipeswift_lightning.strategies.collectives import Collectives
from pipeswift_lightning.strategies.optimizers import clip_by_global_norm
from pipeswift_lightning.strategies.session import PipelineSession

__all__ = ["clip_globally"]


def clip_globally(plugin: Precision, session: PipelineSession, collectives: Collectives) -> None:
    """Make norm clipping see all stages.

    The plugin's instance is patched, not its class: the class's name is a checkpoint key.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_by_global_norm(
            parameters, clip_val, session.counted_parameters(), collectives.sum_over_stages
        )

    plugin.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
