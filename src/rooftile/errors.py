"""Errors of requests to an engine, and what errors advise. The server's front, which has no PyTorch, imports it too."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def to_install(extra: str = "") -> str:
    """How to install an extra, or what Rooftile always needs, for the end of an error that names what is missing.

    Rooftile is not on PyPI.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of Rooftile"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is none of those."""
    known = list(known)
    near = difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(known)}"


def checks_keywords(function: Callable[_P, _R], passes_to: Callable[..., object] | None = None) -> Callable[_P, _R]:
    """The function, whose TypeError for a keyword argument that it lacks says which one may be meant.

    With `passes_to` it takes that function's keyword arguments, too.
    """
    of = [function] if passes_to is None else [function, passes_to]
    parameters = [p for f in of for p in inspect.signature(f).parameters.values()]
    known = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls"))

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                called = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{called}: {name} is no argument; {did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return checked


def counted(n: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {what}{'' if n == 1 else 's'}"


class NoGPU(RuntimeError):
    """A process whose kernels are to run on a GPU has none."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class RequestError(RuntimeError):
    """What ended a request; its cause is what was raised."""
