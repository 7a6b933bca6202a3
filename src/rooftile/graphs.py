"""CUDA graphs: how a step is recorded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from rooftile import launching

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
    step: Callable[[], Result],
    *,
    warm: Callable[[], Any] | None = None,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the step on the current device, and what the step returned: memory that each replay writes anew.

    Args:
        step: waits for nothing, and reads and writes at fixed addresses.
        warm: run before, aside, where kernels are compiled and memory is taken; by default the step, twice.
        pool: the memory of several graphs, of which no two are replayed at once.
        stream: that it is recorded on, the same one for all graphs of a pool; a new one by default. PyTorch's own
            default is one of the device that recorded first.

    Whatever is raised, what was launched comes before what the current stream is given from here on, and that is the
    stream it was.
    """
    here, aside = torch.cuda.current_stream(), stream or torch.cuda.Stream()
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
    # A capture that can't be ended would leave its stream the current one. Other threads may do meanwhile what this one
    # must not.
    recording = torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local")
    with torch.cuda.stream(here), uncollected(), recording:
        result = step()
    return graph, result


class SerialGraphs:
    """Graphs of one stream, of which no two are replayed at once: they share their memory and the kernels' counters.

    What a graph returned is good until the next is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._counters = launching.allocate_counters(device)

    def record(
        self, step: Callable[[], Result], warm: Callable[[], Any] = lambda: None
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """`record`, by default of a step that was run before."""
        with launching.captures_share(self._counters, self._stream.cuda_stream):
            return record(step, warm=warm, pool=self._pool, stream=self._stream)
