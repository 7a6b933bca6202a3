"""Rooftile: LLM kernels in Triton that run at the roofline of the GPU.

`__init__.pyi` lists the public names, for type checkers and for this module. Each is imported at its first use, so that
`import rooftile` is quick, works where Triton is not installed, and leaves TRITON_INTERPRET to be decided until a
kernel is needed.
"""

import ast
import importlib
import pkgutil
from typing import Any

__version__ = "0.1.0"


def _read_stub() -> dict[str, str]:
    """The module that each public name is imported from."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    return {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


_HOME = _read_stub()

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rooftile' has no attribute {name!r}")
    home = _HOME[name]
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
