"""The token of the largest logit: each program reads one slice of a row, and the last program of a row combines them.

The length of a slice does not depend on the batch, so a row's results do not depend on the other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.parts import (
    LOG2E,
    LOWEST,
    Parameters,
    Tables,
    finish,
    given,
    key_of,
    load_logits,
    strides_of,
    with_index,
)
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["slices", "penalty", "presence", "frequency"])
def _greedy_kernel(
    x_ptr,
    seen_ptr,
    allowed_ptr,
    bias_ptr,
    counts_ptr,
    penalty_ptr,
    presence_ptr,
    frequency_ptr,
    tokens_ptr,
    logprobs_ptr,
    best_ptr,
    top_ptr,
    counters_ptr,
    stride_x,
    stride_s,
    stride_a,
    stride_b,
    stride_c,
    n_cols,
    slices,
    penalty: tl.float32,
    presence: tl.float32,
    frequency: tl.float32,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    row = tl.program_id(0) // slices
    part = tl.program_id(0) % slices
    at = row.to(tl.int64)
    logits = (
        x_ptr + at * stride_x,
        seen_ptr + at * stride_s if seen_ptr is not None else None,
        allowed_ptr + at * stride_a if allowed_ptr is not None else None,
        bias_ptr + at * stride_b if bias_ptr is not None else None,
        counts_ptr + at * stride_c if counts_ptr is not None else None,
        given(penalty_ptr, penalty, row),
        given(presence_ptr, presence, row),
        given(frequency_ptr, frequency, row),
    )
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    x, z = load_logits(logits, cols, mask)

    # Ties at -inf: the columns outside the row come last.
    best = tl.max(with_index(key_of(z), cols), axis=0)
    top = tl.maximum(tl.max(x, axis=0), LOWEST)
    total = tl.sum(tl.exp2((x - top) * LOG2E), axis=0)

    best_ptr += row.to(tl.int64) * slices
    top_ptr += row.to(tl.int64) * slices * 2
    tl.store(best_ptr + part, best)
    tl.store(top_ptr + 2 * part, top)
    tl.store(top_ptr + 2 * part + 1, total)
    if arrives_last(counters_ptr + row, slices):
        parts = tl.arange(0, SLICES)
        there = parts < slices
        bests = tl.load(best_ptr + parts, mask=there, other=-(2**63), cache_modifier=".cg")
        tops = tl.load(top_ptr + 2 * parts, mask=there, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(top_ptr + 2 * parts + 1, mask=there, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp2((tops - top) * LOG2E), axis=0)
        finish(row, tl.max(bests, axis=0), logits, tokens_ptr, logprobs_ptr, top, total, WRITES)


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class GreedyConfig:
    """Columns of a slice, and the warps of the program that reads it."""

    block: int
    num_warps: int


@functools.cache
def config(target: runtime.Target) -> GreedyConfig:
    """Two loads of 16 bytes a thread in 16 bits: a vocabulary of 128256 is 63 programs."""
    if target is runtime.INTERPRETER:
        return GreedyConfig(4096, num_warps=4)
    return GreedyConfig(2048, num_warps=4 * 32 // target.warp_size)


@functools.cache
def _launcher(
    dtypes: tuple[torch.dtype | None, ...], writes: bool, slices: int, early: bool, c: GreedyConfig
) -> launching.KernelLauncher:
    constants = {"WRITES": writes, "BLOCK": c.block, "SLICES": slices, "EARLY": early}
    return launching.KernelLauncher(_greedy_kernel, constants, num_warps=c.num_warps, **pdl.options(early))


def prepare(
    tokens: Tensor, logprobs: Tensor, logits: Tensor, tables: Tables, how: Parameters, writes: bool
) -> Callable[..., None]:
    """The launch over such tensors, which are checked, to be called with them. `tables` has those that are used."""
    copies: library.Copies = {}
    rows = library.rows_of(logits, copies, 0)
    (n_rows, n_cols), device = rows.shape, logits.device
    c = config(runtime.target(device))
    slices = library.cdiv(n_cols, c.block)
    penalties = how.penalties
    of_rows = [x if isinstance(x, Tensor) else None for x in penalties]
    for i, x in enumerate(of_rows):
        library.contiguous_of(x, copies, 5 + i)
    tensors = (logits, tokens, tables.seen, tables.mask, tables.logit_bias, tables.counts, *of_rows)
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    start = launching.bind(
        _launcher(dtypes, writes, library.power_of_two(slices), pdl.early(logits), c),
        n_rows * slices,
        strides=(rows.stride(0), *strides_of(tables, copies, 1), n_cols),
        numbers=(slices, *(0.0 if isinstance(x, Tensor) else x for x in penalties)),
    )
    start = library.copying(start, copies)

    def run(tokens: Tensor, logprobs: Tensor, logits: Tensor, tables: Tables, how: Parameters) -> None:
        best = torch.empty(n_rows * slices, dtype=torch.int64, device=device)
        top = torch.empty(n_rows * slices * 2, dtype=torch.float32, device=device)
        of_rows = [x if isinstance(x, Tensor) else None for x in how.penalties]
        counters = launching.counters(n_rows, device)
        changes = (tables.seen, tables.mask, tables.logit_bias, tables.counts)
        start(logits, *changes, *of_rows, tokens, logprobs, best, top, counters)

    return run
