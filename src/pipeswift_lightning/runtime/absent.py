"""Absent values: what a stage cannot compute because its inputs live on another stage.

Every stage runs the user's own step from its first line, so that masks, positions and noise are
computed locally and never sent. What depends on a parameter or on a layer of another stage is
*absent*: it has a shape and a dtype (a meta tensor), but no data. `AbsentMode` lets ordinary code
run over a mixture of absent and present tensors.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from typing_extensions import override

from pipeswift_lightning.runtime.deferred import Deferrals, kind_of, sizeless
from pipeswift_lightning.runtime.operations import OperationCounter
from pipeswift_lightning.runtime.structure import leaves_of, mapped

__all__ = ["AbsentMode", "AbsentValueError", "absent_output", "entered", "left", "to_absent"]

_META = torch.device("meta")
_DEVICE_GETTER = torch.Tensor.device.__get__
_IS_META_GETTER = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DTYPE_GETTER = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_MOVES = {torch.Tensor.cpu, torch.Tensor.cuda}
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "and", "or")}
_MAX_SEEN = 4096
# Attributes; results whose dims depend on sizes; and what torch's own code may take apart unseen.
_AT_ONCE = {"__get__", "squeeze", "detach", "as_subclass"}
_RESHAPING = {f"{name}_" for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes")}
_RESHAPING |= {f"{name}_" for name in ("swapdims", "resize", "resize_as", "set", "as_strided")}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_REPEATING = {torch.repeat_interleave, torch.Tensor.repeat_interleave}
_SELECTING = _INDEXING | _REPEATING
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
}


class AbsentValueError(RuntimeError):
    """The step needs the data of a value that another stage computes."""


def to_absent(value: Any) -> Any:
    """Return ``value`` with every tensor replaced by a meta tensor of its shape and dtype.

    Example:
        >>> to_absent({"x": torch.ones(2, 3)})["x"].is_meta
        True
    """
    return mapped(_as_meta, value)


def absent_output(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the absent output of a layer that lives on another stage."""
    try:
        return to_absent(original(*to_absent(args), **to_absent(kwargs)))
    except (RuntimeError, NotImplementedError):
        # Some layers cannot run without data (routing, data-dependent shapes). Blocks keep the
        # shape of their first tensor, and only the shape can matter here.
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        return torch.empty_like(tensors[0], device="meta")


def _as_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


class AbsentMode(TorchFunctionMode):
    """Run torch functions whose arguments include absent tensors on the meta device.

    Args:
        device: The device that absent tensors claim to be on, so that ``x.device`` places new
            tensors (positions, masks) on the real device.
        absent_parameters: ``True`` to treat every parameter as absent; otherwise only those on
            the meta device are.
        on_parameter: Called with each parameter that takes part in an absent operation.
        resolve: Maps ``id(tensor)`` of an absent tensor to the present one that has arrived for it.
        strict: Whether using an absent tensor is an error.
        seen: What operations on tensors of unknown shape have returned in other runs.

    Attributes:
        counter: Counts what depends on parameters, where values are named by their operations.
        deferred: Absent tensors whose shape is not known yet.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        absent_parameters: bool,
        on_parameter: Callable[[nn.Parameter], None] | None = None,
        resolve: Mapping[int, Tensor] | None = None,
        strict: bool = False,
        seen: dict[Hashable, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.absent_parameters = absent_parameters
        self.on_parameter = on_parameter
        self.resolve = resolve if resolve is not None else {}
        self.strict = strict
        self.counter: OperationCounter | None = None
        self.deferred = Deferrals()
        self._seen = seen if seen is not None else {}

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, on the meta device when an argument is absent."""
        kwargs = kwargs or {}
        counter = self.counter
        if counter is None or counter.paused or not counter.depends((args, kwargs)):
            return self._run(func, args, kwargs)
        result = self._run(func, args, kwargs)
        counter.count(func, result)
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._any_absent(args, kwargs):
            return func(*args, **kwargs)
        if self.resolve:
            args, kwargs = mapped(self._resolved, (args, kwargs))
            if not self._any_absent(args, kwargs):
                return func(*args, **kwargs)
        if func == _DEVICE_GETTER:
            return self.device
        if func == _IS_META_GETTER:
            return True
        if self.on_parameter is None:
            return self._run_later(func, args, kwargs)
        mapped(self._note, (args, kwargs))
        return self._run_absent(func, args, kwargs)

    def _run_later(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``func`` once its result has to be known, if its like has been seen, or else now."""
        deferred, leaves = self.deferred, leaves_of((args, kwargs))
        if deferred and any(leaf in deferred for leaf in leaves):
            args, kwargs = mapped(deferred.found, (args, kwargs))
            leaves = leaves_of((args, kwargs))
        waits = any(leaf in deferred for leaf in leaves) if deferred else False
        if waits and func == _DTYPE_GETTER:
            return args[0].dtype
        name = getattr(func, "__name__", "")
        if deferred and name in _RESHAPING:
            deferred.settle()  # what waits saw the tensor as it was
        elif waits and args and args[0] in deferred and _writes(func, kwargs, out=False):
            return None if func == Tensor.__setitem__ else args[0]
        if not _may_wait(func, name, kwargs, leaves):
            return self._make(func, args, kwargs)[0]
        key = (func, torch.get_default_dtype(), kind_of(args), kind_of(kwargs))
        like = self._seen.get(key) if waits else None
        if like is not None:
            given = self.frozen((args, kwargs))
            return deferred.defer(partial(self._make, func, *given), leaves, [like])[0]
        result = self._make(func, args, kwargs)[0]
        if type(result) is Tensor and result.is_meta:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[key] = sizeless(result)  # the tensor itself may soon hold a present one
        return result

    def frozen(self, arguments: Any) -> Any:
        """Return arguments as they are now, without data: lists and shapes may change later."""
        return mapped(self._frozen, arguments)

    def _frozen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf in self.deferred:
            return leaf
        return leaf.detach() if leaf.is_meta else _as_meta(leaf)

    def _make(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        args, kwargs = mapped(self.deferred.known, (args, kwargs))
        return [self._run_absent(func, args, kwargs)]

    def _run_absent(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.strict:
            msg = (
                "code before the second stage's first layer uses a parameter that another stage "
                "holds: the first step of this kind did not use it there. Rule: each step uses a "
                "parameter at the same places as the first one did. Remedy: use it from the first "
                "step on (times zero, if need be)"
            )
            raise AbsentValueError(msg)
        if func in _MOVES:
            return args[0]
        if _writes(func, kwargs) and args and isinstance(args[0], Tensor) and not args[0].is_meta:
            msg = (
                f"the step writes an activation that another stage computes into a tensor in place "
                f"({func.__name__}), where this stage could not see it. Rule: outside its layers, "
                "the network does not write activations into other tensors. Remedy: build the "
                "tensor with torch.stack, torch.cat or torch.where, or do it within a layer"
            )
            raise AbsentValueError(msg)
        if func in _READS:
            msg = (
                f"the step reads the value of an activation ({func.__name__}) that another stage "
                "computes. Rule: outside its layers, the network may use the shapes of activations "
                "but not their values. Remedy: move that code into a layer, or name the layers in "
                "configure_pipeline()"
            )
            raise AbsentValueError(msg)
        args, kwargs = _with_known_shape(func, args, kwargs)
        args, kwargs = mapped(_placed_on_meta, (args, kwargs))
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], "meta", *args[2:])
        if isinstance(kwargs.get("device"), str | int):
            kwargs = {**kwargs, "device": "meta"}
        try:
            with torch.no_grad():
                return func(*args, **kwargs)
        except RuntimeError as error:
            msg = (
                f"code outside the layers runs {getattr(func, '__name__', func)} on a value that "
                f"another stage computes, and that fails without data: {error}. Rule: outside its "
                "layers, the network runs what shapes alone are enough for. Remedy: if it runs on "
                "one device, move that code into a layer, or return coarser layers from "
                "configure_pipeline()"
            )
            raise AbsentValueError(msg) from error

    def _any_absent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._is_absent(args) or (bool(kwargs) and self._is_absent(kwargs))

    def _is_absent(self, value: Any) -> bool:
        # Written out, since a pytree walk would cost several times the torch call itself.
        if isinstance(value, Tensor):
            return value.is_meta or (self.absent_parameters and isinstance(value, nn.Parameter))
        if isinstance(value, list | tuple):
            return any(map(self._is_absent, value))
        if isinstance(value, dict):
            return any(map(self._is_absent, value.values()))
        return False

    def _resolved(self, leaf: Any) -> Any:
        absent = isinstance(leaf, Tensor) and leaf.is_meta
        return self.resolve.get(id(leaf), leaf) if absent else leaf

    def _note(self, leaf: Any) -> Any:
        if self.on_parameter is not None and isinstance(leaf, nn.Parameter):
            self.on_parameter(leaf)
        return leaf


def _with_known_shape(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put what decides the result's shape, and is known here, into a form without data.

    A mask that depends on the batch alone, such as that of the image tokens, selects a number of
    places which the mask's own meta tensor could not tell.
    """
    if func in _INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        places = tuple(place for part in index for place in _places(part))
        return (args[0], places, *args[2:]), kwargs
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    if func in _REPEATING and isinstance(repeats, Tensor) and not repeats.is_meta:
        size = _repeated(args[0], repeats, kwargs.get("dim", args[2:]))
        return args, {**kwargs, "output_size": size}
    return args, kwargs


def _repeated(tensor: Tensor, repeats: Tensor, dim: Any) -> int:
    """Return how long the result of ``repeat_interleave`` is: one number repeats all alike."""
    if repeats.numel() != 1:
        return int(repeats.sum())
    dim = dim[0] if isinstance(dim, tuple) and dim else dim
    return int(repeats) * (tensor.shape[dim] if isinstance(dim, int) else tensor.numel())


def _places(part: Any) -> tuple[Any, ...]:
    """Replace a mask in an index by the places that it selects."""
    if _is_present(part) and part.dtype is torch.bool and part.dim():
        return tuple(part.nonzero(as_tuple=True))
    return (part,)


def _is_present(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _writes(func: Callable[..., Any], kwargs: dict[str, Any], *, out: bool = True) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name in _AUGMENTED or (out and "out" in kwargs)


def _may_wait(
    func: Callable[..., Any], name: str, kwargs: dict[str, Any], leaves: Sequence[Any]
) -> bool:
    """Whether it makes no difference when an operation runs, or if it does."""
    if name in _AT_ONCE or _writes(func, kwargs) or func in _READS or func in _MOVES:
        return False
    # Values of a mask decide the shape, and may change in place until then.
    return func not in _SELECTING or not any(map(_is_present, leaves))


def _placed_on_meta(leaf: Any) -> Any:
    return _META if isinstance(leaf, torch.device) else _as_meta(leaf)


def entered(mode: AbsentMode | None) -> AbstractContextManager[Any]:
    """Run a block in ``mode``, if there is one."""
    return _NO_MODE if mode is None else mode


def left(mode: AbsentMode | None) -> AbstractContextManager[Any]:
    """Leave ``mode`` while a layer is called: what runs in it is none of the step's own code.

    In a layer of this stage nothing can be absent, and every look at a tensor would cost the mode's
    own call. Modes that the user's code has entered since stay as they are.
    """
    return _NO_MODE if mode is None else _Left(mode)


_NO_MODE = nullcontext()


class _Left:
    """Takes a mode off the stack, and puts it back to its place."""

    # No generator: that would take twice as long, for each layer of each micro-batch.
    def __init__(self, mode: AbsentMode) -> None:
        self._mode = mode
        self._inner: list[Any] = []

    def __enter__(self) -> None:
        top = _pop_mode()  # type: ignore[no-untyped-call]
        while top is not self._mode:
            self._inner.insert(0, top)
            top = _pop_mode()  # type: ignore[no-untyped-call]
        for other in self._inner:
            _push_mode(other)  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: object) -> None:
        for _ in self._inner:
            _pop_mode()  # type: ignore[no-untyped-call]
        for other in (self._mode, *self._inner):
            _push_mode(other)  # type: ignore[no-untyped-call]
