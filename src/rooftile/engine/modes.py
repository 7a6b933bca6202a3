"""Where and how the engine computes, whatever its caller has switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.get_device_module(device.type).device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Compute outside of every mode of the caller: no gradients, no autocast, no inference mode.

    A tensor made in inference mode can be written there alone, and the caller may go on outside of it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this switches gradients on
        stack.enter_context(torch.no_grad())
        if device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
