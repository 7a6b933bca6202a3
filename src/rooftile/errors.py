"""Errors of requests to an engine, and what errors advise. The server's front, which has no PyTorch, imports it too."""


def to_install(extra: str) -> str:
    """How to install an extra, for the end of an error that names what is missing. Rooftile is not on PyPI."""
    return f"pip install '.[{extra}]' in a clone of Rooftile"


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class RequestError(RuntimeError):
    """What ended a request; its cause is what was raised."""
