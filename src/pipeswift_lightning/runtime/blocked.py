"""See from another thread that a thread stands in a call of ``torch.distributed``."""

import sys
from pathlib import Path
from types import FrameType

__all__ = ["distributed_call"]

_MODULE = "torch.distributed."


def distributed_call(thread_id: int) -> str | None:
    """Return which call of ``torch.distributed`` a thread stands in, and where that is made.

    Lightning, torchmetrics and users call collectives that this package does not see; to its
    watchdog such a rank would look as if it computed.

    Args:
        thread_id: ``threading.get_ident()`` of the thread.

    Returns:
        For instance ``"in torch.distributed.broadcast, called at training_epoch_loop.py:265"``;
        ``None`` if the thread stands elsewhere.
    """
    frame = sys._current_frames().get(thread_id)
    call: FrameType | None = None
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_MODULE):
        call, frame = frame, frame.f_back
    if call is None or frame is None:
        return None
    name = call.f_code.co_name
    if name == "wrapper":  # torch logs its collectives by a decorator
        name = call.f_locals.get("func", name)
        name = getattr(name, "__name__", str(name))
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f"in torch.distributed.{name}, called at {place}"
