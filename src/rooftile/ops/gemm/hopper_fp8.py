"""fp8_linear on sm_90 with float32 sums: the Hopper mainloop, its consumers adding up in registers.

The tensor cores sum fp8 products with some 14 bits. So every 128 elements a consumer adds what they have to float32
registers, times the scales of those elements. Adding takes a quarter of the time that multiplying does. The consumers
share each tile without an order: while one adds, the tensor cores have what another has started.

A consumer's registers hold its sums and 128 columns at most of a partial one, so a tile of 256 columns has two sums,
`low` and `high`. Each begins at a block of the weight that shares a scale.

The producer, the ring and the constant T are those of hopper.py. It is kernel "hopper" with `pingpong`.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.fp8_common import scale_strides
from rooftile.ops.gemm.hopper import (
    advance,
    allocate,
    bind,
    corner,
    count_tiles,
    memory_reason,
    produce,
    tiling_of,
)
from rooftile.ops.gemm.hopper_epilogue import write_chunk
from rooftile.primitives.gluon import split_columns
from rooftile.quantize import BLOCK

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait  # isort: skip


@gluon.jit
def _step_scales(scales, row, col, step, size, T: gl.constexpr):
    """The scales of 128 elements of the sum: of a consumer's rows of x, and of each sum's rows of the weight.

    1.0 where they do not belong to 128 elements. Rows out of bounds have the scales of the last one.
    """
    sx_ptr, sw_ptr, stride_sxm, stride_sxk, stride_swn, stride_swk = scales
    step = gl.minimum(step, gl.cdiv(size[2], gl.constexpr(T.block_k)) - 1)
    x = 1.0
    low = 1.0
    high = 1.0
    if T.x_scale == "group":
        rows = row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.layouts[0]))
        rows = gl.minimum(rows, size[0] - 1).to(gl.int64)
        x = gl.load(sx_ptr + rows * stride_sxm + step.to(gl.int64) * stride_sxk)
    if T.w_scale == "block":
        at = sw_ptr + step.to(gl.int64) * stride_swk
        block = col // 128
        low = gl.load(at + block.to(gl.int64) * stride_swn)
        if T.n_sums == 2:
            high = gl.load(at + gl.minimum(block + 1, (size[1] - 1) // 128).to(gl.int64) * stride_swn)
    return x, low, high


@gluon.jit
def _factors(x, low, high, T: gl.constexpr):
    """What each sum of a step is multiplied by.

    They are computed before the next step's scales are loaded, and the compiler may not move them past the wait. So the
    next scales are loaded into the registers of these; copied from others, they would be waited for at once.
    """
    if T.x_scale == "group":
        if T.w_scale == "block":
            low = x * low
            high = x * high
        else:
            low = x
            high = x
        if T.n_sums == 2:
            low, high = warpgroup_mma_wait(0, (low, high))
        else:
            low = warpgroup_mma_wait(0, (low,))
    return low, high


@gluon.jit
def _multiply_step(part, x, w):
    """part = x @ w.T, once the tensor cores have done it."""
    part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, (part,))


@gluon.jit
def _add_step(acc, part, factor, T: gl.constexpr):
    """acc + part * its factor."""
    if T.x_scale == "group":
        acc += part * factor[:, None]
    elif T.w_scale == "block":
        acc += part * factor
    else:
        acc += part
    # Nothing is in flight; but the compiler may not move the sum past the wait, which would take the registers of two.
    return warpgroup_mma_wait(0, (acc,))


@gluon.jit
def _load_columns(ptr, col, size, T: gl.constexpr):
    """One element for each column of a sum."""
    cols = col + gl.arange(0, T.piece, layout=gl.SliceLayout(0, T.layouts[0]))
    even = size[1] // 2 * 2  # n is even; known to be, elements are loaded two at a time
    return gl.load(ptr + cols, mask=cols < even, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _scale_sums(low, high, scales, bias_ptr, row, col, size, T: gl.constexpr):
    """The scales that belong to the whole sum, and the bias. Both sums' are loaded before either is waited for."""
    sx_ptr, sw_ptr, stride_sxm, _stride_sxk, _stride_swn, _stride_swk = scales
    if T.x_scale == "row":
        rows = gl.minimum(row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.layouts[0])), size[0] - 1)
        x_scale = gl.load(sx_ptr + rows.to(gl.int64) * stride_sxm)[:, None]
    elif T.x_scale == "tensor":
        x_scale = gl.load(sx_ptr)
    if T.w_scale == "row":
        low_scale = _load_columns(sw_ptr, col, size, T)
        high_scale = low_scale
        if T.n_sums == 2:
            high_scale = _load_columns(sw_ptr, col + T.piece, size, T)
    elif T.w_scale == "tensor":
        low_scale = gl.load(sw_ptr)
        high_scale = low_scale
    if T.x_scale != "group":
        low *= x_scale
        high *= x_scale
    if T.w_scale != "block":
        low *= low_scale
        high *= high_scale
    if bias_ptr is not None:
        if T.w_scale == "row":  # else the compiler would have the bias in registers beside the scales
            low, high = warpgroup_mma_wait(0, (low, high))
        low_bias = _load_columns(bias_ptr, col, size, T)
        high_bias = low_bias
        if T.n_sums == 2:
            high_bias = _load_columns(bias_ptr, col + T.piece, size, T)
        low += low_bias
        high += high_bias
    return low, high


@gluon.jit
def _add_residual(z, residual_ptr, row, col, size, T: gl.constexpr):
    rows = row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.part))[:, None]
    cols = col + gl.arange(0, T.chunk, layout=gl.SliceLayout(0, T.part))[None, :]
    n = size[1] // 2 * 2  # as above
    mask = (rows < size[0]) & (cols < n)
    return z + gl.load(residual_ptr + rows.to(gl.int64) * n + cols, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _consume_fp8(out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, mine: gl.constexpr, T: gl.constexpr):
    """Multiply and write out the rows of every tile from mine * rows on, with float32 sums of the steps."""
    x_ring, w_rings, ready, free, _ = ring
    CHUNKS: gl.constexpr = T.piece // T.chunk
    part = gl.full([T.rows, T.piece], 0, gl.float32, T.layouts[0])
    slot = 0
    parity = 0
    for i in range(count_tiles(size, T)):
        row, col = corner(i, size, T)
        row += mine * T.rows
        low = gl.full([T.rows, T.piece], 0, gl.float32, T.layouts[0])
        high = low
        x_scale, low_scale, high_scale = _step_scales(scales, row, col, gl.to_tensor(0), size, T)
        for step in range(gl.cdiv(size[2], gl.constexpr(T.block_k))):
            low_factor, high_factor = _factors(x_scale, low_scale, high_scale, T)
            if T.x_scale == "group" or T.w_scale == "block":  # a step early: they come from the L2, or farther
                x_scale, low_scale, high_scale = _step_scales(scales, row, col, step + 1, size, T)
            mbarrier.wait(ready.index(slot), parity)
            x = x_ring.index(slot * T.consumers + mine)
            part = _multiply_step(part, x, w_rings[0].index(slot))
            if T.n_sums == 2:
                low = _add_step(low, part, low_factor, T)
                part = _multiply_step(part, x, w_rings[1].index(slot))
                mbarrier.arrive(free.index(slot), count=1)
                high = _add_step(high, part, high_factor, T)
            else:
                mbarrier.arrive(free.index(slot), count=1)
                low = _add_step(low, part, low_factor, T)
            slot, parity = advance(slot, parity, T)

        low, high = _scale_sums(low, high, scales, bias_ptr, row, col, size, T)
        for h in gl.static_range(gl.constexpr(T.n_sums)):
            parts = split_columns(low if h == 0 else high, CHUNKS)
            for j in gl.static_range(CHUNKS):
                at = col + h * T.piece + j * T.chunk
                z = gl.convert_layout(parts[j], T.part)
                if residual_ptr is not None:
                    z = _add_residual(z, residual_ptr, row, at, size, T)
                write_chunk(z, out_ring, out_desc, row, at, h * CHUNKS + j, mine, T)
    tma.store_wait(0)


_STRIDES = ["stride_sxm", "stride_sxk", "stride_swn", "stride_swk"]


@gluon.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=["sx_ptr"])
def hopper_gemm_fp8(
    x_desc, w_desc, out_desc, sx_ptr, sw_ptr, bias_ptr, residual_ptr,
    stride_sxm, stride_sxk, stride_swn, stride_swk,
    T: gl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * x_scale * w[n, k] * w_scale, + bias[n] + residual[m, n]."""
    ring, out_ring, size = allocate(x_desc, w_desc, out_desc, T)
    scales = (sx_ptr, sw_ptr, stride_sxm, stride_sxk, stride_swn, stride_swk)
    if T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume_fp8, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 0, T)),
                (_consume_fp8, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 1, T)),
                (produce, (x_desc, w_desc, None, None, None, None, ring, size, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume_fp8, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 0, T)),
                (_consume_fp8, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 1, T)),
                (_consume_fp8, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 2, T)),
                (produce, (x_desc, w_desc, None, None, None, None, ring, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute p as c says; None where it can."""
    if not target.gluon:
        return f"kernel 'hopper' with pingpong is for sm_90, and {target.why_no_gluon}"
    if not p.aligned or p.k % 16 or p.n * p.out_size % 16:
        return "rows of x, of the weight or of the result are not contiguous and at multiples of 16 bytes"
    if max(p.m, p.n, p.k) >= 2**31:
        return f"kernel 'hopper' takes sizes below 2^31, not {p.m}, {p.n}, {p.k}"
    if c.num_warps not in (8, 12) or c.block_m != 16 * c.num_warps:
        return f"block_m is {c.block_m} and num_warps {c.num_warps}, expected 8 and 64 rows for each 4 of them"
    if c.block_k != BLOCK or c.split_k != 1:
        return f"block_k is {c.block_k} and split_k {c.split_k}, expected {BLOCK} and 1 with pingpong"
    # 64 columns gave wrong sums on an H200, and others on a second run.
    if c.block_n not in (128, 256) or c.block_n * (c.num_warps // 4) > 512:
        return f"block_n is {c.block_n}, expected 128 or 256, and with 12 warps 128"
    t = tiling_of(c, True, True, False, "", "row", "row", p.out_size, target.shared_memory)
    return memory_reason(t, p, c, target)


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (M, K), w (N, K), out and residual (M, N), contiguous, and their scales."""
    if isinstance(o.x, FunctionalTensor):
        raise launching.Untraceable("TMA descriptors")
    assert o.x_scale is not None, "x is fp8"
    assert o.weight_scale is not None, "the weight is fp8"
    limit = runtime.target(o.w.device).shared_memory
    t = tiling_of(c, True, True, False, "", o.x_kind, o.w_kind, o.out.element_size(), limit)
    # Strides past 2^31 are of a view into something huge.
    copies = max(scale_strides(o)) >= 2**31 or (o.w_kind == "row" and o.weight_scale.stride(0) != 1)
    if copies:
        o = dataclasses.replace(o, x_scale=o.x_scale.contiguous(), weight_scale=o.weight_scale.contiguous())
    start = bind(hopper_gemm_fp8, o, t, {}, scale_strides(o))

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, _: None, x_scale: Tensor,
        weight_scale: Tensor,
    ) -> None:  # fmt: skip
        if copies:
            x_scale, weight_scale = x_scale.contiguous(), weight_scale.contiguous()
        start(x, w, out, x_scale, weight_scale, bias, residual)

    return run
