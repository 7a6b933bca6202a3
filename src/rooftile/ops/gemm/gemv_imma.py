"""GEMV with an int8 or int4 weight on the integer tensor cores (IMMA), with x in three digits of 8 bits.

    z = x @ weight^T, or rms_norm(x) @ weight^T;   then an epilogue:
    "linear"    out = z * scale + bias + residual
    "gated"     out = act(g) * u + residual,   [g | u] = z * scale + bias
    "qkv"       q, k, v = z * scale + bias;    q and k are rotated, k and v written into the cache

    x[k] = (65536 d2[k] + 256 d1[k] + d0[k]) * unit[k // 128],   unit = max |x| of those 128 elements / 2^21

Elements of 8 bits are multiplied as they were loaded. Those of 4 bits become 8 bits by three instructions for eight:
0.8 instructions an element with everything. A conversion to float32 and a sum take 3.9, more than an H200 has time for
at 4 bits (`primitives/dequantize.py`). The tensor core multiplies a tile of the weight by eight columns, three of which
are x's digits. Its sums of 128 products are integers, and exact. Each becomes float32, is multiplied by the unit and
the group's scale, and is added up there. So x has 22 bits of the largest of its 128 elements. That is more than an
element of 16 bits has, and all bits of the elements that are at least 2^-14 of the largest in bfloat16, 2^-11 in
float16. A largest below 1e-30 counts as 1e-30.

A CTA first makes the digits of its part of x in shared memory, while its first weights are in flight. Then each warp
multiplies rows of its own, from registers that it loaded. The tensor core's sums don't depend on the order of k, as
long as both operands have the same: so a thread takes the k of its part of the first operand from 16 bytes that lie
together. `SLICES` warps share the rows of a tile, each with other blocks of K; their sums are added once, at the end.

With a norm x is multiplied by the norm's weight before it is split into digits, and sums by rstd: a CTA adds up the
squares of its part of x. Where several CTAs share a tile (`SPLIT`), the last one adds their sums in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MOST_IMMA_BLOCKS, GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.gemv_epilogue import (
    CONSTANTS,
    NO_QKV,
    QkvOutput,
    load_angles_of,
    rotate_and_store,
    scale_and_shift,
)
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.assembly import assembly
from rooftile.primitives.gluon import keep_loads_before, view_as
from rooftile.primitives.paging import locate_tokens
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.splitk import arrives_last, workspace
from rooftile.primitives.weights import block_scales, view_in_pairs

import triton  # isort: skip
import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.ampere import mma_v2  # isort: skip

# Elements of x that share a unit, and bytes of a row of the weight that are multiplied at a time, a block: 128 elements
# of 8 bits, or two groups of 128 of 4 bits, the first in the low nibbles and the second in the high ones.
BLOCK = gl.constexpr(128)

# The bytes of four integers, one after another: the third of each, the second, the first. The integers are 0x8080 too
# large, so that all three are signed.
_DIGITS = assembly(
    """{
    .reg .b32 p, q, r, s;
    prmt.b32 p, $3, $4, 0x5140;
    prmt.b32 q, $5, $6, 0x5140;
    prmt.b32 r, $3, $4, 0x0062;
    prmt.b32 s, $5, $6, 0x0062;
    prmt.b32 $0, r, s, 0x5410;
    prmt.b32 r, p, q, 0x7632;
    prmt.b32 s, p, q, 0x5410;
    xor.b32 $1, r, 0x80808080;
    xor.b32 $2, s, 0x80808080;
}"""
)
# Sixteen times (nibble - 8), for the low nibbles and the high ones: (byte & 0xf0) ^ 0x80 is one instruction where 0x80
# is in a register.
_NIBBLES = assembly(
    """{
    .reg .b32 low, flip;
    mov.b32 flip, 0x80808080;
    shl.b32 low, $2, 4;
    lop3.b32 $0, low, 0xf0f0f0f0, flip, 0x6a;
    lop3.b32 $1, $2, 0xf0f0f0f0, flip, 0x6a;
}"""
)
_THREE_BYTES, _TWO_BYTES = gl.constexpr((gl.int8,) * 3), gl.constexpr((gl.int8,) * 2)


@gluon.constexpr_function
def _layout_of_sums(warps, slices):
    """The layout of sums (slices, rows of the weight, columns), and of the tensor core's operands."""
    return gl.NVMMADistributedLayout([2, 0], [slices, warps // slices, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _layout_of_weights(warps, slices):
    return gl.DotOperandLayout(0, _layout_of_sums(warps, slices), 16)


@gluon.constexpr_function
def _layout_of_columns(warps, is_qkv):
    """The layout of a tile's columns of the result (qkv: pairs, of which both elements are stored)."""
    if is_qkv:
        return gl.SliceLayout(1, gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0]))
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def _blocks_of(k, group):
    """Blocks of a row of the weight."""
    return k // (BLOCK.value * (2 if group else 1))


@gluon.constexpr_function
def _steps_of(k, group, slices, split):
    """Blocks that each warp multiplies, one after another. Past the last block of a row x's digits are zero."""
    return triton.cdiv(k // (BLOCK.value * (2 if group else 1)), slices * split)


@gluon.jit
def _row_of_weight(
    row, first, n_cols, EPILOGUE: gl.constexpr, HEAD_DIM: gl.constexpr, APART: gl.constexpr
):  # fmt: skip
    """The row of the weight for row `row` of the tile whose first column (qkv: pair) is `first`, in bounds.

    Two rows that belong together are 8 apart in a tile: eight first ones, their second ones, and so on. So a thread has
    the sums of both.
    """
    if EPILOGUE == "linear":
        return gl.minimum(first + row, n_cols - 1)
    else:
        col, second = row // 16 * 8 + row % 8, row // 8 % 2
        col = gl.minimum(first + col, n_cols - 1)
        if EPILOGUE == "gated":
            return col + second * n_cols
        else:
            return col // (HEAD_DIM // 2) * HEAD_DIM + col % (HEAD_DIM // 2) + second * APART


@gluon.jit
def _unzip(z, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums of a tile's first rows, and of its second rows."""
    a, b = z.reshape([COLS // 8, 2, 8]).permute([0, 2, 1]).split()
    return gl.convert_layout(a.reshape([COLS]), LAYOUT), gl.convert_layout(b.reshape([COLS]), LAYOUT)


@gluon.jit
def _blocks(first, K: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr, SLICES: gl.constexpr, LIKE: gl.constexpr):
    """The block of each slice from that of the first one on; past the last, the last."""
    block = first + gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LIKE)))
    if EVEN:
        return block
    else:
        return gl.minimum(block, _blocks_of(K, GROUP) - 1)


@gluon.jit
def _load_weights(
    w_ptr, rows, split, step: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr,
    SPLIT: gl.constexpr, stride_wn,
):  # fmt: skip
    """The weights of a step, in a tuple."""
    STEPS: gl.constexpr = _steps_of(K, GROUP, SLICES, SPLIT)
    EVEN: gl.constexpr = _blocks_of(K, GROUP) == STEPS * SLICES * SPLIT
    layout: gl.constexpr = _layout_of_weights(gl.num_warps(), SLICES)
    block = _blocks((split * STEPS + step) * SLICES, K, GROUP, EVEN, SLICES, layout)
    inner = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    w_rows = w_ptr + rows.to(gl.int64)[None, :, None] * stride_wn
    return (gl.load(w_rows + (block * BLOCK)[:, None, None] + inner[None, None, :], eviction_policy="evict_first"),)


@gluon.jit
def _load_scales(
    scale_ptr, rows, split, step: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr,
    SLICES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The scales of a step's low nibbles and of its high ones, in a tuple; an empty one for 8 bits."""
    if GROUP > 0:
        STEPS: gl.constexpr = _steps_of(K, GROUP, SLICES, SPLIT)
        EVEN: gl.constexpr = _blocks_of(K, GROUP) == STEPS * SLICES * SPLIT
        layout: gl.constexpr = _layout_of_sums(gl.num_warps(), SLICES)
        block = _blocks((split * STEPS + step) * SLICES, K, GROUP, EVEN, SLICES, layout)
        return (block_scales(scale_ptr, rows.to(gl.int64)[None, :], block[:, None], K // GROUP, PAIRS),)
    else:
        return ((),)


@gluon.jit
def _load_first_weights(
    w_ptr, rows, split, K: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr,
    AHEAD: gl.constexpr, stride_wn,
):  # fmt: skip
    """The weights of the first AHEAD steps, a tuple."""
    coming = ()
    for step in gl.static_range(AHEAD):
        if step < _steps_of(K, GROUP, SLICES, SPLIT):
            coming += _load_weights(w_ptr, rows, split, step, K, GROUP, SLICES, SPLIT, stride_wn)
    return coming


@gluon.jit
def _digits(y):
    """The digits of each element of y `(N, 128)`, as eight columns `(N, 8, 128)` of which the first, the third and the
    fifth count, and the units `(N,)`."""
    # As integers, of which a NaN is the largest.
    largest = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(gl.float32, bitcast=True)
    unit = gl.where(largest < 1e-30, 1e-30, largest) * (1.0 / 2097152.0)  # the reciprocal is finite
    # 1.5 * 2^23 added: the last bit is worth 1, and the bits are the integer and a constant.
    bits = (y * (1.0 / unit)[:, None] + 12582912.0).to(gl.int32, bitcast=True)
    d2, d1, d0 = gl.inline_asm_elementwise(
        _DIGITS, "=r,=r,=r,r,r,r,r", [bits + (0x8080 - 0x4B400000)], dtype=_THREE_BYTES, is_pure=True, pack=4
    )
    four = gl.join(gl.join(d2, d0), gl.join(d1, d0))
    eight = gl.join(four, four).reshape([y.shape[0], y.shape[1], 8])
    return eight.permute([0, 2, 1]), unit


@gluon.jit
def _store_digits(
    x_ptr, norm_ptr, digits, units, split, STEPS: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    HAS_NORM: gl.constexpr, OFFSET: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Fill shared memory with the digits and the units of this part of x; with a norm, give the sum of its squares.

    In the order in which they are multiplied: all low nibbles' blocks, then all high ones'.
    """
    BLOCKS_OF_X: gl.constexpr = 2 if GROUP > 0 else 1  # beside a block of the weight
    ROUNDS: gl.constexpr = digits.shape[0]
    EACH: gl.constexpr = digits.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    inner = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    squares = gl.zeros([EACH], gl.float32, layout=gl.SliceLayout(1, layout))
    for r in range(ROUNDS):
        place = r * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(1, layout))
        step = place // SLICES
        block = (split * STEPS + step % STEPS) * SLICES + place % SLICES
        block = block * BLOCKS_OF_X + step // STEPS
        inside = ((step < BLOCKS_OF_X * STEPS) & (block < K // BLOCK))[:, None] & (inner >= 0)
        columns = block[:, None] * BLOCK + inner
        y = gl.load(x_ptr + columns, mask=inside, other=0.0).to(gl.float32)
        if HAS_NORM:
            squares += gl.sum(y * y, axis=1)
            norm = gl.load(norm_ptr + columns, mask=inside, other=0.0).to(gl.float32)
            if OFFSET != 0:
                norm += OFFSET
            y *= norm
        eight, unit = _digits(y)
        digits.index(r).store(eight)
        units.index(r).store(unit)
    return gl.sum(squares, axis=0)


@gluon.jit
def _worth(COLUMNS_OF: gl.constexpr, GROUP: gl.constexpr):
    """The factor of each column's sums."""
    column = gl.arange(0, 8, layout=COLUMNS_OF)
    worth = gl.where(column == 0, 65536.0, gl.where(column == 2, 256.0, gl.where(column == 4, 1.0, 0.0)))
    if GROUP > 0:
        worth *= 1.0 / 16.0
    return worth


@gluon.jit(do_not_specialize=["n_cols", "capacity", "n_pages", "n_angles"])
def gemv_imma_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, starts_ptr, counts_ptr, table_ptr,
    stride_wn,
    stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, stride_ct, stride_st,
    n_cols, capacity, n_pages, n_angles,
    K: gl.constexpr, EPILOGUE: gl.constexpr, EPS: gl.constexpr, OFFSET: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_NORM: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    APART: gl.constexpr, PAGE: gl.constexpr, HAS_COUNTS: gl.constexpr, BY_POSITION: gl.constexpr, BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr, SPLIT: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr, CONSTANT_WEIGHT: gl.constexpr,
):  # fmt: skip
    IS_QKV: gl.constexpr = EPILOGUE == "qkv"
    TWO: gl.constexpr = EPILOGUE != "linear"  # sets of the weight's rows
    COLS: gl.constexpr = BLOCK_N // 2 if TWO else BLOCK_N
    STEPS: gl.constexpr = _steps_of(K, GROUP, SLICES, SPLIT)
    weights_layout: gl.constexpr = _layout_of_weights(gl.num_warps(), SLICES)
    sums_layout: gl.constexpr = _layout_of_sums(gl.num_warps(), SLICES)
    flat: gl.constexpr = _layout_of_columns(gl.num_warps(), IS_QKV)
    if IS_QKV:
        N: gl.constexpr = (Q_HEADS + 2 * KV_HEADS) * (HEAD_DIM // 2)
    else:
        N = n_cols
    tile = gl.program_id(0) // SPLIT
    split = gl.program_id(0) % SPLIT
    loaded_rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, weights_layout)))
    summed_rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums_layout)))
    loaded_rows = _row_of_weight(loaded_rows, tile * COLS, N, EPILOGUE, HEAD_DIM, APART)
    summed_rows = _row_of_weight(summed_rows, tile * COLS, N, EPILOGUE, HEAD_DIM, APART)

    if EARLY and HAS_NORM:
        pdl_launch_dependents()
    if EARLY and not CONSTANT_WEIGHT:
        # The previous kernel may have written the weight. To prefetch it here took 12.1 us for int8 4096 x 4096 on an
        # H100, 7.4 without, since the loads then wait for the prefetches.
        pdl_wait()
    coming = _load_first_weights(w_ptr, loaded_rows, split, K, GROUP, SLICES, SPLIT, AHEAD, stride_wn)
    if EARLY and CONSTANT_WEIGHT:
        pdl_wait()

    # Loaded now: at the end a CTA would wait for them with no other load in flight.
    col = tile * COLS + gl.arange(0, COLS, layout=flat)
    inside = col < N
    row = gl.minimum(col, N - 1)
    if IS_QKV:
        head = row // (HEAD_DIM // 2)
        first = row % (HEAD_DIM // 2)
        row = head * HEAD_DIM + first
        apart = APART
    else:
        apart = n_cols
    scale, other_scale, bias, other_bias = 0.0, 0.0, 0.0, 0.0
    if GROUP == 0:
        scale = gl.load(scale_ptr + row).to(gl.float32)
        if TWO:
            other_scale = gl.load(scale_ptr + row + apart).to(gl.float32)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + row).to(gl.float32)
        if TWO:
            other_bias = gl.load(bias_ptr + row + apart).to(gl.float32)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + row).to(gl.float32)
    if IS_QKV:
        exists, position, page, line, written = locate_tokens(
            starts_ptr, counts_ptr, table_ptr, 0, 0, row.to(gl.int64) * 0, 1, capacity, n_pages, HAS_COUNTS, PAGE
        )
        cos, sin = load_angles_of(
            cos_ptr, sin_ptr, exists, position, first, stride_ct, stride_st, n_angles, BY_POSITION
        )  # fmt: skip

    # Sixteen bytes of a column lie together, and those of two columns a phase apart: no two lanes use one bank.
    BLOCKS_OF_X: gl.constexpr = 2 if GROUP > 0 else 1  # beside a block of the weight
    EACH: gl.constexpr = 4 * gl.num_warps()  # blocks that become digits at a time, sixteen elements to a thread
    ROUNDS: gl.constexpr = (BLOCKS_OF_X * STEPS * SLICES + EACH - 1) // EACH
    digits_layout: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, order=[2, 1, 0])
    units_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    digits = gl.allocate_shared_memory(gl.int8, [ROUNDS, EACH, 8, BLOCK], digits_layout)
    units = gl.allocate_shared_memory(gl.float32, [ROUNDS, EACH], units_layout)
    scales = ()
    for ahead in gl.static_range(AHEAD):
        if ahead < STEPS:
            scales += _load_scales(scale_ptr, summed_rows, split, ahead, K, GROUP, PAIRS, SLICES, SPLIT)
    total = _store_digits(x_ptr, norm_ptr, digits, units, split, STEPS, K, GROUP, HAS_NORM, OFFSET, SLICES)

    x_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 16)
    units_of: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums_layout))
    digits = view_as(digits, [ROUNDS * EACH // SLICES, SLICES, 8, BLOCK], digits)
    units = view_as(units, [ROUNDS * EACH // SLICES, SLICES], units)
    none = gl.zeros([SLICES, BLOCK_N, 8], gl.int32, layout=sums_layout)
    acc = gl.zeros([SLICES, BLOCK_N, 8], gl.float32, layout=sums_layout)
    # All steps one after another: in a loop each byte in flight would have a register of its own.
    for step in gl.static_range(STEPS):
        if step + AHEAD < STEPS:
            coming += _load_weights(w_ptr, loaded_rows, split, step + AHEAD, K, GROUP, SLICES, SPLIT, stride_wn)
            scales += _load_scales(scale_ptr, summed_rows, split, step + AHEAD, K, GROUP, PAIRS, SLICES, SPLIT)
        at = keep_loads_before(split * 0 + step)
        w, group_scale = coming[0], scales[0]  # type: ignore[misc]  # it sees the tuples as they began
        coming, scales = coming[1:], scales[1:]
        x = digits.index(at).permute([0, 2, 1]).load(x_layout)
        unit = units.index(at).load(units_of)[:, None]
        if GROUP > 0:
            x_high = digits.index(STEPS + at).permute([0, 2, 1]).load(x_layout)
            unit_high = units.index(STEPS + at).load(units_of)[:, None]
            low, high = gl.inline_asm_elementwise(
                _NIBBLES, "=r,=r,r", [w], dtype=_TWO_BYTES, is_pure=True, pack=4
            )  # fmt: skip
            acc += mma_v2(low, x, none).to(gl.float32) * (group_scale[0] * unit)[:, :, None]
            acc += mma_v2(high, x_high, none).to(gl.float32) * (group_scale[1] * unit_high)[:, :, None]
        else:
            acc += mma_v2(w, x, none).to(gl.float32) * unit[:, :, None]
    worth = _worth(gl.SliceLayout(0, gl.SliceLayout(1, sums_layout)), GROUP)
    z = gl.sum(gl.sum(acc * worth[None, None, :], axis=2), axis=0)

    # What follows a GEMV without a norm may be a gated one, of few CTAs that stay long: launched while this one's CTAs
    # run, several would come to lie on one SM and none on another. In Llama-3-8B's step with int4 that cost 530 us of
    # 2070; to launch it when this one has ended, 110 of 1650.
    if EARLY and not HAS_NORM:
        pdl_launch_dependents()
    if TWO:
        z, other_z = _unzip(z, COLS, flat)
    else:
        z = gl.convert_layout(z, flat)

    if SPLIT > 1:
        # The parts' sums, and after those of all CTAs their sums of squares.
        sums = partial_ptr + tile.to(gl.int64) * (SPLIT * BLOCK_N) + gl.arange(0, COLS, layout=flat)
        totals = partial_ptr + gl.num_programs(0).to(gl.int64) * BLOCK_N + tile.to(gl.int64) * SPLIT
        gl.store(sums + split * BLOCK_N, z)
        if TWO:
            gl.store(sums + split * BLOCK_N + COLS, other_z)
        if HAS_NORM:
            gl.store(totals + split, total)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = gl.zeros([COLS], gl.float32, layout=flat)
        if TWO:
            other_z = gl.zeros([COLS], gl.float32, layout=flat)
        total = 0.0
        for s in gl.static_range(SPLIT):
            z += gl.load(sums + s * BLOCK_N, cache_modifier=".cg")
            if TWO:
                other_z += gl.load(sums + s * BLOCK_N + COLS, cache_modifier=".cg")
            if HAS_NORM:
                total += gl.load(totals + s, cache_modifier=".cg")

    rstd = 1.0
    if HAS_NORM:
        rstd = gl.rsqrt(total / K + EPS)
    # q, k and v are rounded before they are rotated, too.
    ROUNDED: gl.constexpr = out_ptr.dtype.element_ty if IS_QKV else gl.float32
    z = scale_and_shift(z, rstd, scale, bias, HAS_NORM, GROUP == 0, HAS_BIAS, ROUNDED)
    if TWO:
        other_z = scale_and_shift(other_z, rstd, other_scale, other_bias, HAS_NORM, GROUP == 0, HAS_BIAS, ROUNDED)
    if IS_QKV:
        rotate_and_store(
            z, other_z, cos, sin, out_ptr, k_cache_ptr, v_cache_ptr, head, first, inside, exists, page, line, written,
            stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, KV_HEADS, HEAD_DIM, APART,
        )  # fmt: skip
    else:
        if TWO:
            z = activate(z, ACTIVATION) * other_z
        if HAS_RESIDUAL:
            z += residual
        gl.store(out_ptr + col, z.to(out_ptr.dtype.element_ty), mask=col < n_cols)


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute that problem so; None where it can."""
    if p.weight == "fp8":
        return "kernel 'gemv_imma' takes weights of int8 and int4"
    if not target.arch.startswith("sm_"):
        return f"kernel 'gemv_imma' is for NVIDIA's GPUs, not {target.arch}"
    if runtime.PORTABLE:
        return f"kernel 'gemv_imma' is in Gluon, and {target.why_no_gluon}"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"kernel 'gemv_imma' takes float16 and bfloat16, not {p.dtype}"
    if p.offsets:
        return "kernel 'gemv_imma' takes no offsets of groups"
    if p.weight == "int4" and p.group != 128:
        return f"kernel 'gemv_imma' takes groups of 128, not of {p.group}"
    block_k = 256 if p.group else 128
    if c.block_k != block_k:
        return f"block_k is {c.block_k}, expected {block_k} for kernel 'gemv_imma'"
    if c.prefetch is not None and c.prefetch > 0:
        return f"prefetch is {c.prefetch}, expected -1 or 0 for kernel 'gemv_imma'"
    if p.m != 1:
        return f"kernel 'gemv_imma' takes one row of x, not {p.m}"
    if p.w_layout != "k" or not p.w_aligned:
        return "kernel 'gemv_imma' takes a weight whose rows are contiguous and begin at multiples of 16 bytes"
    if p.k % c.block_k:
        return f"kernel 'gemv_imma' takes a K that is a multiple of block_k, not {p.k} with block_k={c.block_k}"
    steps = library.cdiv(p.k // c.block_k, c.slices * c.split_k)
    if steps > MOST_IMMA_BLOCKS:
        return f"slices x split_k is {c.slices * c.split_k}: a warp has {steps} blocks, at most {MOST_IMMA_BLOCKS}"
    # Eight columns of a byte, and units in float32, for each element of x that a CTA multiplies, by rounds.
    blocks = 4 * c.num_warps
    rounds = library.cdiv(steps * c.slices * (2 if p.group else 1), blocks)
    most = rounds * blocks * (8 * 128 + 4) + 1024
    if most > target.shared_memory:
        return f"x's digits take {most} bytes of shared memory, a CTA has {target.shared_memory} on this GPU"
    # A block of the weight: 128 bytes of each row, of 4 elements to a register.
    registers = c.block_n * c.slices // c.num_warps * (c.num_stages + 2)
    if registers > 128:
        return f"its tiles take some {registers} registers a thread for kernel 'gemv_imma', expected at most 128"
    return None


def prepare(o: Operands, c: GemmConfig, qkv: QkvOutput = NO_QKV) -> Start:
    """For one row of x, `(1, K)`; all operands but w are contiguous.

    With `qkv` out is q, `(1, 1, Hq, D)`, and half of `c`'s rows make a CTA's pairs. The start then takes `qkv.tensors`
    after its other arguments.
    """
    x, w, scale, device = o.x, o.w, o.weight_scale, o.w.device
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("a kernel of Gluon")
    assert scale is not None, "the weight is quantized"
    epilogue = "qkv" if qkv is not NO_QKV else "gated" if o.gated else "linear"
    halved = 1 if epilogue == "linear" else 2
    k, n_cols, group, pairs, split_k = x.shape[-1], w.shape[0] // halved, 0, "", c.split_k
    if w.dtype == torch.uint8:
        group = k // scale.shape[1]
        _, pairs = view_in_pairs(scale)
    tiles = library.cdiv(n_cols, c.block_n // halved)
    early = c.prefetch is not None and c.prefetch >= 0
    constants = {
        "K": k, "EPILOGUE": epilogue, "EPS": o.eps, "OFFSET": o.offset, "ACTIVATION": o.activation,
        "HAS_NORM": o.norm_weight is not None, "GROUP": group, "PAIRS": pairs, "HAS_BIAS": o.bias is not None,
        "HAS_RESIDUAL": o.residual is not None, **dict(zip(CONSTANTS, qkv.constants, strict=True)),
        "BLOCK_N": c.block_n, "SLICES": c.slices, "SPLIT": split_k, "AHEAD": c.num_stages - 1, "EARLY": early,
    }  # fmt: skip
    # Two CTAs of eight warps fit an SM with 128 registers a thread. Where warps have 16 rows and all steps the
    # assembler would take up to 178, but not for a gate of int8; elsewhere it takes fewer, and spills with a limit.
    limited = c.slices == 1 and c.num_warps <= 8 and (group or epilogue != "gated")
    options: dict[str, Any] = {"num_warps": c.num_warps, **({"maxnreg": 128} if limited else {}), **pdl.options(early)}
    strides, sizes = (w.stride(0), *qkv.strides), (n_cols, *qkv.sizes)
    starts: dict[bool, Callable[..., None]] = {}  # by whether the weight is constant

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
        x_scale: Tensor | None, weight_scale: Tensor, *of_qkv: Tensor | None,
    ) -> None:  # fmt: skip
        partial, counters = workspace(tiles, c.block_n + 1, split_k, device)
        if pairs:
            weight_scale, _ = view_in_pairs(weight_scale)
        is_constant = early and pdl.weights_are_constant()
        start = starts.get(is_constant)
        if start is None:
            tensors = (x, norm_weight, w, weight_scale, bias, residual, out, *of_qkv)
            launcher = launching.launcher(
                gemv_imma_kernel, tensors, {**constants, "CONSTANT_WEIGHT": is_constant}, **options
            )
            start = starts[is_constant] = launching.bind(launcher, tiles * split_k, strides=strides, numbers=sizes)
        start(x, norm_weight, w, weight_scale, bias, residual, out, partial, counters, *(of_qkv or NO_QKV.tensors))

    return run
