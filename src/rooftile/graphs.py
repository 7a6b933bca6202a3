"""CUDA graphs: how a step is recorded."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from rooftile import launching

Result = TypeVar("Result")

_collective_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those that may hold collectives


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Run without garbage collection.

    A collection takes longer than what is timed. It may also free another graph, whose destruction breaks a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def reset_collective_graphs() -> None:
    """Reset the graphs that were recorded while there was a process group; none of them can be replayed any more.

    Needed before the group ends: NCCL would wait for ever while a graph holds its collectives.
    """
    for graph in list(_collective_graphs):
        graph.reset()
    _collective_graphs.clear()


@functools.cache
def _reset_at_exit() -> None:
    """Registered after the process group's own end, and so run before it."""
    atexit.register(reset_collective_graphs)


def record(
    step: Callable[[], Result],
    *,
    warm: Callable[[], Any] | None = None,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the step on the current device, and the step's result: memory that each replay overwrites.

    Args:
        step: reads and writes at fixed addresses and never waits for the device.
        warm: runs first, outside of the graph, to compile kernels and allocate memory; by default the step, twice.
        pool: a memory pool shared with other graphs. Only if no two of them replay concurrently.
        stream: the stream to record on, the same one for all graphs of a pool; a new one by default. PyTorch's own
            default belongs to the device that recorded first.

    Even if something raises, later work on the current stream waits for what was launched here, and the current stream
    is the one that it was.
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
    # `stream(here)` restores the current stream if the capture can't be ended. "thread_local" lets other threads do
    # what a capturing thread must not.
    recording = torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local")
    with torch.cuda.stream(here), uncollected(), recording:
        result = step()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _collective_graphs.add(graph)
        _reset_at_exit()
    return graph, result


class SerialGraphs:
    """Graphs of one stream that share their memory and the kernels' counters.

    Only if no two of them replay concurrently. A graph's result is valid until the next graph is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._counters = launching.allocate_counters(device)

    def record(
        self, step: Callable[[], Result], warm: Callable[[], Any] = lambda: None
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """`record` a step, by default one that has already run."""
        with launching.captures_share(self._counters, self._stream.cuda_stream):
            return record(step, warm=warm, pool=self._pool, stream=self._stream)
