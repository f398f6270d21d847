"""Notice where a whole step uses parameters that not every rank has."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from pipeswift_lightning.runtime.network_call import CutError

__all__ = ["ParameterGuard"]


class ParameterGuard(TorchFunctionMode):
    """Refuses what would be differentiated by parameters of pipelined networks.

    On one rank such a parameter is there, on another it is not: the same line would mean two
    things. Under ``torch.no_grad()`` code (an optimizer, a moving average) may use what there is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: Mapping[int, str] = {}
        self._paused = 0

    def watch(self, names: Mapping[int, str]) -> None:
        """Watch the parameters with these names, by ``id``."""
        self._names = names

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a block use all parameters: the networks themselves do."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``.

        Raises:
            CutError: It differentiates by a watched parameter.
        """
        kwargs = kwargs or {}
        if self._paused or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        watched = self._watched((*args, *kwargs.values()))
        if watched is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not watched.is_meta:
                raise
            raise CutError(self._refusal(watched)) from error
        if isinstance(result, Tensor) and result is not watched and result.requires_grad:
            raise CutError(self._refusal(watched))
        return result

    def _watched(self, values: tuple[Any, ...] | list[Any]) -> nn.Parameter | None:
        for value in values:
            if isinstance(value, nn.Parameter):
                if id(value) in self._names:
                    return value
            elif isinstance(value, list | tuple):
                found = self._watched(value)
                if found is not None:
                    return found
        return None

    def _refusal(self, parameter: nn.Parameter) -> str:
        name = self._names[id(parameter)]
        return (
            f"the step uses the parameter {name} itself, which lives on one stage only. Rule: a "
            "step uses a pipelined network by calling it. Remedy: compute what needs its "
            "parameters (a penalty, say) within its forward, use weight_decay, or name other "
            "networks (or the parts of this one that the step calls) in "
            "PipeSwiftStrategy(network=[...])"
        )
