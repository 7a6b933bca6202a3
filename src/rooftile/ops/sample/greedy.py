"""The token of the largest logit: a program looks at one slice of a row, the last of a row puts the slices together.

Slices are of one length whatever the batch is, so a row's results do not depend on what stands beside it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.choose import Greedy, greedy
from rooftile.ops.sample.common import LOG2E, LOWEST, finish, given, key_of, load_logits, with_index
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["penalty", "slices"])
def _greedy_kernel(
    x_ptr,
    seen_ptr,
    penalty_ptr,
    tokens_ptr,
    logprobs_ptr,
    best_ptr,
    top_ptr,
    counters_ptr,
    stride_x,
    stride_s,
    n_cols,
    slices,
    penalty: tl.float32,
    WRITES_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    row = tl.program_id(0) // slices
    part = tl.program_id(0) % slices
    x_ptr += row.to(tl.int64) * stride_x
    if seen_ptr is not None:
        seen_ptr += row.to(tl.int64) * stride_s
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    x, z = load_logits(x_ptr, seen_ptr, cols, mask, given(penalty_ptr, penalty, row))

    # -inf outside of the row comes after every -inf inside of it.
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
        finish(row, tl.max(bests, axis=0), x_ptr, seen_ptr, tokens_ptr, logprobs_ptr, top, total, WRITES_SEEN)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], writes_seen: bool, slices: int, early: bool, c: Greedy
) -> launching.KernelLauncher:
    constants = {"WRITES_SEEN": writes_seen, "BLOCK": c.block, "SLICES": slices, "EARLY": early}
    return launching.KernelLauncher(_greedy_kernel, constants, num_warps=c.num_warps, **pdl.options(early))


def launch(
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    seen: Tensor | None,
    penalty: Tensor | float,
    writes_seen: bool,
) -> None:
    """Of tensors that were checked; a `seen` that is neither read nor written is None."""
    logits = library.as_rows(logits)
    n_rows, n_cols = logits.shape
    c = greedy(runtime.target(logits.device))
    slices = library.cdiv(n_cols, c.block)
    best = torch.empty(n_rows * slices, dtype=torch.int64, device=logits.device)
    top = torch.empty(n_rows * slices * 2, dtype=torch.float32, device=logits.device)
    counters = launching.counters(n_rows, logits.device)
    of_row, number = (penalty, 1.0) if isinstance(penalty, Tensor) else (None, penalty)
    dtypes = (
        logits.dtype,
        tokens.dtype,
        None if seen is None else seen.dtype,
        None if of_row is None else of_row.dtype,
    )
    launching.launch(
        _plan(dtypes, writes_seen, library.power_of_two(slices), pdl.early(logits), c),
        n_rows * slices,
        (logits, seen, of_row, tokens, logprobs, best, top, counters),
        (logits.stride(0), 0 if seen is None else seen.stride(0), n_cols),
        (slices, number),  # type: ignore[arg-type]
    )
