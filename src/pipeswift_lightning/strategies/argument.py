"""What an argument may be, and a constructor that refuses everything else by name.

Annotations alone refuse nothing: a wrong type would come up much later, as an error of whatever
first computes with it. The decorator keeps the signature, which LightningCLI and editors read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec

__all__ = [
    "COUNT",
    "FLAG",
    "PATH",
    "SHARE",
    "TEXT",
    "Argument",
    "checked",
    "instance",
    "is_count",
    "is_number",
    "is_path",
    "is_positive",
    "list_of",
    "one_of",
]

P = ParamSpec("P")
Check = Callable[[Any], bool]
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Argument:
    """What one argument may be.

    Args:
        rule: What it is, as the end of "Rule: <name> is".
        remedy: What to write instead.
        fits: Whether a value is right; it must not raise, whatever it is given.
        words: The words that it may be, of which the nearest is suggested.

    Example:
        >>> COUNT.refusal("window", 2.5, owner="Monitor")
        'Monitor(window=2.5) is not allowed. Rule: window is a whole number, 1 or more. \
Remedy: window=8, say'
    """

    rule: str
    remedy: str
    fits: Check
    words: tuple[str, ...] = ()

    def refusal(self, name: str, value: Any, *, owner: str = "") -> str:
        """Return what to say of a value that does not fit an argument, of a class or of none."""
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        near = get_close_matches(value, self.words, n=1, cutoff=0.4) if _is_text(value) else []
        guess = f"did you mean {near[0]!r}? Or " if near else ""
        given = f"{owner}({name}={shown})" if owner else f"{name}={shown}"
        return (
            f"{given} is not allowed. Rule: {name} is {self.rule}. "
            f"Remedy: {guess}{self.remedy.replace('{name}', name)}"
        )

    def or_none(self, meaning: str) -> "Argument":
        """Return the same, and ``None`` besides."""
        fits = self.fits
        rule = f"{self.rule}, or None for {meaning}"
        return Argument(rule, self.remedy, lambda v: v is None or fits(v), self.words)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least so many; ``True`` is none."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_number(value: Any) -> bool:
    """Whether it is a number, and not nan; ``True`` is none."""
    return not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0."""
    return is_number(value) and value > 0


def is_path(value: Any) -> bool:
    """Whether it names a file or a folder."""
    return isinstance(value, Path) or _is_text(value)


def list_of(fits: Check) -> Check:
    """Return a check of lists: not empty, and each entry fits."""

    def check(value: Any) -> bool:
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return listed and len(value) > 0 and all(map(fits, value))

    return check


def one_of(*words: str) -> Argument:
    """Return an argument that is one of some words."""
    listed = " or ".join(map(repr, words))
    remedy = f"one of {', '.join(map(repr, words))}"
    return Argument(listed, remedy, lambda v: isinstance(v, str) and v in words, words)


def instance(kind: type, remedy: str) -> Argument:
    """Return an argument that is an object of a class, or ``None``."""
    rule = f"a {kind.__name__}, or None"
    return Argument(rule, remedy, lambda v: v is None or isinstance(v, kind))


COUNT = Argument("a whole number, 1 or more", "{name}=8, say", is_count)
FLAG = Argument("True or False", "{name}=True or {name}=False", lambda v: isinstance(v, bool))
TEXT = Argument("a word", "a string that is not empty", _is_text)
PATH = Argument("a path", "a string or a pathlib.Path that is not empty", is_path)
SHARE = Argument(
    "a share, above 0 and below 1", "{name}=0.05, say", lambda v: is_number(v) and 0 < v < 1
)


def checked(
    arguments: Mapping[str, Argument], error: type[ValueError]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator for an ``__init__``: wrong values and unknown names are refused.

    Args:
        arguments: What each may be; those that are not listed are not looked at.
        error: What is raised. It names the value, the rule and the remedy.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        parameters = list(signature(init).parameters.values())[1:]  # without self
        known = [p.name for p in parameters]
        placed = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]

        @wraps(init)
        def checking(*args: P.args, **kwargs: P.kwargs) -> None:
            owner = type(args[0]).__name__
            given = args[1:]
            if len(given) > len(placed):
                raise error(_too_many(owner, given, known, placed))
            for name in kwargs:
                if name not in known:
                    raise error(_unknown(owner, name, kwargs[name], known))
            for name, value in (*zip(placed, given, strict=False), *kwargs.items()):
                argument = arguments.get(name)
                if argument is not None and not argument.fits(value):
                    raise error(argument.refusal(name, value, owner=owner))
            init(*args, **kwargs)

        return checking

    return decorate


def _unknown(owner: str, name: str, value: object, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    return (
        f"{owner}({name}={value!r}): there is no such argument. Rule: the arguments are "
        f"{', '.join(known)}. Remedy: {remedy}"
    )


def _too_many(
    owner: str, given: Sequence[object], known: Sequence[str], placed: Sequence[str]
) -> str:
    wrong, name = given[len(placed)], known[len(placed)]
    return (
        f"{owner}(..., {wrong!r}) does not say which argument it is. Rule: "
        f"{', '.join(placed) or 'no argument'} can stand without a name. Remedy: "
        f"write its name, as in {owner}({name}={wrong!r})"
    )
