"""The host's time for one call of an op, beside Triton's own launcher of the same kernels with nothing around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftile.bench.measure import draw
from rooftile.bench.timer import Call, Clock
from rooftile.cases import OpCase, Point
from rooftile.cases.check import NAMES

import triton  # isort: skip

CALLS = 50  # queued ahead of the device, which takes some thousand launches before the host has to wait
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Microseconds on the host for one forward call.

    Attributes:
        launcher_us: `kernel[grid](...)` alone, for each kernel that the op launches, with its outputs allocated before.
        op_us: the public function under `torch.no_grad()`.
        op_grad_us: the public function with inputs that require grad.
    """

    shape: str
    dtype: str
    launcher_us: float
    op_us: float
    op_grad_us: float


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """The launches that happen meanwhile, each as a call that repeats it."""
    launches: list[Call] = []
    run = triton.JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # As a user writes it: kernel[grid](...) makes a new launcher object at each call.
        launches.append(lambda: self[grid](*args, **kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def _median_us(call: Callable[[], Any], clock: Clock) -> float:
    taken = []
    for _ in range(REPEATS):
        clock.synchronize()
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    clock.synchronize()
    return 1e6 * statistics.median(taken)


def measure_host(case: OpCase, point: Point, dtype: torch.dtype, clock: Clock, device: torch.device) -> HostTime:
    """The host's times of a case's op at one point.

    Raises:
        RuntimeError: the op launched nothing through Triton's launcher.
    """
    with clock.active():
        inputs = draw(case, point, dtype, "forward", device, seed=0).tensors
        call = functools.partial(case.function, **inputs, **point.options)
        leaves = {n: t.detach().requires_grad_(n in case.grads) for n, t in inputs.items()}
        # An op that writes in place takes no leaf.
        given = {n: t.clone() if n in case.mutates else t for n, t in leaves.items()}
        with torch.no_grad():
            call()
            with recorded() as launches:
                call()
            if not launches:
                raise RuntimeError(f"{case.name} launched no kernel at {point} through triton.JITFunction.run")

            def launcher() -> None:
                for launch in launches:
                    launch()

            launcher_us = _median_us(launcher, clock)
            op_us = _median_us(call, clock)
        with torch.enable_grad():
            op_grad_us = _median_us(functools.partial(case.function, **given, **point.options), clock)
    return HostTime(str(point), NAMES[dtype], launcher_us, op_us, op_grad_us)


@contextlib.contextmanager
def cold_cache() -> Iterator[None]:
    """Triton compiles meanwhile as on a machine that has never run it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def first_call_ms(
    case: OpCase, point: Point, dtype: torch.dtype, clock: Clock, device: torch.device
) -> dict[str, float]:
    """What the first call costs beyond the second, by direction: compiling, with nothing in Triton's cache.

    The point must be one that this process has not called the op at.
    """
    from rooftile.bench.measure import bind
    from rooftile.bench.rows import OURS
    from rooftile.bench.variants import Variant

    def seconds(call: Call) -> float:
        clock.synchronize()
        start = time.perf_counter()
        call()
        clock.synchronize()
        return time.perf_counter() - start

    found = {}
    ours = Variant(OURS, case.function, case.mutates)
    with cold_cache(), clock.active():
        for direction in ("forward", "backward"):
            with torch.set_grad_enabled(direction == "backward"):
                call = bind(ours, case, point, direction, draw(case, point, dtype, direction, device, seed=0))
                first, second = seconds(call), seconds(call)
                found[direction] = 1e3 * (first - second)
    return found
