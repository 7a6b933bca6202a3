"""CUDA graphs: how a step is recorded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile.

    A collection takes longer than what is timed, and may free what must stay. It may free a graph, too, whose
    destruction breaks the capture of another.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def record(
    step: Callable[[], Result], *, warm: Callable[[], Any] | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the step on the current device, and what the step returned: memory that each replay writes anew.

    Args:
        step: waits for nothing, and reads and writes at fixed addresses.
        warm: run before, aside, where kernels are compiled and memory is taken; by default the step, twice.
        pool: the memory of several graphs, of which no two are replayed at once.

    Whatever is raised, what was launched comes before what the current stream is given from here on.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            if warm is None:
                step()
                step()
            else:
                warm()
    finally:
        here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result
