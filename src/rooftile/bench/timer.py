"""Clocks: how a list of calls is timed on a device.

`DeviceClock` measures device time. The calls of one pass over the rotation are captured in a graph, so that the time
has no launch overhead and no autograd bookkeeping. Before each pass, a read of four times the L2 cache evicts the last
pass's data and gives the host time to queue the pass. `HostClock` serves the interpreter, whose times mean nothing.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from rooftile import launching, runtime
from rooftile.graphs import uncollected

Call = Callable[[], Any]

FLUSH = 4  # times the L2 cache: what is read between two passes


def burst_seconds(call: Call, clock: Clock, calls: int) -> float:
    """Seconds that one call takes on the host, over a burst of them.

    The device is idle at the start, and its queue of about a thousand launches holds the whole burst, so that the host
    never waits for a slot. A call that takes longer on the device does not change the figure.
    """
    clock.synchronize()
    with uncollected():
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - start) / calls
    clock.synchronize()
    return seconds


class Block(Protocol):
    """Some calls, ready to be timed as one."""

    calls: int
    method: str

    def enqueue(self) -> Callable[[], float]:
        """Queue one pass; the function that comes back gives its seconds a call, once the clock is synchronized."""
        ...


class Clock(Protocol):
    """`measures` is False if times mean nothing; `l2` is the size of the L2 cache in bytes."""

    measures: bool
    l2: int

    def active(self) -> contextlib.AbstractContextManager[None]:
        """The context in which timed calls must allocate and run."""
        ...

    def block(self, calls: Sequence[Call]) -> Block: ...

    def synchronize(self) -> None: ...

    def peak_bytes(self, call: Call) -> int:
        """The most memory that the call adds to what is allocated."""
        ...

    def allocated_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def release(self) -> None:
        """Free the memory kept for blocks. No block may be used afterwards."""
        ...


class _HostBlock:
    method = "host clock"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self.calls = len(calls)

    def enqueue(self) -> Callable[[], float]:
        start = time.perf_counter()
        for call in self._calls:
            call()
        seconds = (time.perf_counter() - start) / self.calls
        return lambda: seconds


class HostClock:
    """The host's own clock around each call, for the interpreter."""

    measures = False
    l2 = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def block(self, calls: Sequence[Call]) -> Block:
        return _HostBlock(calls)

    def synchronize(self) -> None: ...

    def peak_bytes(self, call: Call) -> int:
        call()
        return 0

    def allocated_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 30

    def release(self) -> None: ...


class _DeviceBlock:
    """One pass between two events, after a read that flushes the L2 cache."""

    def __init__(self, clock: DeviceClock, calls: int, method: str) -> None:
        self._clock = clock
        self.calls = calls
        self.method = method

    def _pass(self) -> None:
        raise NotImplementedError

    def _lead(self) -> None:
        self._clock.flush()

    def enqueue(self) -> Callable[[], float]:
        module = self._clock.module
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        self._lead()
        start.record()
        self._pass()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 / self.calls


class _GraphBlock(_DeviceBlock):
    def __init__(self, clock: DeviceClock, graph: Any, calls: Sequence[Call]) -> None:
        super().__init__(clock, len(calls), "graph")
        self._graph = graph
        self._calls = calls  # the graph reads their inputs, and does not keep them

    def _pass(self) -> None:
        self._graph.replay()


class _EventBlock(_DeviceBlock):
    """For calls that can't be captured: the device is kept busy until the host has queued the pass."""

    def __init__(self, clock: DeviceClock, calls: Sequence[Call]) -> None:
        super().__init__(clock, len(calls), "events")
        self._calls = calls
        start = time.perf_counter()
        self._pass()
        self._host_seconds = time.perf_counter() - start
        clock.synchronize()

    def _lead(self) -> None:
        self._clock.flush()
        self._clock.spin(1.5 * self._host_seconds)

    def _pass(self) -> None:
        # Results are kept until the pass is queued, so that each call writes to memory of its own.
        self._results = [call() for call in self._calls]


class DeviceClock:
    """Times on an accelerator, on a side stream, since graphs can't be captured on the default stream."""

    measures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device.type)
        self.l2 = runtime.target(device).l2
        self._stream = self.module.Stream(device)
        self._pool: Any = None
        self._keeper: Any = None
        with self.active():
            self._lines = torch.randn(4096, FLUSH * self.l2 // (4 * 4096), device=device)
            self._sink = torch.empty(4096, device=device)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self.module.stream(self._stream):
            yield

    def flush(self) -> None:
        """Flush the L2 cache by a read. A write would leave dirty lines for the next pass to write back."""
        torch.sum(self._lines, 1, out=self._sink)

    def spin(self, seconds: float) -> None:
        """Keep the device busy for about that long, in cycles at 2 GHz."""
        if hasattr(self.module, "_sleep"):
            self.module._sleep(int(seconds * 2e9) + 1)

    def block(self, calls: Sequence[Call]) -> Block:
        for call in calls:  # what compiles, tunes or allocates at its first call does so here
            call()
        self.synchronize()
        if not hasattr(self.module, "CUDAGraph") or self._synchronizes(calls[0]):
            return _EventBlock(self, calls)
        self._keep_pool()
        try:
            return _GraphBlock(self, self._capture(calls), calls)
        except RuntimeError:  # it synchronizes, or allocates by itself
            self.synchronize()
            return _EventBlock(self, calls)

    def _synchronizes(self, call: Call) -> bool:
        """Whether the call waits for the device. A capture that fails there may leave the allocator in its pool."""
        if not hasattr(self.module, "set_sync_debug_mode"):
            return False
        self.module.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            self.module.set_sync_debug_mode("default")
        return False

    def _keep_pool(self) -> None:
        """One memory pool for all graphs, kept by a graph that never runs: no two passes run at once, and none of them
        reads what another has written."""
        if self._keeper is None:
            self._pool = self.module.graph_pool_handle()
            self._keeper = self._capture([self._sink.clone])

    def _capture(self, calls: Sequence[Call]) -> Any:
        graph = self.module.CUDAGraph()
        launching.reuse_counters()
        # "thread_local": autograd's own threads may do what this one must not.
        with uncollected():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                # Kept until the end, so that each call writes to memory of its own and no write stays in the cache.
                results = [call() for call in calls]
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
            del results
        return graph

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def peak_bytes(self, call: Call) -> int:
        self.synchronize()
        before = self.module.memory_allocated(self.device)
        self.module.reset_peak_memory_stats(self.device)
        call()
        return int(self.module.max_memory_allocated(self.device)) - int(before)

    def allocated_bytes(self) -> int:
        return int(self.module.memory_allocated(self.device))

    def free_bytes(self) -> int:
        unused = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return int(self.module.mem_get_info(self.device)[0]) + int(unused)

    def release(self) -> None:
        self._keeper = self._pool = None
        gc.collect()
        self.module.empty_cache()


def clock(device: torch.device) -> Clock:
    """The clock for that device in this process's mode."""
    return DeviceClock(device) if runtime.MODE is runtime.Mode.GPU else HostClock()
