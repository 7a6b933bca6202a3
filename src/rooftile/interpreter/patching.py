"""Replaces attributes of Triton's interpreter, with an error if one is missing."""

import types
from collections.abc import Callable
from typing import Any

import triton


def original(owner: type | types.ModuleType, name: str) -> Any:
    """Triton's attribute. Raises RuntimeError if this version has none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"Rooftile cannot mend the interpreter of Triton {triton.__version__}: "
            f"{owner.__name__} has no attribute {name!r}"
        ) from None


def replace(owner: type | types.ModuleType, *names: str) -> Callable[[Callable], Callable]:
    """Decorator: the function replaces these attributes, all of which must exist."""

    def put(function: Callable) -> Callable:
        for name in names:
            original(owner, name)
            setattr(owner, name, function)
        return function

    return put
