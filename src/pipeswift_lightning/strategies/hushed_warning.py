"""A warning that is hidden for a while, by one filter that is taken back."""

import warnings
from dataclasses import dataclass
from typing import Any

__all__ = ["HushedWarning"]


@dataclass(slots=True)
class HushedWarning:
    """Hides the warnings with a message, between two calls in different places.

    Args:
        pattern: Regular expression for the beginning of the message.

    Example:
        >>> hushed = HushedWarning("a test warns")
        >>> before = len(warnings.filters)
        >>> hushed.begin()
        >>> hushed.end()
        >>> len(warnings.filters) == before
        True
    """

    pattern: str
    _filter: Any = None

    def begin(self) -> None:
        """Hide it, unless the user does already."""
        before = [*warnings.filters]
        warnings.filterwarnings("ignore", self.pattern)
        self._filter = None if warnings.filters[0] in before else warnings.filters[0]

    def end(self) -> None:
        """Show it again; other filters stay, also newer ones."""
        entry, self._filter = self._filter, None
        filters: Any = warnings.filters
        if entry is not None and entry in filters:
            filters.remove(entry)
