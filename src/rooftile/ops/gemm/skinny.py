"""The few-row mainloop: up to 64 rows of x.

The weight's bytes limit it: they are read once, and x comes out of the L2. A tile is `block_n` rows of the weight and
all rows of x (`block_m`, padded). It is computed transposed, `w[n, k] x[m, k]` (operands swapped), so that the weight
is on the tensor core's side of 64 and few of x's rows are padding. Both go through shared memory, in `num_stages`
pipeline stages. A gated tile has `block_n` rows of the gate and as many of up, which are multiplied by the same tile of
x. Where there are fewer tiles than the GPU runs CTAs, `split_k` CTAs share the sum of one tile (split-K); the last to
finish adds the parts in order. Operands of 16 bits that TMA can describe are loaded by it on GPUs that have it.

Stream-K, equal shares of all tiles' sums, was 2 to 8 % slower on an H200 than the best split: the partial sums cost
more than the idle SMs of the last wave.

RMSNorm (`norm_weight`): each step multiplies its part of x by the norm's weight in float32 and rounds it for the tensor
core. The sum of squares is accumulated beside that, and rstd scales the sum at the end. With split-K each CTA writes
its squares after its partial sums. float16 would overflow where x times the norm's weight passes 65504, which x
normalised may be far from: a row's part is first brought near 1 by a power of two, and its products are scaled back.

fp8 (`x_scale`, `weight_scale`): scales of 128 elements of the sum are applied to each step, the others at the end.
"""

from __future__ import annotations

from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import fp8_common
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.epilogue import finish, scale_tile, sum_parts
from rooftile.ops.gemm.parts import UNDO, divisible, multiply_add, near_one, norm_weights, w_step_scale, x_step_scale
from rooftile.primitives import pdl, quantize
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last, workspace

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Blocks of the weight that a CTA prefetches into the L2 before the previous kernel has ended (primitives/pdl.py).
PREFETCH = 1


@triton.jit
def _load_w(
    w, row, k, n_end, n_inner, stride_wn, stride_wk, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile of the weight from that row and k on, (BLOCK_N, BLOCK_K)."""
    if TMA:
        tile = w.load([row, k])
    else:
        # Rows past the last one are clamped to it, so that loads need no mask; they are not stored.
        rows = tl.minimum(row + tl.arange(0, BLOCK_N), n_end - 1).to(tl.int64)
        ks = k + tl.arange(0, BLOCK_K)
        pointers = w + rows[:, None] * stride_wn + ks.to(tl.int64)[None, :] * stride_wk
        if EVEN_K:
            tile = tl.load(pointers, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers, mask=(ks < n_inner)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_x(
    x, k, n_rows, n_inner, stride_xm, stride_xk, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x from k on, (BLOCK_M, BLOCK_K). Rows past the last one are zeros: loading them would cost L2 bandwidth."""
    if TMA:
        tile = x.load([0, k])
    else:
        rows = tl.arange(0, BLOCK_M)
        ks = k + tl.arange(0, BLOCK_K)
        inside = (rows < n_rows)[:, None]
        if not EVEN_K:
            inside &= (ks < n_inner)[None, :]
        pointers = x + rows.to(tl.int64)[:, None] * stride_xm + ks.to(tl.int64)[None, :] * stride_xk
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _prefetch_w(w_ptr, row, k, n_cols, n_inner, stride_wn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bring one block of the weight, contiguous along k, into the L2."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.minimum(row + tl.arange(0, BLOCK_N), n_cols - 1).to(tl.int64)
    ks = tl.minimum(k + tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE, n_inner - 1)
    prefetch(w_ptr + rows[:, None] * stride_wn + ks[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _skinny_kernel(
    x, w,  # descriptors with TMA, else pointers
    w_ptr, norm_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    stride_xm, stride_xk, stride_wn, stride_wk, stride_sxm, stride_sxk, stride_swn, stride_swk, stride_rm, stride_om,
    n_inner, n_rows, n_cols,
    EPS: tl.constexpr, OFFSET: tl.constexpr, X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, FAST: tl.constexpr,
    APART: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, N16: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    NORM: tl.constexpr = norm_ptr is not None
    n_cols = divisible(n_cols, N16)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    row = tile * BLOCK_N
    length = tl.cdiv(n_inner, SPLIT * BLOCK_K) * BLOCK_K
    start = part * length
    if PREFETCHED >= 0:
        pdl_launch_dependents()
        for b in tl.static_range(PREFETCHED):
            _prefetch_w(w_ptr, row, start + b * BLOCK_K, n_cols, n_inner, stride_wn, BLOCK_N, BLOCK_K)
        pdl_wait()

    rows = tl.arange(0, BLOCK_M)
    cols = row + tl.arange(0, BLOCK_N)
    inner_rows = tl.minimum(rows, n_rows - 1)
    inner_cols = tl.minimum(cols, n_cols - 1)
    # The bias is loaded now: at the end a CTA would wait for it with no other load in flight.
    bias = None
    up_bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols).to(tl.float32)[:, None]
        if GATED:
            up_bias = tl.load(bias_ptr + n_cols + cols, mask=cols < n_cols).to(tl.float32)[:, None]

    z = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    z_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if NORM:
        # Squares are added up in groups as long as what a thread loads at once, so that no thread waits for another.
        VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        squares = tl.zeros((BLOCK_M, BLOCK_K // VECTOR), tl.float32)
        next_norm = norm_weights(norm_ptr, start, n_inner, OFFSET, EVEN_K, BLOCK_K)
    for k in tl.range(start, tl.minimum(start + length, n_inner), BLOCK_K, num_stages=STAGES):
        w_tile = _load_w(w, row, k, n_cols, n_inner, stride_wn, stride_wk, TMA, EVEN_K, BLOCK_N, BLOCK_K)
        x_tile = _load_x(x, k, n_rows, n_inner, stride_xm, stride_xk, TMA, EVEN_K, BLOCK_M, BLOCK_K)
        x_scale = None
        w_scale = None
        if NORM:
            wide = x_tile.to(tl.float32)
            norm = next_norm  # loaded a step early, as Triton does not pipeline loads of so few bytes
            next_norm = norm_weights(norm_ptr, k + BLOCK_K, n_inner, OFFSET, EVEN_K, BLOCK_K)
            squares += tl.sum((wide * wide).reshape(BLOCK_M, BLOCK_K // VECTOR, VECTOR), axis=2)
            wide *= norm[None, :]
            if DTYPE is tl.float16:
                wide, back = near_one(wide)
                x_scale = back[None, :]
            x_tile = wide.to(DTYPE)
        x_tile = x_tile.T
        if X_SCALE == "group":
            x_scale = x_step_scale(x_scale_ptr, inner_rows, k, stride_sxm, stride_sxk)[None, :]
        if W_SCALE == "block":
            w_scale = w_step_scale(w_scale_ptr, inner_cols, row, k, stride_swn, stride_swk, BLOCK_N)
            if BLOCK_N > 128:
                w_scale = w_scale[:, None]
        z = multiply_add(w_tile, x_tile, z, w_scale, x_scale, PRECISION, FAST, APART, BLOCK_K)
        if GATED:
            up = _load_w(w, n_cols + row, k, 2 * n_cols, n_inner, stride_wn, stride_wk, TMA, EVEN_K, BLOCK_N, BLOCK_K)
            z_up = multiply_add(up, x_tile, z_up, w_scale, x_scale, PRECISION, FAST, APART, BLOCK_K)
    if NORM:
        total = tl.sum(squares, axis=1)

    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        SUMS: tl.constexpr = SPLIT * (1 + GATED) * SIZE  # the squares follow
        first = partial_ptr + tile.to(tl.int64) * (SUMS + SPLIT * BLOCK_M if NORM else SUMS)
        at = first + (tl.arange(0, BLOCK_N)[:, None] + rows[None, :] * BLOCK_N)
        tl.store(at + part * SIZE, z)
        if GATED:
            tl.store(at + (SPLIT + part) * SIZE, z_up)
        if NORM:
            tl.store(first + SUMS + part * BLOCK_M + rows, total)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        if NORM:  # first: rstd is waited for before anything else
            total = sum_parts(first + SUMS + rows, BLOCK_M, SPLIT, True)
        z = sum_parts(at, SIZE, SPLIT, True)
        if GATED:
            z_up = sum_parts(at + SPLIT * SIZE, SIZE, SPLIT, True)

    if NORM:
        rstd = tl.rsqrt(total / n_inner + EPS)[None, :]
        z *= rstd
        if GATED:
            z_up *= rstd
    z = scale_tile(
        z, x_scale_ptr, w_scale_ptr, inner_rows[None, :], inner_cols[:, None], stride_sxm, stride_swn, X_SCALE, W_SCALE
    )
    if DTYPE is tl.uint8:
        z *= UNDO
    rows = rows[None, :].to(tl.int64)
    cols = cols[:, None]
    mask = (rows < n_rows) & (cols < n_cols)
    finish(
        z, z_up, bias, up_bias, residual_ptr, out_ptr, rows, cols, stride_rm, stride_om, mask, ACTIVATION, GATED
    )  # fmt: skip


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute p as c says; None where it can."""
    if p.m > c.block_m:
        return f"block_m is {c.block_m}, expected at least x's {p.m} rows for kernel 'skinny'"
    if p.batch != 1:
        return f"kernel 'skinny' takes one GEMM at a time, not a batch of {p.batch}"
    fp8 = p.dtype.itemsize == 1  # its operands may have any strides, and so may the weight after a norm
    if not fp8 and (p.x_layout != "k" or (p.w_layout != "k" and not p.norm)):
        return "kernel 'skinny' takes operands that are contiguous along k"
    if c.block_m < 16 or c.block_n < 16 or c.block_k < 16:
        return f"the tensor core takes no tile of {c.block_m} x {c.block_n} x {c.block_k}"
    reason = fp8_common.can_implement(p, c) if fp8 else None
    if reason is not None:
        return reason
    # With a norm, the tile of x that is multiplied lies beside those that are loaded.
    tiles = c.num_stages * (c.block_n * (1 + p.gated) + c.block_m) + p.norm * c.block_m
    shared = tiles * c.block_k * p.dtype.itemsize
    if shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    threads = c.num_warps * target.warp_size
    if c.block_n * c.block_m * (1 + p.gated) // threads > 128:
        return f"the tile has more than 128 sums for each thread of {c.num_warps} warps"
    if p.norm and c.block_m * c.block_k // threads > 128:
        return f"block_m x block_k is {c.block_m * c.block_k} elements for {c.num_warps} warps, more than 128 a thread"
    if p.norm and p.gated and target.arch == "sm_100" and c.block_n >= 64 and c.num_stages > 1:
        # Triton 3.6 fails an assertion of its pipeliner, in bfloat16; 32 rows go to another instruction.
        return (
            f"block_n is {c.block_n} with num_stages={c.num_stages}: the compiler fails for sm_100, expected 32, or 1"
        )
    return None


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (M, K), w (N, K), or (2N, K) gated, out (M, N)."""
    x, w, device, residual = o.x, o.w, o.w.device, o.residual
    (n_rows, n_inner), n_cols = x.shape, o.out.shape[-1]
    tiles, split = library.cdiv(n_cols, c.block_n), c.split_k
    norm, fp8 = o.norm_weight is not None, o.x_kind != ""
    elements = (c.block_n * (1 + o.gated) + norm) * c.block_m
    has_tma = pdl.supported(runtime.target(device))
    early = has_tma and not fp8 and (not norm or w.stride(1) == 1 or n_inner == 1)  # a prefetch is of lines along k
    descriptors = {}
    if has_tma and x.element_size() == 2:
        of_x = launching.describe(x, (c.block_m, c.block_k))
        of_w = launching.describe(w, (c.block_n, c.block_k))
        if of_x is not None and of_w is not None:
            descriptors = {0: of_x, 1: of_w}
    prefetched = PREFETCH if early else -1
    constants = {
        "EPS": o.eps, "OFFSET": o.offset, "X_SCALE": o.x_kind, "W_SCALE": o.w_kind, "FAST": o.fast,
        "APART": fp8_common.adds_apart(c), "ACTIVATION": o.activation, "GATED": o.gated, "PRECISION": o.precision,
        "TMA": bool(descriptors), "N16": n_cols % 16 == 0, "EVEN_K": n_inner % c.block_k == 0, "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n, "BLOCK_K": c.block_k, "SPLIT": split, "STAGES": c.num_stages, "PREFETCHED": prefetched,
    }  # fmt: skip
    launcher = launching.launcher(
        _skinny_kernel, (x, o.norm_weight, o.bias, residual, o.out), constants, num_warps=c.num_warps,
        **pdl.options(early),
    )  # fmt: skip
    residual_stride = 0 if residual is None else residual.stride(0)
    strides = (*x.stride(), *w.stride(), *fp8_common.scale_strides(o), residual_stride, o.out.stride(0), n_inner)
    start = launching.bind(launcher, tiles * split, strides=strides, numbers=(n_rows, n_cols), descriptors=descriptors)

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
        x_scale: Tensor | None, weight_scale: Tensor | None,
    ) -> None:  # fmt: skip
        partial, counters = workspace(tiles, elements, split, device)
        if fp8:  # a GPU that has none reads bytes
            x, w = quantize.writable(x), quantize.writable(w)
        start(x, w, w, norm_weight, x_scale, weight_scale, bias, residual, out, partial, counters)

    return run
