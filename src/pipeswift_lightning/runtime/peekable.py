"""An iterator whose next element can be had before its turn."""

from collections.abc import Iterator
from threading import Lock
from typing import Any

from typing_extensions import override

__all__ = ["Peekable"]


class Peekable(Iterator[Any]):
    """Wraps an iterator; another thread may peek while nobody asks for the next element.

    Args:
        source: The iterator. Its attributes are those of the wrapper too.

    Attributes:
        turn: How many elements have been asked for.

    Example:
        >>> letters = Peekable(iter("ab"))
        >>> letters.peek(), letters.peek(), next(letters), next(letters)
        ('a', 'a', 'a', 'b')
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._lock = Lock()
        self._ready: list[Any] = []
        self._failure: BaseException | None = None
        self.turn = 0

    def peek(self, turn: int | None = None) -> Any:
        """Return the next element, which the next call of ``next`` returns again.

        Args:
            turn: Which one is meant, as ``turn`` was; a thread may come late.

        Raises:
            LookupError: It has been asked for already; nothing was drawn.
            BaseException: What the iterator raised, which ``next`` raises again.
        """
        with self._lock:
            if turn is not None and turn != self.turn:
                msg = f"element {turn} has had its turn"
                raise LookupError(msg)
            if self._failure is None and not self._ready:
                try:
                    self._ready.append(next(self._source))
                except BaseException as failure:  # noqa: BLE001 -- `next` raises it in its turn
                    self._failure = failure
            if self._failure is not None:
                raise self._failure
            return self._ready[0]

    @override
    def __next__(self) -> Any:
        with self._lock:
            self.turn += 1
            if self._ready:
                return self._ready.pop()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            return next(self._source)

    @override
    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Be left out of copies, as loaders' iterators are: Lightning makes them anew."""
        return type(None), ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
