"""The host's time for one call of an op, beside Triton's launcher of the same kernels alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rooftile import launching
from rooftile.bench.measure import bind, draw
from rooftile.bench.rows import OURS
from rooftile.bench.timer import Call, Clock, burst_seconds
from rooftile.bench.variants import Variant
from rooftile.cases import OpCase, Point
from rooftile.cases.check import NAMES

import triton  # isort: skip

BURST = 50  # calls of one or two launches each; the device's queue holds about a thousand
BURSTS = 40


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


def smallest(case: OpCase, dtype: torch.dtype) -> Point:
    """The point of a model that moves the fewest bytes: there the device is faster than the host."""

    def nbytes(point: Point) -> int:
        return case.nbytes(point, dtype.itemsize, "forward")

    real = [p for name, some in case.sets.items() if name not in ("tiny", "edge") for p in some]
    found = real or [p for some in case.sets.values() for p in some]
    return min((p for p in found if nbytes(p)), key=nbytes)


class Launch(NamedTuple):
    kernel: Any
    again: Call


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects the launches in this context, with a call that repeats each."""
    launches: list[Launch] = []
    run = triton.JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # As a user writes it: kernel[grid](...) makes a new launcher object at each call.
        launches.append(Launch(self, lambda: self[grid](*args, **kwargs)))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def _launches(call: Call, what: str) -> list[Launch]:
    """What a call launches; at least one kernel. It is called twice, since a first call may launch more."""
    call()
    launching.forget()
    with recorded() as launches:
        call()
    if not launches:
        raise RuntimeError(f"{what} launched no kernel through triton.JITFunction.run")
    return launches


def _in_turn(calls: Sequence[Call]) -> Call:
    """One call that makes all of them; if there is one, that one."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def launcher_call(call: Call, what: str) -> Call:
    """Triton's launcher for each kernel that a call launches, with nothing around it.

    Raises:
        RuntimeError: it launched nothing through Triton's launcher.
    """
    return _in_turn([launch.again for launch in _launches(call, what)])


def measure_host(case: OpCase, point: Point, dtype: torch.dtype, clock: Clock, device: torch.device) -> HostTime:
    """The host's times of a case's op at one point: medians over bursts, which take turns, since a host's clock drifts.

    Raises:
        RuntimeError: the op launched nothing through Triton's launcher.
    """
    bursts: dict[str, list[float]] = {"launcher": [], "op": [], "op_grad": []}
    with clock.active():
        inputs = draw(case, point, dtype, "forward", device, seed=0).tensors
        leaves = {n: t.detach().requires_grad_(n in case.grads) for n, t in inputs.items()}
        op = functools.partial(case.function, **inputs, **point.options)
        with torch.no_grad():
            launcher = launcher_call(op, f"{case.name} at {point}")
        for _ in range(BURSTS):
            with torch.no_grad():
                bursts["launcher"].append(burst_seconds(launcher, clock, BURST))
                bursts["op"].append(burst_seconds(op, clock, BURST))
            with torch.enable_grad():
                # An op that writes in place refuses leaves, and each call lengthens the autograd graph of its inputs.
                given = {n: t.clone() if n in case.mutates else t for n, t in leaves.items()}
                op_grad = functools.partial(case.function, **given, **point.options)
                bursts["op_grad"].append(burst_seconds(op_grad, clock, BURST))
    us = {name: 1e6 * statistics.median(taken) for name, taken in bursts.items()}
    return HostTime(str(point), NAMES[dtype], us["launcher"], us["op"], us["op_grad"])


@contextlib.contextmanager
def cold_cache() -> Iterator[None]:
    """Within this context Triton compiles as on a machine that has never run it."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def first_call_ms(
    case: OpCase, point: Point, dtype: torch.dtype, clock: Clock, device: torch.device
) -> dict[str, float]:
    """What the first call costs beyond the second, by direction: compiling, with nothing in Triton's caches.

    Raises:
        RuntimeError: the op launched nothing through Triton's launcher.
    """

    def seconds(call: Call) -> float:
        clock.synchronize()
        start = time.perf_counter()
        call()
        clock.synchronize()
        return time.perf_counter() - start

    found = {}
    ours = Variant(OURS, case.function, case.mutates)
    for direction in case.directions:
        with clock.active(), torch.set_grad_enabled(direction == "backward"):
            call = bind(ours, case, point, direction, draw(case, point, dtype, direction, device, seed=0))
            launches = _launches(call, f"{case.name} {direction} at {point}")
            with cold_cache():
                for launch in launches:
                    launch.kernel.device_caches.clear()
                launching.forget()
                first, second = seconds(call), seconds(call)
            found[str(direction)] = 1e3 * (first - second)
    return found
