"""The product of few rows of x and a weight of 8 or 4 bits, without shared memory: from the loads to the matrix unit.

The matrix unit's sums don't mind the order of k, as long as both operands have it. So a thread takes the k for which it
gives the matrix unit its first operand from 16 bytes that lie together, which one load brings, and dequantises them
where they are: 32 weights of int4 or 16 of int8, and nothing is exchanged between threads. x is read as often as there
are tiles of the weight, from the L1, in the same order.

A tile's rows are the weight's, 16 to a warp, and its columns the rows of x. `SLICES` warps share the rows of a tile,
each with blocks of K of its own; their sums meet once, at the end. A block of int4 is two groups, as in `skinny.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig
from rooftile.primitives.dequantize import INT4_BF16_WORD, INT4_FP16_WORD, INT8_BF16_WORD, INT8_FP16_WORD
from rooftile.primitives.gluon import keep_loads_before
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last
from rooftile.primitives.weights import block_scales, in_pairs

import triton  # isort: skip
import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.ampere import mma_v2  # isort: skip


_FOUR = gl.constexpr("=h,=h,=h,=h,r")
_EIGHT = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_BF16_4, _FP16_4 = gl.constexpr((gl.bfloat16,) * 4), gl.constexpr((gl.float16,) * 4)
_BF16_8, _FP16_8 = gl.constexpr((gl.bfloat16,) * 8), gl.constexpr((gl.float16,) * 8)


@gluon.jit
def _load(w_ptrs, step, LAST_BLOCK: gl.constexpr, block, SLICES: gl.constexpr, WORDS: gl.constexpr, wanted):
    """The words of a step's blocks; past the last block, those of the last."""
    at = gl.minimum(step * SLICES + block, LAST_BLOCK) * WORDS
    return (gl.load(w_ptrs + at, mask=wanted & (at >= 0), eviction_policy="evict_first"),)


@gluon.jit
def _scales(
    scale_ptr, rows, step, last_step, LAST_BLOCK: gl.constexpr, block, SLICES: gl.constexpr, GROUPS: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The scales of a step's blocks, in bounds."""
    at = gl.minimum(gl.minimum(step, last_step - 1) * SLICES + block, LAST_BLOCK)
    return (block_scales(scale_ptr, rows, at, GROUPS, PAIRS),)


@gluon.jit
def _bytes(a, b, c, d, LAYOUT: gl.constexpr):
    """The four numbers of each word, one after another. They are registers of their own: nothing moves."""
    y = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.convert_layout(y.reshape([a.shape[0], a.shape[1], a.shape[2] * 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def _int8_as(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    if DTYPE.is_bf16():
        a, b, c, d = gl.inline_asm_elementwise(INT8_BF16_WORD, _FOUR, [words], dtype=_BF16_4, is_pure=True, pack=1)
    else:
        a, b, c, d = gl.inline_asm_elementwise(INT8_FP16_WORD, _FOUR, [words], dtype=_FP16_4, is_pure=True, pack=1)
    return _bytes(a, b, c, d, LAYOUT)


@gluon.jit
def _int4_as(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The low nibbles of each byte, and the high ones, less 8."""
    if DTYPE.is_bf16():
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            INT4_BF16_WORD, _EIGHT, [words], dtype=_BF16_8, is_pure=True, pack=1
        )
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            INT4_FP16_WORD, _EIGHT, [words], dtype=_FP16_8, is_pure=True, pack=1
        )
    return _bytes(a, b, c, d, LAYOUT), _bytes(e, f, g, h, LAYOUT)


@gluon.jit(do_not_specialize=["n_rows", "n_cols"])
def _direct_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    stride_xm,
    stride_wn,
    n_rows,
    n_cols,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    PAIRS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SLICES: gl.constexpr,
    SPLIT: gl.constexpr,
    AHEAD: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    BYTES: gl.constexpr = BLOCK_K // 2 if GROUP > 0 else BLOCK_K
    BLOCKS: gl.constexpr = K // BLOCK_K
    STEPS: gl.constexpr = (BLOCKS + SLICES - 1) // SLICES
    EACH: gl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    EVEN: gl.constexpr = BLOCKS % SLICES == 0
    # Unrolled, what is on its way changes places without moves between registers.
    UNROLL: gl.constexpr = 1 if STEPS % SPLIT != 0 else 2 if EACH % 2 == 0 else 1
    GROUPS: gl.constexpr = K // GROUP if GROUP > 0 else 0
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WARPS_N: gl.constexpr = gl.num_warps() // SLICES
    # How many bytes of a row lie together in a thread, of the 2 x 4 such parts that a product is of.
    TOGETHER: gl.constexpr = 16 if BYTES >= 128 else BYTES // 8
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], instr_shape=[1, 16, 8])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, sums, TOGETHER // 4)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, TOGETHER)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, sums, TOGETHER)

    # Neighbours share a tile of the weight.
    row_tiles = gl.cdiv(n_rows, BLOCK_M)
    tile = gl.program_id(0) // SPLIT
    split = gl.program_id(0) % SPLIT
    first_m = (tile % row_tiles) * BLOCK_M
    first_n = (tile // row_tiles) * BLOCK_N
    first_step = split * EACH
    last_step = gl.minimum(first_step + EACH, STEPS)
    # What is past the last row is in bounds, and not stored.
    w_block = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, w_layout)))[:, None, None]
    w_rows = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, w_layout)))
    w_rows = gl.minimum(w_rows, n_cols - 1).to(gl.int64)[None, :, None]
    w_inner = gl.arange(0, BYTES // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, w_layout)))[None, None, :]
    w_ptrs = (w_ptr + w_rows * stride_wn).to(gl.pointer_type(gl.int32)) + w_inner
    x_block = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))[:, None, None]
    x_inner = gl.arange(0, BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))[None, :, None]
    x_rows = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))
    x_rows = gl.minimum(x_rows, n_rows - 1).to(gl.int64)[None, None, :]
    x_ptrs = x_ptr + x_rows * stride_xm + x_inner + x_block * BLOCK_K
    block = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None]
    rows = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums)))[None, :]
    rows = gl.minimum(rows, n_cols - 1).to(gl.int64)

    if PREFETCH >= 0:
        pdl_launch_dependents()
        LINES: gl.constexpr = triton.next_power_of_2(triton.cdiv(SLICES * BYTES, 128))
        lines_layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
        line_rows = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, lines_layout))
        line_ptrs = w_ptr + gl.minimum(line_rows, n_cols - 1).to(gl.int64)[:, None] * stride_wn
        lines = gl.arange(0, LINES, layout=gl.SliceLayout(0, lines_layout)) * 128
        for ahead in gl.static_range(PREFETCH):
            line = gl.minimum((first_step + ahead) * SLICES * BYTES + lines, BLOCKS * BYTES - 1)
            prefetch(line_ptrs + line[None, :])
        pdl_wait()

    # Weights and scales of the next steps are on their way while this one is multiplied.
    none = gl.zeros([SLICES, BLOCK_N, BLOCK_M], gl.float32, layout=sums)
    acc = none
    coming = ()
    scales = ()
    for ahead in gl.static_range(AHEAD):
        step = first_step + ahead
        coming += _load(w_ptrs, step, BLOCKS - 1, w_block, SLICES, BYTES // 4, step < last_step)
        if GROUP > 0:
            scales += _scales(scale_ptr, rows, step, last_step, BLOCKS - 1, block, SLICES, GROUPS, PAIRS)
    for base in range(first_step, last_step, UNROLL):
        for sub in gl.static_range(UNROLL):
            step = base + sub
            next_step = step + AHEAD
            coming += _load(w_ptrs, next_step, BLOCKS - 1, w_block, SLICES, BYTES // 4, next_step < last_step)
            if GROUP > 0:
                scales += _scales(scale_ptr, rows, next_step, last_step, BLOCKS - 1, block, SLICES, GROUPS, PAIRS)
            step = keep_loads_before(step)
            w = coming[0]
            coming = coming[1:]
            x_at = x_ptrs + step * (SLICES * BLOCK_K)
            inside = (step * SLICES + x_block < BLOCKS) & (x_rows >= 0)
            if GROUP > 0:
                if EVEN:
                    x = gl.load(x_at)
                    x_high = gl.load(x_at + BYTES)
                else:
                    x = gl.load(x_at, mask=inside & (x_inner >= 0), other=0.0)
                    x_high = gl.load(x_at + BYTES, mask=inside & (x_inner >= 0), other=0.0)
                scale, scale_high = scales[0]  # type: ignore[misc]  # it sees the tuple as it began
                scales = scales[1:]
                low, high = _int4_as(w, DTYPE, operand)
                acc += mma_v2(low, x, none) * scale[:, :, None]
                acc += mma_v2(high, x_high, none) * scale_high[:, :, None]
            else:
                if EVEN:
                    x = gl.load(x_at)
                else:
                    x = gl.load(x_at, mask=inside & (x_inner >= 0), other=0.0)
                acc = mma_v2(_int8_as(w, DTYPE, operand), x, acc)
    z = gl.sum(acc, axis=0)

    tile_layout: gl.constexpr = gl.SliceLayout(0, sums)
    tile_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, tile_layout))
    tile_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, tile_layout))
    if SPLIT > 1:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        part = partial_ptr + tile.to(gl.int64) * (SPLIT * SIZE) + tile_n[:, None] + tile_m[None, :] * BLOCK_N
        gl.store(part + split * SIZE, z)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=tile_layout)
        for s in gl.static_range(SPLIT):
            z += gl.load(part + s * SIZE, cache_modifier=".cg")
    m = first_m + tile_m
    n = first_n + tile_n
    if GROUP == 0:
        z *= gl.load(scale_ptr + n, mask=n < n_cols, other=0.0).to(gl.float32)[:, None]
    if HAS_BIAS:
        z += gl.load(bias_ptr + n, mask=n < n_cols, other=0.0).to(gl.float32)[:, None]
    mask = (m < n_rows)[None, :] & (n < n_cols)[:, None]
    out = out_ptr + m.to(gl.int64)[None, :] * n_cols + n[:, None]
    if HAS_RESIDUAL:
        residual = residual_ptr + m.to(gl.int64)[None, :] * n_cols + n[:, None]
        z += gl.load(residual, mask=mask, other=0.0).to(gl.float32)
    gl.store(out, z.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _plan(
    k: int, group: int, dtypes: tuple[torch.dtype | None, ...], pairs: str, c: WeightOnlyConfig
) -> launching.KernelLauncher:
    constants = {
        "K": k,
        "GROUP": group,
        "HAS_BIAS": dtypes[2] is not None,
        "HAS_RESIDUAL": dtypes[3] is not None,
        "PAIRS": pairs,
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "SLICES": c.slices,
        "SPLIT": c.split_k,
        "AHEAD": c.num_stages - 1,
        "PREFETCH": c.prefetch,
    }
    options = {"launch_pdl": True} if c.prefetch >= 0 else {}
    return launching.KernelLauncher(_direct_kernel, constants, num_warps=c.num_warps, **options)


def launch(
    x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, c: WeightOnlyConfig
) -> None:
    """Launch it: x (M, K), w int8 (N, K) or uint8 (N, K/2), out and residual (M, N); all but x and w are contiguous."""
    (n_rows, k), n_cols = x.shape, w.shape[0]
    group, pairs = 0, ""
    dtypes = (x.dtype, scale.dtype, *(None if t is None else t.dtype for t in (bias, residual)))
    if w.dtype == torch.uint8:
        group = int(k) // int(scale.shape[1])
        scale, pairs = in_pairs(scale)
    tiles = library.cdiv(n_rows, c.block_m) * library.cdiv(n_cols, c.block_n)
    partial = counters = None
    if c.split_k > 1:
        partial = torch.empty(tiles * c.split_k * c.block_n * c.block_m, dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    plan = _plan(int(k), group, dtypes, pairs, c)
    tensors = (x, w, scale, bias, residual, out, partial, counters)
    launching.launch(plan, tiles * c.split_k, tensors, (x.stride(0), w.stride(0)), (n_rows, n_cols))
