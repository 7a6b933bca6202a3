"""Measuring the implementations of one op at one point against each other and against copies of the same bytes.

Inputs are standard normal and rotate through enough copies that none is in the L2 cache. The implementations take
turns in rounds, in a new random order each round, so that clock drift affects all of them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rooftile.bench import rows
from rooftile.bench.rows import TOGETHER, Measured
from rooftile.bench.streams import copy_calls
from rooftile.bench.timer import FLUSH, Block, Call, Clock, burst_seconds
from rooftile.bench.variants import Variant
from rooftile.cases import Direction, OpCase, Point
from rooftile.cases.check import as_tuple
from rooftile.cases.draw import normal
from rooftile.graphs import uncollected

ROOF = "copy"  # the name of the roof among the results

WORK = 2 << 30  # bytes of one pass: half a millisecond on the fastest chips, where starting a graph takes 4 us
MOST_COPIES = 64  # of a small input; the L2 cache is flushed between two passes
SHARE = 0.25  # of the free memory
ROUNDS = 10
BURST = 20  # calls at most to measure the host's time; some ten launches each are far from filling the queue
BURSTS = 10
BURSTS_SECONDS = 0.05  # of device work in all of them, about
SAMPLES = 20  # of each implementation, at least: the 20th and 80th percentiles of fewer mean little
PASS_SECONDS = 0.0025  # a pass is about as long, or one call: 600 times what starting a graph takes


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure each implementation: about `seconds` of device time, within `iters` passes and in `least` or
    more, after at most `warmup` passes. If `seconds` is 0: exactly `warmup` passes and then exactly `iters`."""

    warmup: int = 50
    iters: int = 200
    seconds: float = 0.05
    least: int = SAMPLES


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurements of one implementation; `samples` are seconds a call."""

    samples: tuple[float, ...]
    host_us: float
    peak_bytes: int
    method: str
    calls: int
    extra_bytes: int = 0

    @property
    def us(self) -> tuple[float, float, float]:
        """Median, 20th and 80th percentile in microseconds."""
        median, low, high = rows.spread(self.samples)
        return 1e6 * median, 1e6 * low, 1e6 * high


def one_of(direction: Measured) -> Direction:
    """The direction of a case that checks what is timed, and counts its bytes: see `OpCase.together`."""
    return "forward" if direction == "forward" else "backward"


@dataclasses.dataclass(frozen=True)
class InputSet:
    """The inputs of one call, and for a backward the gradients of its outputs."""

    tensors: Mapping[str, Tensor]
    output_grads: tuple[Tensor, ...]


def draw(
    case: OpCase, point: Point, dtype: torch.dtype, direction: Measured, device: torch.device, seed: int
) -> InputSet:
    numbers = torch.Generator(device).manual_seed(seed)
    tensors = case.inputs(point, dtype, device, numbers)
    if direction == "forward":
        return InputSet(tensors, ())
    on_meta = {n: t.to("meta") for n, t in tensors.items()}
    outputs = as_tuple(case.eager(**on_meta, **point.options))
    return InputSet(tensors, tuple(laid_out(normal(tuple(y.shape), dtype, device, numbers), y) for y in outputs))


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """The values in the memory layout of another tensor of the same shape, as autograd passes an output's gradient."""
    strides = torch.empty_like(like, device="meta").stride()
    if all(n == 1 or a == b for n, a, b in zip(values.shape, values.stride(), strides, strict=True)):
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


def bind(variant: Variant, case: OpCase, point: Point, direction: Measured, given: InputSet) -> Call:
    """One prepared call of the implementation; for a backward, the forward runs here.

    An input that the implementation overwrites is copied here, once. Each call then overwrites that copy. Forward and
    backward together build a new graph in each call and don't retain it; the gradient of a loss is the implicit 1.
    """
    assert variant.function is not None
    if direction == "forward":
        own = {n: t.clone() if n in variant.mutates else t for n, t in given.tensors.items()}
        return functools.partial(variant.function, **own, **point.options)
    grads = [n for n in case.grads if n in given.tensors]
    if direction == TOGETHER:
        return _together(variant, point, grads, given)
    # Views of the same memory, so that all implementations share one rotation.
    leaves = {n: t.detach().requires_grad_(n in grads) for n, t in given.tensors.items()}
    own = {n: t.clone() if n in variant.mutates else t for n, t in leaves.items()}
    outputs = as_tuple(variant.function(**own, **point.options))
    wanted = [leaves[n] for n in grads]
    output_grads = tuple(laid_out(g, y) for g, y in zip(given.output_grads, outputs, strict=True))
    return functools.partial(torch.autograd.grad, outputs, wanted, output_grads, retain_graph=True)


def _together(variant: Variant, point: Point, grads: Sequence[str], given: InputSet) -> Call:
    """A call of forward and backward. What it overwrites is a leaf of its own: no copy is timed."""
    assert variant.function is not None
    tensors = {n: t.clone() if n in variant.mutates else t for n, t in given.tensors.items()}
    leaves = {n: t.detach().requires_grad_(n in grads) for n, t in tensors.items()}
    forward = functools.partial(variant.function, **leaves, **point.options)
    wanted = [leaves[n] for n in grads]

    def step(forward: Call) -> tuple[Tensor, ...]:
        outputs = as_tuple(forward())
        output_grads = [None if y.ndim == 0 else g for g, y in zip(given.output_grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, wanted, output_grads)

    return functools.partial(step, forward)


def rotation(nbytes: int, l2: int, held: int, free: int) -> int:
    """How many input sets a pass goes through.

    Args:
        nbytes: what one call moves.
        l2: the L2 cache; a pass and the flush before it cover it four times over, at least.
        held: bytes of memory of each set, over all implementations.
        free: bytes of free memory.
    """
    wanted = math.ceil(max(WORK, FLUSH * l2) / max(1, nbytes))
    return max(1, min(wanted, MOST_COPIES, int(SHARE * free / max(1, held))))


def host_us(call: Call, clock: Clock) -> float:
    """Microseconds that a call takes on the host, which runs ahead of the device: the median over short bursts."""
    whole = _seconds_of(call, clock)
    burst = max(2, min(BURST, int(BURSTS_SECONDS / whole)))
    bursts = max(3, min(BURSTS, int(BURSTS_SECONDS / (burst * whole))))
    return 1e6 * statistics.median(burst_seconds(call, clock, burst) for _ in range(bursts))


def interleave(
    blocks: Mapping[str, Block], clock: Clock, effort: Effort, order: random.Random
) -> Iterator[tuple[str, list[float] | Exception]]:
    """Samples of each block in seconds a call, or the exception it raised; in rounds, each in its own random order."""
    failed: dict[str, Exception] = {}

    def sample(name: str, passes: int) -> list[float]:
        try:
            readings = [blocks[name].enqueue() for _ in range(passes)]
            clock.synchronize()
            return [read() for read in readings]
        except Exception as error:
            failed[name] = error
            return []

    taken: dict[str, list[float]] = {name: [] for name in blocks}
    passes: dict[str, int] = {}
    for name, block in blocks.items():
        if effort.seconds == 0:
            passes[name] = effort.iters
            sample(name, effort.warmup)
            continue
        first = sample(name, 2 if clock.measures else 1)
        seconds = max(1e-9, first[-1] * block.calls) if first else 1.0
        passes[name] = min(effort.iters, max(effort.least, math.ceil(effort.seconds / seconds)))
        if clock.measures:
            sample(name, min(effort.warmup, passes[name] // 4))
    rounds = min(ROUNDS, max(passes.values(), default=0))
    for i in range(rounds):
        for name in order.sample(list(blocks), len(blocks)):
            # The rounds share the passes out evenly: each takes up to its share of the whole.
            due = passes[name] * (i + 1) // rounds - passes[name] * i // rounds
            if name not in failed and due:
                taken[name] += sample(name, due)
    for name in blocks:
        yield name, failed[name] if name in failed else taken[name]


def fastest(timings: Sequence[Timing | Exception]) -> Timing | Exception:
    """The one with the least median; an exception if there are only exceptions."""
    right = [t for t in timings if isinstance(t, Timing)]
    return min(right, key=lambda t: t.us) if right else timings[0]


def calls_of_a_pass(copies: int, seconds: float) -> int:
    """How many of a rotation's calls make a pass: as many as take `PASS_SECONDS`, and one at least.

    The read before a pass evicts its data from the L2 cache, and no two of its calls have the same inputs, so that a
    shorter pass is as cold.
    """
    return max(1, min(copies, math.ceil(PASS_SECONDS / max(1e-9, seconds))))


def _seconds_of(call: Call, clock: Clock) -> float:
    """Seconds of a call on host and device, from an idle device to the kernels' end."""
    clock.synchronize()
    start = time.perf_counter()
    call()
    clock.synchronize()
    return time.perf_counter() - start


@dataclasses.dataclass
class _Probe:
    host_us: float
    peak_bytes: int
    extra_bytes: int
    held_bytes: int
    seconds: float = 0.0


def measure(
    case: OpCase,
    point: Point,
    dtype: torch.dtype,
    direction: Measured,
    variants: Sequence[Variant],
    clock: Clock,
    effort: Effort,
    device: torch.device,
    note: Callable[[str], None] = lambda phase: None,
) -> dict[str, Timing | Exception]:
    """The timings of the implementations, and under `ROOF` of the fastest copy if that is the case's roof; or the
    exception that one raised.

    Args:
        note: told which phase begins: "probe", "prepare" or "time".
    """
    results: dict[str, Timing | Exception] = {}
    if not variants:
        return results
    probes: dict[str, _Probe] = {}
    blocks: dict[str, Block] = {}
    roofs: dict[str, Block] = {}
    nbytes = case.nbytes(point, dtype.itemsize, one_of(direction))

    def forget(name: str, error: Exception) -> None:
        results[name] = error.with_traceback(None)  # a traceback may keep tensors alive
        gc.collect()

    with clock.active(), torch.set_grad_enabled(direction != "forward"):
        note("probe")
        first = draw(case, point, dtype, direction, device, seed=1)
        for variant in variants:
            try:
                before = clock.allocated_bytes()
                call = bind(variant, case, point, direction, first)
                held = clock.allocated_bytes() - before
                call()
                taken = host_us(call, clock) if clock.measures else 0.0
                seconds = _seconds_of(call, clock) if clock.measures else 0.0
                before = clock.allocated_bytes()
                results_of_one = call()
                kept = clock.allocated_bytes() - before
                del results_of_one
                peak = clock.peak_bytes(call)
                probes[variant.name] = _Probe(taken, peak, peak - kept, held, seconds)
                del call
            except Exception as error:
                forget(variant.name, error)

        note("prepare")
        held = 2 * nbytes + sum(p.held_bytes for p in probes.values())
        copies = rotation(nbytes, clock.l2, held, clock.free_bytes()) if clock.measures else 1
        sets = [first, *(draw(case, point, dtype, direction, device, seed) for seed in range(2, copies + 1))]
        for variant in variants:
            if variant.name not in probes:
                continue
            try:
                some = sets[: calls_of_a_pass(copies, probes[variant.name].seconds)]
                blocks[variant.name] = clock.block([bind(variant, case, point, direction, given) for given in some])
            except Exception as error:
                forget(variant.name, error)
        if clock.measures and case.roof == "copy":
            with torch.no_grad():
                roofs = {f"{ROOF} {n}": clock.block(calls) for n, calls in copy_calls(nbytes, copies, device).items()}
            blocks |= roofs

        note("time")
        with uncollected():
            for name, samples in interleave(blocks, clock, effort, random.Random(0)):
                if isinstance(samples, Exception):
                    forget(name, samples)
                else:
                    probe = probes.get(name, _Probe(0.0, 0, 0, 0))
                    block = blocks[name]
                    memory = (probe.peak_bytes, block.method, block.calls, probe.extra_bytes)
                    results[name] = Timing(tuple(samples), probe.host_us, *memory)
    copied = [results.pop(name) for name in roofs]
    if copied:
        results[ROOF] = fastest(copied)
    return results
