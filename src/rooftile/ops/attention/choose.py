"""Which kernel an attention gets, and in what tiles."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

from rooftile import library, runtime
from rooftile.ops.attention.common import parts
from rooftile.ops.attention.problem import AttentionConfig, Problem

_FORWARD = {"portable": "forward", "hopper": "hopper_forward"}
_BACKWARD = {"portable": "backward", "hopper": "hopper_backward"}


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"rooftile.ops.attention.{name}")
    except ImportError:
        if not name.startswith("hopper"):
            raise
        return None


def forward_module(kernel: str) -> ModuleType | None:
    """The module with that forward kernel; None where this Triton has not what it is written in (Gluon)."""
    return _module(_FORWARD[kernel])


def backward_module(kernel: str) -> ModuleType | None:
    """The same for the backward."""
    return _module(_BACKWARD[kernel])


def _reason(found: ModuleType | None, p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    if found is None:
        return f"kernel is {c.kernel!r}, which this installation has not"
    if c.num_warps * target.warp_size > target.max_threads:
        return (
            f"num_warps is {c.num_warps}, of which {target.arch} runs {target.max_threads // target.warp_size} at most"
        )
    return found.refuses(p, c, target)


def refuses_forward(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """Why the configuration can't run that problem; None where it can."""
    return _reason(forward_module(c.kernel), p, c, target)


def refuses_backward(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """The same for the backward."""
    return _reason(backward_module(c.kernel), p, c, target)


@functools.lru_cache(maxsize=4096)
def choose_forward(p: Problem, target: runtime.Target) -> AttentionConfig:
    """How that attention is computed on that target: the first of the preferred that is not refused."""
    for c in _forward(p, target):
        if refuses_forward(p, c, target) is None:
            return c
    return AttentionConfig("portable", 16, 16, 4, 1)


@functools.lru_cache(maxsize=4096)
def choose_backward(p: Problem, target: runtime.Target, portable: bool = False) -> AttentionConfig:
    """The same for its gradients; of the portable kernel where that is asked for."""
    if target.arch == "sm_90" and not portable:
        # Queries are walked 128 at a time where a head is short enough for their sums to stay in registers.
        c = AttentionConfig("hopper", 128 if p.head_dim <= 64 else 64, 128, 8, 2)
        if refuses_backward(p, c, target) is None:
            return c
    module = backward_module("portable")
    assert module is not None
    return module.default_config(p, target)


def _dim(p: Problem) -> int:
    return max(sum(parts(p.head_dim)), sum(parts(p.value_dim)))


def _rows(p: Problem, most: int) -> int:
    """As many as there are, rounded up, from 64 on: what a warpgroup multiplies at once."""
    return max(64, min(most, library.power_of_two(max(1, p.n_q))))


def _interpreted(p: Problem) -> AttentionConfig:
    """Few, large programs, and yet several steps of what is longer than 64 keys."""
    return AttentionConfig("portable", _rows(p, 64), 64, 4, 1)


def _forward(p: Problem, target: runtime.Target) -> Iterator[AttentionConfig]:
    if target is runtime.INTERPRETER:
        yield _interpreted(p)
        return
    dim = _dim(p)
    if target.arch == "sm_90" and p.n_q > 64:
        yield from _hopper(p, dim)
    if p.dtype.itemsize == 4:
        yield from _float32(p, dim, target)
        return
    # A mask takes a register and a half for each score of a thread: 32 of them leave room.
    wide = not (p.mask or p.alibi)
    rows = _rows(p, 128)
    warps = 8 if rows == 128 and (dim > 64 or not wide) else 4
    if target.warp_size == 64:  # a wave's registers are many, and its shared memory is little
        for m in (rows, 64, 32):
            yield AttentionConfig("portable", m, 32, 4, 1)
    if target.arch == "sm_90" and wide and rows == 128 and dim <= 128:  # on sm_100 it spills
        if dim <= 64:
            yield AttentionConfig("portable", 128, 128, 8, 3)
        yield AttentionConfig("portable", 128, 128, 8, 2)
    yield from _sized(rows, ((64, 3), (64, 2), (32, 2), (32, 1)), warps, p, target)
    yield from _sized(64, ((64, 2), (32, 2), (32, 1)), 4, p, target)
    yield from _sized(32, ((32, 1), (16, 1)), 4, p, target)


def _hopper(p: Problem, dim: int) -> Iterator[AttentionConfig]:
    """Three warpgroups for short heads, where tiles of 192 queries are many: one multiplies while two are in their
    softmax. On an H200 that is 1.18 of cuDNN at 8192 tokens, where two come to 0.98; two are ahead from 1024 tokens
    down, and by 3 % for 2048 causal ones."""
    if dim <= 64 and p.n_q >= (4096 if p.scoring.right == 0 else 2048):
        yield AttentionConfig("hopper", 192, 128, 12, 6)
    elif dim <= 128:
        yield AttentionConfig("hopper", 128, 128, 8, 6 if dim <= 64 else 4)
    else:
        yield AttentionConfig("hopper", 128, 64, 8, 2)


def _sized(
    rows: int, steps: tuple[tuple[int, int], ...], warps: int, p: Problem, target: runtime.Target
) -> Iterator[AttentionConfig]:
    """Tiles of so many rows, in steps of (keys, stages): of fewer keys where more would spill, as on sm_90."""
    more = bool(p.mask or p.alibi or p.scoring.softcap)
    most = 32 if (more or rows < 128) and ((rows < 128 and more) or _dim(p) > 128) else 64
    for keys, stages in steps:
        if keys <= most:
            yield AttentionConfig("portable", rows, keys, max(1, warps * 32 // target.warp_size), stages)


def _float32(p: Problem, dim: int, target: runtime.Target) -> Iterator[AttentionConfig]:
    """Products on the ordinary units, whose operands are in registers: few keys a step."""
    warps = max(1, 8 * 32 // target.warp_size)
    for rows, keys in ((64, 32 if dim <= 64 else 16), (32, 16)):
        yield AttentionConfig("portable", rows, keys, warps, 1)
