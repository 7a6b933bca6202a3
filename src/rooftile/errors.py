"""Errors of requests to an engine, and what errors advise. The server's front, which has no PyTorch, imports it too."""


def to_install(extra: str = "") -> str:
    """How to install an extra, or what Rooftile always needs, for the end of an error that names what is missing.

    Rooftile is not on PyPI.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of Rooftile"


def counted(n: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {what}{'' if n == 1 else 's'}"


class NoGPU(RuntimeError):
    """A process whose kernels are to run on a GPU has none."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class RequestError(RuntimeError):
    """What ended a request; its cause is what was raised."""
