"""Gradients of parameters: a backward's programs keep a partial sum each, and one more kernel adds them up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_partials"])
def _sum_partials_kernel(
    partial_ptr, out_ptr, n_partials, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out = the sum of the programs' partial sums, always in the same order."""
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, n_partials, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        acc += tl.load(partial_ptr + rows * N + cols, mask=(rows < n_partials) & (cols < N), other=0.0)
    out = tl.sum(acc, axis=0, keep_dims=True)
    tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=cols < N)


@functools.cache
def _plan(n_cols: int, dtype: torch.dtype) -> launching.Plan:
    block = min(library.power_of_two(n_cols), 32 if n_cols <= 16384 else 64)
    return launching.Plan(_sum_partials_kernel, {"N": n_cols, "BLOCK_M": 32, "BLOCK_N": block}, num_warps=4)


def sum_partials(partial: Tensor, out: Tensor) -> None:
    """`out`, `(N,)`, becomes the sum over the rows of `partial`, `(programs, N)` float32, in a fixed order."""
    n_partials, n_cols = partial.shape[0], int(partial.shape[1])
    plan = _plan(n_cols, out.dtype)
    launching.launch(plan, library.cdiv(n_cols, plan.constants["BLOCK_N"]), (partial, out), (), (n_partials,))
