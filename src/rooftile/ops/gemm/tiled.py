"""The many-row mainloop in Triton: any sizes, any strides of x and of the weight, batches, on any GPU.

A CTA computes a tile of the output, or with split-K a part of its sum. The accumulator is in registers, float32, and
the operands go through shared memory in STAGES pipeline stages. Rows past the last one are clamped to it, so that loads
need no mask. An operand whose rows are its contiguous dimension is masked instead, where its last tile is not full:
repeated rows would not be loaded as vectors.

A sum can continue over a second, short pair of operands (`more_x`, `more_w`), such as the factors of a LoRA adapter. If
the sum is split, the last part does that.

Kernel "hopper" of fp8_linear without pingpong is this mainloop too, persistent and with TMA loads: as many CTAs as the
GPU holds walk over the tiles, so that a tile's first loads are in flight during the epilogue of the previous one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import fp8_common
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.epilogue import finish, scale_tile, sum_parts
from rooftile.ops.gemm.parts import UNDO, divisible, grouped_tile, multiply_add, w_step_scale, x_step_scale
from rooftile.primitives import quantize
from rooftile.primitives.splitk import arrives_last, workspace

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _clamp(index, n, EDGE: tl.constexpr):
    """The rows of an operand that a tile loads."""
    return tl.minimum(index, n - 1) if EDGE == "clamp" else index


@triton.jit
def _load(pointers, inside, in_sum, MASK: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of an operand, zero past its last row (`inside`) with MASK, and past the end of the sum (`in_sum`)."""
    if MASK and not EVEN_K:
        tile = tl.load(pointers, mask=inside & in_sum, other=0.0)
    elif MASK:
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif not EVEN_K:
        tile = tl.load(pointers, mask=in_sum, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _tile(
    index, x, w, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    more_x_ptr, more_w_ptr,
    stride_xb, stride_xm, stride_xk, stride_wb, stride_wn, stride_wk, stride_sxm, stride_sxk, stride_swn, stride_swk,
    stride_rb, stride_rm, stride_ob, stride_om, stride_mxm, stride_mxk, stride_mwn, stride_mwk, n_more,
    n_rows, n_cols, n_inner,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, FAST: tl.constexpr, APART: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    X_EDGE: tl.constexpr, W_EDGE: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute tile `index // SPLIT`, part `index % SPLIT` of its sum."""
    tile = index // SPLIT
    part = index % SPLIT
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_rows = tl.minimum(rows, n_rows - 1)
    inner_cols = tl.minimum(cols, n_cols - 1)
    length = tl.cdiv(tl.cdiv(n_inner, BLOCK_K), SPLIT) * BLOCK_K
    start = part * length
    stop = tl.minimum(start + length, n_inner)

    if not TMA:
        ks = tl.arange(0, BLOCK_K)
        inner = (start + ks).to(tl.int64)
        step = tl.full((), BLOCK_K, tl.int64)
        x_rows = _clamp(rows, n_rows, X_EDGE).to(tl.int64)
        w_rows = _clamp(cols, n_cols, W_EDGE).to(tl.int64)
        x_inside, w_inside = (rows < n_rows)[:, None], (cols < n_cols)[None, :]
        x_ptrs = x + batch * stride_xb + x_rows[:, None] * stride_xm + inner[None, :] * stride_xk
        w_ptrs = w + batch * stride_wb + w_rows[None, :] * stride_wn + inner[:, None] * stride_wk
        if GATED:
            up_ptrs = w_ptrs + n_cols.to(tl.int64) * stride_wn

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        if TMA:
            x_tile = x.load([tile_m * BLOCK_M, k])
            w_tile = w.load([tile_n * BLOCK_N, k]).T
        else:
            in_sum = ks < n_inner - k
            x_tile = _load(x_ptrs, x_inside, in_sum[None, :], X_EDGE == "mask", EVEN_K)
            w_tile = _load(w_ptrs, w_inside, in_sum[:, None], W_EDGE == "mask", EVEN_K)
        x_scale = None
        w_scale = None
        if X_SCALE == "group":
            x_scale = x_step_scale(x_scale_ptr, inner_rows, k, stride_sxm, stride_sxk)[:, None]
        if W_SCALE == "block":
            w_scale = w_step_scale(w_scale_ptr, inner_cols, tile_n * BLOCK_N, k, stride_swn, stride_swk, BLOCK_N)
            if BLOCK_N > 128:
                w_scale = w_scale[None, :]
        acc = multiply_add(x_tile, w_tile, acc, x_scale, w_scale, PRECISION, FAST, APART, BLOCK_K)
        if GATED:
            w_tile = _load(up_ptrs, w_inside, in_sum[:, None], W_EDGE == "mask", EVEN_K)
            up = multiply_add(x_tile, w_tile, up, x_scale, w_scale, PRECISION, FAST, APART, BLOCK_K)
            up_ptrs += step * stride_wk
        if not TMA:
            x_ptrs += step * stride_xk
            w_ptrs += step * stride_wk

    if more_x_ptr is not None:
        tl.static_assert(not GATED and not TMA)
        for k in tl.range(0, n_more if part == SPLIT - 1 else 0, BLOCK_K, num_stages=1):
            inner = (k + ks).to(tl.int64)
            in_sum = inner < n_more
            more_x_ptrs = more_x_ptr + x_rows[:, None] * stride_mxm + inner[None, :] * stride_mxk
            more_w_ptrs = more_w_ptr + w_rows[None, :] * stride_mwn + inner[:, None] * stride_mwk
            x_tile = _load(more_x_ptrs, x_inside, in_sum[None, :], X_EDGE == "mask", False)
            w_tile = _load(more_w_ptrs, w_inside, in_sum[:, None], W_EDGE == "mask", False)
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)

    if not GATED:
        up = acc
    last = True
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT * (1 + GATED) * SIZE) + at
        tl.store(part_ptrs + part * SIZE, acc)
        if GATED:
            tl.store(part_ptrs + (SPLIT + part) * SIZE, up)
        last = arrives_last(counters_ptr + tile, SPLIT)
        if last:
            acc = sum_parts(part_ptrs, SIZE, SPLIT, False)
            up = acc
            if GATED:
                up = sum_parts(part_ptrs + SPLIT * SIZE, SIZE, SPLIT, False)
    if last:
        acc = scale_tile(
            acc, x_scale_ptr, w_scale_ptr, inner_rows[:, None], inner_cols[None, :],
            stride_sxm, stride_swn, X_SCALE, W_SCALE,
        )  # fmt: skip
        if not TMA and x.dtype.element_ty == tl.uint8:
            acc *= UNDO
        at_rows = rows.to(tl.int64)[:, None]
        at_cols = cols[None, :]
        bias = None
        up_bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + at_cols, mask=at_cols < n_cols, other=0.0).to(tl.float32)
            if GATED:
                up_bias = tl.load(bias_ptr + n_cols + at_cols, mask=at_cols < n_cols, other=0.0).to(tl.float32)
        finish(
            acc, up, bias, up_bias, residual_ptr + batch * stride_rb if residual_ptr is not None else None,
            out_ptr + batch * stride_ob, at_rows, at_cols, stride_rm, stride_om,
            (at_rows < n_rows) & (at_cols < n_cols), ACTIVATION, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_inner"])
def _tiled_kernel(
    x, w,  # descriptors with TMA, else pointers
    x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, more_x_ptr, more_w_ptr,
    stride_xb, stride_xm, stride_xk, stride_wb, stride_wn, stride_wk, stride_sxm, stride_sxk, stride_swn, stride_swk,
    stride_rb, stride_rm, stride_ob, stride_om, stride_mxm, stride_mxk, stride_mwn, stride_mwk, n_more,
    n_rows, n_cols, n_inner,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, FAST: tl.constexpr, APART: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    X_EDGE: tl.constexpr, W_EDGE: tl.constexpr, M16: tl.constexpr, N16: tl.constexpr, K16: tl.constexpr,
    EVEN_K: tl.constexpr, K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_rows, n_cols, n_inner = divisible(n_rows, M16), divisible(n_cols, N16), divisible(n_inner, K16)
    if TMA:
        n_inner = K  # constant: with a runtime trip count the flattened loops have half as many instructions again
        units = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N) * SPLIT
        for index in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=SPLIT == 1):
            _tile(
                index,
                x, w, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
                more_x_ptr, more_w_ptr,
                stride_xb, stride_xm, stride_xk, stride_wb, stride_wn, stride_wk,
                stride_sxm, stride_sxk, stride_swn, stride_swk,
                stride_rb, stride_rm, stride_ob, stride_om, stride_mxm, stride_mxk, stride_mwn, stride_mwk, n_more,
                n_rows, n_cols, n_inner,
                X_SCALE, W_SCALE, FAST, APART, ACTIVATION, GATED, PRECISION, TMA, X_EDGE, W_EDGE, EVEN_K,
                GROUP_M, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0),
            x, w, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
            more_x_ptr, more_w_ptr,
            stride_xb, stride_xm, stride_xk, stride_wb, stride_wn, stride_wk,
            stride_sxm, stride_sxk, stride_swn, stride_swk,
            stride_rb, stride_rm, stride_ob, stride_om, stride_mxm, stride_mxk, stride_mwn, stride_mwk, n_more,
            n_rows, n_cols, n_inner,
            X_SCALE, W_SCALE, FAST, APART, ACTIVATION, GATED, PRECISION, TMA, X_EDGE, W_EDGE, EVEN_K,
            GROUP_M, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


def shared_memory(p: Problem, c: GemmConfig) -> int:
    """Bytes of shared memory of a CTA: the tiles being loaded, and a few for barriers."""
    tiles = (c.block_m + c.block_n * (1 + p.gated)) * c.block_k * p.dtype.itemsize
    return c.num_stages * tiles + 64


def _tma_reason(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why kernel "hopper" of fp8_linear can't compute p."""
    if target is not runtime.INTERPRETER and target.arch != "sm_90":
        return f"the kernel is for sm_90, and the device is {target.arch}"
    if not p.aligned or p.k % 16:
        return "x's and the weight's rows are not contiguous and at multiples of 16 bytes"
    if max(c.block_m, c.block_n) > 256 or c.block_m < 64:
        return f"block_m is {c.block_m} and block_n {c.block_n}, expected 64 to 256 and at most 256"
    if c.block_n & (c.block_n - 1):
        return f"block_n is {c.block_n}, expected a power of two"
    return None


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute p as c says; None where it can."""
    for name in ("block_m", "block_n", "block_k"):
        if getattr(c, name) < 16:
            return f"{name} is {getattr(c, name)}, expected at least 16: the tensor core takes no smaller tile"
    if c.num_warps * target.warp_size > target.max_threads:
        most = target.max_threads // target.warp_size
        return f"num_warps is {c.num_warps}, expected at most {most}"
    sums = c.block_m * c.block_n * (1 + p.gated) // (c.num_warps * target.warp_size)
    if sums > 256:
        return f"block_m x block_n has {sums} sums for each thread of {c.num_warps} warps, expected at most 256"
    if p.dtype.itemsize == 1:
        return (_tma_reason(p, c, target) if c.kernel == "hopper" else None) or fp8_common.can_implement(p, c)
    needed = shared_memory(p, c)
    if needed > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: tiles take {needed} bytes of shared memory, expected at most "
            f"{target.shared_memory}"
        )
    if p.precision == "tf32" and p.dtype == torch.float32 and target.arch.startswith("gfx9") and target.arch < "gfx942":
        return f"precision is 'tf32', which {target.arch} has not"
    return None


def _edge(t: Tensor, n: int, block: int) -> str:
    """How an operand's last rows are kept in bounds. "clamp", unless its rows are its contiguous dimension."""
    if t.stride(-2) != 1 or t.stride(-1) == 1:
        return "clamp"
    return "none" if n % block == 0 else "mask"


def _strides(t: Tensor | None) -> tuple[int, int, int]:
    """Of batch, row and column; 0 for a batch that is not there."""
    if t is None:
        return 0, 0, 0
    return (t.stride(0) if t.dim() == 3 else 0, t.stride(-2), t.stride(-1))


def _more_strides(o: Operands) -> tuple[int | None, ...]:
    """Of more_x, of more_w, and how long they are; None for each where there are none."""
    if o.more_x is None or o.more_w is None:
        return (None,) * 5
    return (*o.more_x.stride(), *o.more_w.stride(), o.more_x.shape[1])


@functools.lru_cache(1024)
def _resident(c: GemmConfig, target: runtime.Target) -> int:
    """How many CTAs with TMA loads the GPU holds: two an SM, if they are of four warps and their stages fit."""
    stages = c.num_stages * c.block_k * (c.block_m + c.block_n)
    two = c.num_warps <= 4 and 2 * (stages + 12_288) <= target.shared_memory
    return (2 if two else 1) * target.multiprocessors


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (B, M, K), w (B, N, K) or (B, 2N, K); out and residual (B, M, N), last stride 1; or no B."""
    x, w, device = o.x, o.w, o.w.device
    (m, n), k = o.out.shape[-2:], x.shape[-1]
    batch = o.out.shape[0] if o.out.dim() == 3 else 1
    tiles, split = batch * library.cdiv(m, c.block_m) * library.cdiv(n, c.block_n), c.split_k
    elements, programs = (1 + o.gated) * c.block_m * c.block_n, tiles * split
    tma = c.kernel == "hopper"
    reads_bytes = o.x_kind != "" and not tma  # on a GPU without fp8
    x_edge, w_edge = _edge(x, m, c.block_m), _edge(w, n, c.block_n)
    even_k = bool(k % c.block_k == 0)
    descriptors = {}
    if tma:
        programs = min(programs, _resident(c, runtime.target(device)))
        of_x, of_w = launching.describe(x, (c.block_m, c.block_k)), launching.describe(w, (c.block_n, c.block_k))
        assert of_x is not None, "can_implement takes only what TMA does"
        assert of_w is not None, "can_implement takes only what TMA does"
        descriptors = {0: of_x, 1: of_w}
    constants = {
        "X_SCALE": o.x_kind, "W_SCALE": o.w_kind, "FAST": o.fast, "APART": fp8_common.adds_apart(c),
        "ACTIVATION": o.activation, "GATED": o.gated, "PRECISION": o.precision, "TMA": tma, "X_EDGE": x_edge,
        "W_EDGE": w_edge, "M16": x_edge == "mask" and m % 16 == 0, "N16": n % 16 == 0,
        "K16": not even_k and k % 16 == 0, "EVEN_K": even_k, "K": int(k) if tma else 0, "GROUP_M": c.group_m,
        "SPLIT": split, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "BLOCK_K": c.block_k,
        "STAGES": None if tma else c.num_stages,  # of flattened loops, the kernel's option decides
    }  # fmt: skip
    options = {"num_warps": c.num_warps, **({"num_stages": c.num_stages} if tma else {})}
    launcher = launching.launcher(_tiled_kernel, (x, o.bias, o.residual, o.out, o.more_x), constants, **options)
    strides = (
        *_strides(x), *_strides(w), *fp8_common.scale_strides(o), *_strides(o.residual)[:2], *_strides(o.out)[:2],
        *_more_strides(o),
    )  # fmt: skip
    start = launching.bind(launcher, programs, strides=strides, numbers=(m, n, k), descriptors=descriptors)

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, _: None,
        x_scale: Tensor | None, weight_scale: Tensor | None,
        more_x: Tensor | None = None, more_w: Tensor | None = None,
    ) -> None:  # fmt: skip
        partial, counters = workspace(tiles, elements, split, device)
        if reads_bytes:
            x, w = quantize.writable(x), quantize.writable(w)
        start(x, w, x_scale, weight_scale, bias, residual, out, partial, counters, more_x, more_w)

    return run
