"""fp8_linear in tiles: any sizes, any strides, any GPU. A tile's sum can be split over several programs."""

from __future__ import annotations

import functools

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import fp8_common as common
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem
from rooftile.ops.gemm.fp8_common import (
    Key,
    exchange,
    multiply,
    operand,
    scaled,
    store,
    tile_of,
    w_scales,
    x_scales,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tiled_kernel(
    x_ptr,
    w_ptr,
    sx_ptr,
    sw_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_sxm,
    stride_sxk,
    stride_swn,
    stride_swk,
    n_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    FAST: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    PARTS: tl.constexpr = X_SCALE == "group" or W_SCALE == "block"
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    tile_m, tile_n = tile_of(tile, n_rows, N, GROUP_M, BLOCK_M, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies outside is read from the last row and never stored.
    inner_rows = tl.minimum(rows, n_rows - 1)
    inner_cols = tl.minimum(cols, N - 1)
    x_ptrs = x_ptr + inner_rows.to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_ptr + inner_cols.to(tl.int64)[None, :] * stride_wn

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(part * SHARE, tl.minimum(part * SHARE + SHARE, STEPS), num_stages=STAGES):
        first = step * BLOCK_K
        ks = first + tl.arange(0, BLOCK_K)
        x_at, w_at = x_ptrs + ks[None, :].to(tl.int64) * stride_xk, w_ptrs + ks[:, None].to(tl.int64) * stride_wk
        if K % BLOCK_K == 0:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            x, w = tl.load(x_at, mask=ks[None, :] < K, other=0.0), tl.load(w_at, mask=ks[:, None] < K, other=0.0)
        if PARTS:
            product = tl.dot(operand(x), operand(w))
            if X_SCALE == "group":
                product *= x_scales(sx_ptr, stride_sxm, stride_sxk, inner_rows, first, X_SCALE)[:, None]
            if W_SCALE == "block":
                sw = w_scales(sw_ptr, stride_swn, stride_swk, tile_n * BLOCK_N, inner_cols, first, W_SCALE, BLOCK_N)
                product *= sw if BLOCK_N <= 128 else sw[None, :]
            acc += product
        else:
            acc = multiply(x, w, acc, FAST, APART, BLOCK_K)

    mask = (rows[:, None] < n_rows) & (cols[None, :] < N)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    last = True
    if SPLIT > 1:
        size = n_rows.to(tl.int64) * N
        last, acc = exchange(acc, partial_ptr, counter_ptr + tile, part, at, mask, size, SPLIT)
    if last:
        scales = (sx_ptr, sw_ptr, stride_sxm, stride_swn)
        z = scaled(acc, x_ptr, bias_ptr, scales, inner_rows, inner_cols, X_SCALE, W_SCALE, True)
        store(z, residual_ptr, out_ptr, at, mask)


@functools.lru_cache(1024)
def _plan(key: Key, c: MatmulConfig) -> launching.KernelLauncher:
    constants = {**common.constants(key, c), "GROUP_M": c.group_m, "STAGES": c.num_stages}
    return launching.KernelLauncher(_tiled_kernel, constants, num_warps=c.num_warps)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't do it, or None."""
    if min(c.block_m, c.block_n) < 16:
        return f"block_m is {c.block_m} and block_n {c.block_n}, expected at least 16 each"
    return common.can_implement(p, c)


def launch(o: Operands, c: MatmulConfig) -> None:
    m, n = o.x.shape[0], o.w.shape[0]
    tiles = library.cdiv(m, c.block_m) * library.cdiv(n, c.block_n)
    partial, counter = common.split_memory(o, tiles, c)
    plan = _plan(common.plan_key(o), c)
    tensors = (*common.readable(o), o.x_scale, o.weight_scale, o.bias, o.residual, o.out, partial, counter)
    launching.launch(plan, tiles * c.split_k, tensors, (*o.x.stride(), *o.w.stride(), *common.scale_strides(o)), (m,))
