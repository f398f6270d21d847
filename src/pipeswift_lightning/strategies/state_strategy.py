"""A Lightning strategy whose module and optimizers are spread over stages: their state, whole."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.strategies.assembly_times import AssemblyPart
from pipeswift_lightning.strategies.checkpoint import gather_module_state, gather_optimizer_state
from pipeswift_lightning.strategies.devices import move_buffers
from pipeswift_lightning.strategies.division import Division, divided_names
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
        self._division: Division | None = None
        self._waiting_states: Mapping[str, Any] | None = None

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
        share = self._session.share if self._session is not None else None
        if self._division is not None and share is not None:
            with self._assembly.timing(AssemblyPart.LOAD):
                self._division.parameters(share.owners.of_stage(share.stage))
            share.move_to(self.root_device)
        self._names.keep_local(self.optimizers, self.lightning_module)
        waiting, self._waiting_states = self._waiting_states, None
        if waiting is not None:
            self.load_optimizer_state_dict(waiting)

    @property
    def _is_divided(self) -> bool:
        module = self.lightning_module
        return module is not None and self.mesh.num_stages > 1 and bool(divided_names(module))

    def _release_divided(self) -> None:
        """Do what Lightning does at the end, for a module that is not whole here."""
        assert self.lightning_module is not None
        assert self.accelerator is not None
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        for parameter in self.lightning_module.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.cpu()
        move_buffers(self.lightning_module, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

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
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._division is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._division.load(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        session = self._session
        if self._division is not None and session is not None and session.partition is None:
            self._waiting_states = checkpoint  # its parameters have no data, and no device, yet
            return
        states = checkpoint["optimizer_states"]
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            optimizer.load_state_dict(self._names.local_state(index, optimizer, state))
            _optimizers_to_device([optimizer], self.root_device)


def _same(a: Any, b: Any) -> bool:
    return getattr(a, "_optimizer", a) is getattr(b, "_optimizer", b)
