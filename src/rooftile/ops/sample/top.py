"""The k most likely tokens: each program finds those of one slice of a row, the last program of a row those of all.

Keys with their columns differ from one another, so a round takes the largest key that is below the previous one. No
list is sorted, and equal logits come in the order of their index. k is a number of the call: kernels differ in the
power of two at or above it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.parts import LOG2E, LOWEST, column_of, key_of, with_index
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip

NONE = tl.constexpr(-(2**63))  # below the key of -inf


@triton.jit(do_not_specialize=["slices", "k"])
def _top_kernel(
    x_ptr,
    tokens_ptr,
    logprobs_ptr,
    best_ptr,
    top_ptr,
    counters_ptr,
    stride_x,
    n_cols,
    slices,
    k,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0) // slices
    part = tl.program_id(0) % slices
    x_ptr += row.to(tl.int64) * stride_x
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    best_ptr += row.to(tl.int64) * slices * PLACES
    top_ptr += row.to(tl.int64) * slices * 2

    x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    key = tl.where(mask, with_index(key_of(x), cols), NONE)
    top = tl.maximum(tl.max(x, axis=0), LOWEST)
    total = tl.sum(tl.exp2((x - top) * LOG2E), axis=0)

    tl.store(top_ptr + 2 * part, top)
    tl.store(top_ptr + 2 * part + 1, total)
    for i in range(k):
        best = tl.max(key, axis=0)
        tl.store(best_ptr + part * PLACES + i, best)
        key = tl.where(key == best, NONE, key)

    if arrives_last(counters_ptr + row, slices):
        parts = tl.arange(0, SLICES)
        there = parts < slices
        tops = tl.load(top_ptr + 2 * parts, mask=there, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(top_ptr + 2 * parts + 1, mask=there, other=0.0, cache_modifier=".cg")
        places = tl.arange(0, SLICES * PLACES)
        found = (places < slices * PLACES) & (places % PLACES < k)
        bests = tl.load(best_ptr + places, mask=found, other=NONE, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp2((tops - top) * LOG2E), axis=0)
        at = row.to(tl.int64) * k
        for i in range(k):
            best = tl.max(bests, axis=0)
            bests = tl.where(bests == best, NONE, bests)
            token = column_of(best)
            x_of = tl.load(x_ptr + token).to(tl.float32)
            tl.store(tokens_ptr + at + i, token)
            tl.store(logprobs_ptr + at + i, (x_of - top) - tl.log(total))


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class TopConfig:
    """Columns of a slice, and the warps of the program that reads it."""

    block: int
    num_warps: int


MOST_SLICES = 128  # their best tokens are one tile


@functools.cache
def config(n_cols: int, target: runtime.Target) -> TopConfig:
    """As the greedy kernel; a vocabulary past 262144 has longer slices, and not more of them."""
    least = 4096 if target is runtime.INTERPRETER else 2048
    block = max(least, library.power_of_two(library.cdiv(n_cols, MOST_SLICES)))
    return TopConfig(block, num_warps=(4 if block <= 4096 else 16) * 32 // target.warp_size)


@functools.cache
def _launcher(dtype: torch.dtype, slices: int, places: int, c: TopConfig) -> launching.KernelLauncher:
    constants = {"BLOCK": c.block, "SLICES": slices, "PLACES": places}
    return launching.KernelLauncher(_top_kernel, constants, num_warps=c.num_warps)


def prepare(logits: Tensor, k: int) -> Callable[..., None]:
    """The launch over such logits, which are checked, to be called with outputs and them."""
    if any(isinstance(n, torch.SymInt) for n in logits.shape):
        raise launching.Untraceable("a grid that depends on the sizes")
    copies: library.Copies = {}
    rows = library.rows_of(logits, copies, 0)
    (n_rows, n_cols), device = rows.shape, logits.device
    c = config(n_cols, runtime.target(device))
    slices, places = library.cdiv(n_cols, c.block), library.power_of_two(k)
    start = launching.bind(
        _launcher(logits.dtype, library.power_of_two(slices), places, c),
        n_rows * slices,
        strides=(rows.stride(0), n_cols),
        numbers=(slices, k),
    )
    start = library.copying(start, copies)

    def run(tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        best = torch.empty(n_rows * slices * places, dtype=torch.int64, device=device)
        top = torch.empty(n_rows * slices * 2, dtype=torch.float32, device=device)
        start(logits, tokens, logprobs, best, top, launching.counters(n_rows, device))

    return run
