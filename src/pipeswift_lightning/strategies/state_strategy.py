"""A Lightning strategy whose module and optimizers are spread over stages: their state, whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.strategies.assembly_times import AssemblyPart
from pipeswift_lightning.strategies.checkpoint import gather_module_state, gather_optimizer_state
from pipeswift_lightning.strategies.devices import move_buffers
from pipeswift_lightning.strategies.division import Division, divided_names
from pipeswift_lightning.strategies.mapped_file import can_map, owned, owned_extras, read_mapped
from pipeswift_lightning.strategies.mesh_strategy import MeshStrategy
from pipeswift_lightning.strategies.optimizers import OptimizerNames, load_settings, unwrapped
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
        self._waiting_states: list[Mapping[int, Any]] | None = None  # until the module is cut
        self._is_mapped = False

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def session(self) -> PipelineSession:
        """The pipeline; it exists between set-up and teardown of a Trainer call."""
        if self._session is None:
            msg = (
                "there is no pipeline now. Rule: it exists while the Trainer runs. Remedy: ask for "
                "it in a hook of a callback or module, after setup"
            )
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
        self._load_waiting()

    @property
    def _has_all_data(self) -> bool:
        module = self.lightning_module
        return module is None or not any(p.is_meta for p in module.parameters())

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
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._is_mapped = can_map(self.checkpoint_io, checkpoint_path)
        if not self._is_mapped:
            return super().load_checkpoint(checkpoint_path, weights_only)
        torch.cuda.empty_cache()
        return read_mapped(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, state = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        if self._is_mapped:
            state = owned_extras(module, state)
        if self._division is None:
            module.load_state_dict(state, strict=strict)
        else:
            self._division.load(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self._will_be_cut:
            # A rank need not hold all states until it is known which of them belong here.
            for optimizer, state in zip(self.optimizers, states, strict=True):
                load_settings(optimizer, state["param_groups"])
            self._waiting_states = [state["state"] for state in states]
        else:
            for index, state in enumerate(states):
                self._load_optimizer(index, state["state"], state["param_groups"])

    @property
    def _will_be_cut(self) -> bool:
        """Whether the next step takes parameters away, before any optimizer's step."""
        session = self._session
        return (
            session is not None
            and session.partition is None
            and session.transparent is None
            and self.mesh.num_stages > 1
        )

    def _load_waiting(self) -> None:
        """Load the optimizers' states of what is here; settings may have changed meanwhile."""
        waiting, self._waiting_states = self._waiting_states, None
        for index, state in enumerate(waiting or ()):
            groups = [dict(group) for group in unwrapped(self.optimizers[index]).param_groups]
            self._load_optimizer(index, state, groups)

    def _load_optimizer(self, index: int, state: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        optimizer = self.optimizers[index]
        whole = {"state": state, "param_groups": groups}
        local = self._names.local_state(index, optimizer, whole)
        optimizer.load_state_dict(owned(local) if self._is_mapped else local)
        _optimizers_to_device([optimizer], self.root_device)


def _same(a: Any, b: Any) -> bool:
    return getattr(a, "_optimizer", a) is getattr(b, "_optimizer", b)
