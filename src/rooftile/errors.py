"""Errors of requests to an engine. The server's front, a process without PyTorch, raises them too."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class RequestError(RuntimeError):
    """What ended a request; its cause is what was raised."""
