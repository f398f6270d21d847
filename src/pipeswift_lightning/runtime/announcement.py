"""Tell the other ranks of a group an object, in one small message as a rule.

``broadcast_object_list`` takes two messages, the length first, and pickles each tensor as a file
of its own: a millisecond in every step, for a few logged numbers.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

__all__ = ["Expected", "announce", "tell"]

_FIRST_BYTES = 4096  # of the message that every announcement begins with
_LENGTH_BYTES = 8
_TAG = 1  # apart from what else goes from rank to rank in the group


class Expected:
    """An announcement of another rank, received in the background from now on.

    Begun before a rank has other things to wait for, it takes no time when its value is due: the
    source need not wait for a slow rank, nor the others for each other. What is expected has to be
    told: to drop it and expect anew would lose a message.

    Args:
        source: The global rank that will `tell`.
        group: Ranks whose backend moves tensors of the host; ``None`` for all.
    """

    def __init__(self, source: int, group: dist.ProcessGroup | None) -> None:
        self._source, self._group = source, group
        self._first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._work = self._receive(self._first)

    def value(self) -> Any:
        """Wait for it, once; tensors arrive on the host, without history."""
        self._work.wait()
        data = self._first.numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        data = data[_LENGTH_BYTES:]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._receive(rest).wait()
            data += rest.numpy().tobytes()
        return pickle.loads(data)  # from a rank of our own; what follows the pickle is ignored

    def _receive(self, buffer: Tensor) -> dist.Work:
        work = dist.irecv(buffer, self._source, group=self._group, tag=_TAG)
        assert work is not None
        return work


def tell(value: Any, group: dist.ProcessGroup | None) -> None:
    """Send ``value`` to the other ranks of the group, each of which has it `Expected`.

    Args:
        value: Anything that can be pickled.
        group: As theirs.
    """
    data = _pickled(value)
    message = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    message.extend(bytes(max(0, _FIRST_BYTES - len(message))))
    whole = torch.frombuffer(message, dtype=torch.uint8)
    parts = [whole[:_FIRST_BYTES]]
    if len(message) > _FIRST_BYTES:
        parts.append(whole[_FIRST_BYTES:])
    others = [r for r in dist.get_process_group_ranks(group) if r != dist.get_rank()]
    works = [dist.isend(part, r, group=group, tag=_TAG) for r in others for part in parts]
    for work in works:
        assert work is not None
        work.wait()


def announce(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """Return ``value`` as rank ``source`` gives it; every rank of the group calls this.

    The source gets its own ``value`` back.

    Args:
        value: Anything that can be pickled; what other ranks than the source give is ignored.
        source: The global rank that tells.
        group: As in `Expected`.
    """
    if dist.get_rank() != source:
        return Expected(source, group).value()
    tell(value, group)
    return value


class _Pickler(pickle.Pickler):
    """Pickles dense tensors as their bytes."""

    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (value.dtype, tuple(value.shape), data)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
