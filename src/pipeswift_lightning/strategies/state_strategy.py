"""A Lightning strategy whose module and optimizers are spread over stages: their state, whole."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.strategies.checkpoint import gather_module_state, gather_optimizer_state
from pipeswift_lightning.strategies.mesh_strategy import MeshStrategy
from pipeswift_lightning.strategies.optimizers import OptimizerNames
from pipeswift_lightning.strategies.session import PipelineSession

__all__ = ["StateStrategy"]


class StateStrategy(MeshStrategy):
    """Gathers state from the stages for checkpoints, and gives each stage its part back.

    Args:
        **kwargs: As for `MeshStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._session: PipelineSession | None = None
        self._names = OptimizerNames()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def session(self) -> PipelineSession:
        """The pipeline; it exists between set-up and teardown of a Trainer call."""
        if self._session is None:
            msg = "the pipeline exists only while the Trainer runs"
            raise RuntimeError(msg)
        return self._session

    def keep_local(self) -> None:
        """Take the parameters of other stages out of the optimizers."""
        assert self.lightning_module is not None
        self._names.keep_local(self.optimizers, self.lightning_module)

    @contextmanager
    def made_whole(self) -> Iterator[None]:
        """Give every rank whole optimizers, after a block that brings all parameters back."""
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        yield
        assert self.lightning_module is not None
        self._names.restore(self.optimizers, self.lightning_module)
        for optimizer, state in zip(self.optimizers, self.broadcast(states), strict=True):
            optimizer.load_state_dict(state)
            _optimizers_to_device([optimizer], self.root_device)

    # -- checkpoints --------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._groups is None:
            return self.lightning_module.state_dict()
        module, groups = self.lightning_module, self._groups
        share = self._session.share if self._session is not None else None
        return self._gathered(lambda: gather_module_state(module, share, groups))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._groups is None:
            return super().optimizer_state(optimizer)
        self.keep_local()  # a callback may have added groups
        index = next(i for i, o in enumerate(self.optimizers) if _same(o, optimizer))
        module, groups = self.lightning_module, self._groups
        names = self._names.groups[index]
        return self._gathered(lambda: gather_optimizer_state(optimizer, names, module, groups))

    def _gathered(self, gather: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        assert self._collectives is not None
        return self._collectives.guarded("gathering the stages for a checkpoint", gather)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            optimizer.load_state_dict(self._names.local_state(index, optimizer, state))
            _optimizers_to_device([optimizer], self.root_device)


def _same(a: Any, b: Any) -> bool:
    return getattr(a, "_optimizer", a) is getattr(b, "_optimizer", b)
