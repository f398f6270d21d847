"""The call of the network within the user's step: stop there, or answer it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeswift_lightning.runtime.absent import AbsentMode, entered

__all__ = ["CutError", "NetworkCall"]


class CutError(RuntimeError):
    """The step does not call its network or layers in a way that can be cut into stages."""


class _NetworkCalledError(BaseException):
    """Ends a run at the network's call. Not an ``Exception``, so that user code lets it pass."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


class NetworkCall:
    """Runs a step up to the network's call, or with the call answered.

    Attributes:
        name: How errors name the network.
        answer: While set, what the intercepted network calls instead of its own forward.
    """

    def __init__(self, name: str, num_layers: int, device: torch.device) -> None:
        self.name = name
        self.answer: Callable[..., Any] | None = None
        self._num_layers = num_layers
        self._device = device

    def capture(
        self, step: Callable[[], Any], *, step_name: str, absent_parameters: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run ``step`` up to the network's call, and return the call's arguments.

        Args:
            step: The user's step with its arguments bound.
            step_name: How errors name the step.
            absent_parameters: Whether the parameters before the call live on another stage.

        Raises:
            CutError: The step does not call the network.
        """
        mode = AbsentMode(self._device, absent_parameters=True) if absent_parameters else None
        self.answer = _raise_call
        try:
            with entered(mode):
                step()
        except _NetworkCalledError as called:
            return called.call
        finally:
            self.answer = None
        raise CutError(self.not_called(step_name))

    def inject(
        self, step: Callable[[], Any], output: Any, *, step_name: str, absent_parameters: bool
    ) -> Any:
        """Run ``step`` with the network's call returning ``output``.

        Args:
            step: The user's step with its arguments bound.
            output: What the network returns.
            step_name: How errors name the step.
            absent_parameters: Whether the parameters before the call live on another stage.

        Raises:
            CutError: The step calls the network twice, or not at all.
        """
        calls = 0
        mode = AbsentMode(self._device, absent_parameters=True) if absent_parameters else None

        def once(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise CutError(self.called_twice())
            if mode is not None:  # what comes after the network has its parameters here
                mode.absent_parameters = False
            return output

        self.answer = once
        try:
            with entered(mode):
                result = step()
        finally:
            self.answer = None
        if not calls:
            raise CutError(self.not_called(step_name))
        return result

    def not_called(self, step_name: str) -> str:
        """Say that a step did not call the network."""
        return (
            f"{step_name} did not call {self.name} (nor any of its {self._num_layers} "
            "layers). Rule: the pipelined network is called exactly once in each step. Remedy: "
            f"call it, or name the network that {step_name} does call: "
            'PipeSwiftStrategy(network="...")'
        )

    def called_twice(self) -> str:
        """Say that a step called the network again."""
        return (
            f"{self.name} is called twice in one step. Rule: the pipelined network is "
            "called exactly once in each step, unless every rank runs the whole step. Remedy: "
            'call it once, on the concatenated inputs, or PipeSwiftStrategy(loss="transparent")'
        )

    def out_of_order(self, index: int, position: int, order: Sequence[int]) -> str:
        """Say that a step called a layer where its first step did not."""
        seen = order.index(index) < position if index in order else False
        what = "a second time" if seen else "out of order"
        return (
            f"layer {index} of {self.name} is called {what} (call {position} of this "
            f"step; its first step called layers in the order {tuple(order)}). Rule: every step "
            f"calls {self.name} exactly once, and its layers in one order. Remedy: make the order "
            "independent of the batch, or return coarser layers from configure_pipeline()"
        )

    def outside(self, index: int) -> str:
        """Say that a layer of another stage is called where no stage waits for it."""
        if self.answer is not None:
            return (
                f"layer {index} of {self.name} is called by itself, and its parameters live on "
                f"another stage. Rule: the step calls {self.name} as a whole. Remedy: name the "
                "parts that it calls, as in "
                'PipeSwiftStrategy(network=["model.encoder", "model.decoder"])'
            )
        return (
            f"layer {index} of {self.name} is called outside a step, and its "
            "parameters live on another stage. Rule: while the strategy is set up, the "
            "network runs inside training, validation, test and predict steps only. Remedy: "
            "call it in one of those steps, or after the Trainer has finished"
        )


def _raise_call(*args: Any, **kwargs: Any) -> Any:
    raise _NetworkCalledError(args, kwargs)
