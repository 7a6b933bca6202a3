"""An OpenAI-compatible server over the engine's loop: `rooftile serve`."""

from __future__ import annotations

import importlib.util

from rooftile.errors import to_install

_NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client", "jinja2": "jinja2"}


def check_installed() -> None:
    """Raises ImportError, with what to install, unless the packages of the extra `serve` are there."""
    absent = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if absent:
        raise ImportError(f"the server needs {', '.join(absent)}: {to_install('serve')}")
