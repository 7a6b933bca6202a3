"""Before and after the Hopper backward's kernel: what it needs of the rows of queries, and dq out of its sum.

Before: delta = rowsum(dout * out) - dlse, which the softmax's gradient takes off every dp of its row, and lse times
log2(e); and dq's sum, where there is one, is cleared. After: dq out of the sum, scaled, in the dtype and strides that
it is asked for in.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library
from rooftile.ops.attention.scores import LOG2E

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_q", "heads"])
def _prepare_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    sums_ptr,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    n_q,
    heads,
    HAS_DLSE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
):
    """stats, (B * H, blocks, 2, ROWS): lse times log2(e), +inf for a row that sees nothing or is not there; delta."""
    n_blocks = tl.cdiv(n_q, ROWS)
    tile = tl.program_id(0).to(tl.int64)
    block = tl.program_id(0) % n_blocks
    flat = tile // n_blocks
    batch = flat // heads
    head = flat % heads
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < n_q
    rows = row.to(tl.int64)[:, None]
    cols = tl.arange(0, DIM)[None, :]
    mask = there[:, None] & (cols < N)

    if HAS_SUMS:  # no matrix here: its tiles have an order of their own, and all are zero
        sums = sums_ptr + tile * (ROWS * DIM) + tl.arange(0, ROWS * DIM)
        tl.store(sums, tl.zeros([ROWS * DIM], tl.float32))

    out = tl.load(out_ptr + batch * stride_ob + head * stride_oh + rows * stride_ot + cols, mask, other=0.0)
    dout = tl.load(dout_ptr + batch * stride_gb + head * stride_gh + rows * stride_gt + cols, mask, other=0.0)
    lse = tl.load(lse_ptr + flat * n_q + row, mask=there, other=float("-inf"))
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    if HAS_DLSE:
        dlse = dlse_ptr + batch * stride_lb + head * stride_lh + row.to(tl.int64) * stride_lt
        delta -= tl.load(dlse, mask=there, other=0.0).to(tl.float32)
    blind = lse == float("-inf")

    stats_ptr += tile * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(stats_ptr, tl.where(blind, float("inf"), lse * LOG2E))
    tl.store(stats_ptr + ROWS, tl.where(blind, 0.0, delta))


@triton.jit(do_not_specialize=["n_q", "heads"])
def _finish_kernel(
    sums_ptr,
    dq_ptr,
    stride_b,
    stride_h,
    stride_t,
    n_q,
    heads,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
):
    """A tile of 64 x 64 of dq, of the two that a block of queries has."""
    n_blocks = tl.cdiv(n_q, ROWS)
    place = tl.program_id(0).to(tl.int64)
    tile = place // 2
    part = place % 2
    flat = tile // n_blocks
    row = (tile % n_blocks) * ROWS + (part // (DIM // 64)) * 64 + tl.arange(0, 64)
    cols = (part % (DIM // 64)) * 64 + tl.arange(0, 64)

    sums = tl.load(sums_ptr + place * 4096 + tl.arange(0, 4096))
    # The kernel's order is that of its registers: (warps, columns / 8, rows in 8, columns in 8 / 2, rows / 8, pairs).
    dq = sums.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64) * SCALE

    dq_ptr += (flat // heads) * stride_b + (flat % heads) * stride_h
    mask = (row[:, None] < n_q) & (cols[None, :] < N)
    tl.store(dq_ptr + row[:, None] * stride_t + cols[None, :], dq.to(dq_ptr.dtype.element_ty), mask)


@functools.cache
def _prepare_plan(
    dtypes: tuple[torch.dtype | None, ...], has_sums: bool, rows: int, head_dim: int, dim: int
) -> launching.KernelLauncher:
    constants = {"HAS_DLSE": dtypes[2] is not None, "HAS_SUMS": has_sums, "ROWS": rows, "N": head_dim, "DIM": dim}
    return launching.KernelLauncher(_prepare_kernel, constants, num_warps=4)


@functools.cache
def _finish_plan(dtype: torch.dtype, scale: float, rows: int, head_dim: int, dim: int) -> launching.KernelLauncher:
    constants = {"SCALE": scale, "ROWS": rows, "N": head_dim, "DIM": dim}
    return launching.KernelLauncher(_finish_kernel, constants, num_warps=4)


def prepare(
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    stats: Tensor,
    sums: Tensor | None,
    rows: int,
    dim: int,
) -> None:
    """Fill stats, and clear dq's sum; out and dout (B, H, T, D) with a last stride of 1. dim is D, padded."""
    batch, heads, n_q, head_dim = out.shape
    dtypes = (out.dtype, dout.dtype, None if dlse is None else dlse.dtype)
    plan = _prepare_plan(dtypes, sums is not None, rows, head_dim, dim)
    strides = (*out.stride()[:3], *dout.stride()[:3], *(dlse.stride() if dlse is not None else (0, 0, 0)))
    programs = batch * heads * library.cdiv(n_q, rows)
    launching.launch(plan, programs, (out, dout, lse, dlse, stats, sums), strides, (n_q, heads))


def finish(sums: Tensor, dq: Tensor, scale: float, rows: int, dim: int) -> None:
    """dq (B, H, T, D), with a last stride of 1, out of its sum."""
    batch, heads, n_q, head_dim = dq.shape
    plan = _finish_plan(dq.dtype, scale, rows, head_dim, dim)
    programs = 2 * batch * heads * library.cdiv(n_q, rows)
    launching.launch(plan, programs, (sums, dq), dq.stride()[:3], (n_q, heads))
