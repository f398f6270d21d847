"""What the network returned for each micro-batch and cannot be joined: an error if it is used."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten
from typing_extensions import override

from pipeswift_lightning.runtime.network_call import CutError

__all__ = ["Unjoined", "aligned", "constant"]

_ROWS = (
    "Rule: to see the whole batch, the loss needs tensors with a row a sample. Remedy: return "
    'those, or PipeSwiftStrategy(loss="per_sample"), if the loss is a mean over samples'
)


class Unjoined:
    """Stands for parts of the output that the whole batch has none of, such as key-value caches.

    It may travel: two that say the same are equal.

    Args:
        what: What they are.
        network: How errors name the network.
        rule: What was expected, and what to do.
    """

    def __init__(self, what: str, network: str, rule: str = _ROWS) -> None:
        self._message = f"{network} returned {what}, and the step uses that. {rule}"

    @override
    def __eq__(self, other: object) -> bool:
        return type(other) is Unjoined and other._message == self._message

    @override
    def __hash__(self) -> int:
        return hash(self._message)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise CutError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __pow__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse torch functions too."""
        leaves = tree_flatten((args, kwargs or {}))[0]
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse()


def aligned(outputs: Sequence[Any], network: str) -> list[Any]:
    """Return the outputs with equal structures: where they differ, there is an `Unjoined`.

    Example:
        >>> one, two = aligned([{"a": 1, "b": (1, 2)}, {"a": 3, "b": (1,)}], "net")
        >>> one["a"], two["a"], one["b"] is two["b"]
        (1, 3, True)
    """
    first = outputs[0]
    spec = tree_flatten(first)[1]
    if all(tree_flatten(output)[1] == spec for output in outputs[1:]):
        return list(outputs)
    if isinstance(first, Mapping) and all(
        isinstance(o, Mapping) and o.keys() == first.keys() for o in outputs
    ):
        result: list[Any] = [copy.copy(output) for output in outputs]
        for key in first:
            parts = aligned([output[key] for output in outputs], network)
            for mine, part in zip(result, parts, strict=True):
                mine[key] = part
        return result
    stand_in = Unjoined("structures that differ from micro-batch to micro-batch", network)
    return [stand_in] * len(outputs)


def constant(column: Sequence[Any], network: str) -> Any:
    """Join what is no tensor.

    Raises:
        CutError: They are numbers, and not the same.
    """
    first = column[0]
    if all(value is first or (value == first) is True for value in column):
        return first
    if not isinstance(first, str | bytes | int | float | complex) and first is not None:
        return Unjoined(f"a {type(first).__name__} for each micro-batch", network)
    msg = (
        f"{network} returned {list(column)[:4]} for different micro-batches: numbers that "
        "depend on the micro-batch cannot be joined. Remedy: return them as tensors with a "
        'row a sample, or PipeSwiftStrategy(loss="per_sample")'
    )
    raise CutError(msg)
