"""GEMV of one row of x, or two, that stay in registers while rows of the weight pass.

    z = rms_norm(x) @ weight^T;   then an epilogue:
    "linear"    out = z + bias + residual
    "gated"     out = act(g) * u + residual,   [g | u] = z + bias
    "qkv"       q, k, v = z + bias;            q and k are rotated, k and v written into the cache; one row of x

Persistent CTAs, as many as run at once with 1024 threads an SM, share the tiles of the weight, each of whole rows. A
thread keeps its elements of x, times the norm's weight, in registers for as long as its CTA runs. So a tile loads
nothing but the weight, and the next tile's loads are in flight during the reduction of this one. Every CTA of kernel
"gemv" brings x to its threads anew, past barriers, and has no load in flight when it begins and when it ends. What that
is worth stands at `configs`.

A gated tile has rows of the gate and of up in turns, a qkv tile the two rows of each pair that RoPE rotates together:
the sums that belong together lie side by side.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
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
from rooftile.primitives.paging import locate_tokens
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch

import triton  # isort: skip
import triton.language as tl  # isort: skip

ROWS = 2  # of x, at most: each takes as many registers as the other
THREADS, REGISTERS = 1024, 64  # of an SM, and of each: all that it has
STYLES = ("half", "interleaved")  # of RoPE


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _rows_of(tile, n_cols, EPILOGUE: tl.constexpr, HEAD_DIM: tl.constexpr, APART: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight of a tile of BLOCK_N columns of the result (qkv: pairs), in bounds: loads need no mask."""
    SETS: tl.constexpr = 1 if EPILOGUE == "linear" else 2
    r = tl.arange(0, BLOCK_N * SETS)
    col = tl.minimum(tile * BLOCK_N + r // SETS, n_cols - 1)
    if EPILOGUE == "qkv":
        if APART == 1:
            first = col * 2
        else:
            first = col + col // (HEAD_DIM // 2) * (HEAD_DIM // 2)
        return (first + r % 2 * APART).to(tl.int64)
    else:
        return (col + r % SETS * n_cols).to(tl.int64)


@triton.jit
def _prefetch_rows(w_ptr, rows, stride_wn, n_inner, BLOCK_K: tl.constexpr):
    """Bring those rows, contiguous along k, into the L2."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lines = tl.minimum(tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE, n_inner - 1)
    prefetch(w_ptr + rows[:, None] * stride_wn + lines[None, :])


@triton.jit
def _load_rows(
    w_ptr, rows, stride_wn, stride_wk, n_inner, wanted, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Those rows, whole, where they are `wanted`."""
    ks = tl.arange(0, BLOCK_K)
    pointers = w_ptr + rows[:, None] * stride_wn + ks.to(tl.int64)[None, :] * stride_wk
    inside = wanted
    if not EVEN_K:
        inside = (ks < n_inner)[None, :] & wanted
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(
    x_ptr, norm_ptr, n_inner, EPS: tl.constexpr, OFFSET: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A row of x times the norm's weight, float32 (1, K), and rstd."""
    ks = tl.arange(0, BLOCK_K)
    if EVEN_K:
        x = tl.load(x_ptr + ks, eviction_policy="evict_last").to(tl.float32)
        scale = tl.load(norm_ptr + ks, eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(x_ptr + ks, mask=ks < n_inner, other=0.0, eviction_policy="evict_last").to(tl.float32)
        scale = tl.load(norm_ptr + ks, mask=ks < n_inner, other=0.0, eviction_policy="evict_last").to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_inner + EPS)
    x *= scale + OFFSET
    return x[None, :], rstd


@triton.jit
def _finish(z, bias, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The columns of the result from the sums of a tile, float32 (BLOCK_N,)."""
    if HAS_BIAS:
        z += bias
    if GATED:
        gate, up = tl.split(z.reshape(BLOCK_N, 2))
        z = activate(gate, ACTIVATION) * up
    return z


@triton.jit(do_not_specialize=["n_cols", "capacity", "n_pages", "n_angles"])
def gemv_persistent_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr,
    k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, starts_ptr, counts_ptr, table_ptr,
    stride_xm, stride_wn, stride_wk, stride_rm, stride_om,
    stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, stride_ct, stride_st,
    n_inner, n_cols, capacity, n_pages, n_angles,
    EPILOGUE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    APART: tl.constexpr, PAGE: tl.constexpr, HAS_COUNTS: tl.constexpr, BY_POSITION: tl.constexpr, EVEN_K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH_NEXT: tl.constexpr,
    LAUNCH_DEPENDENTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    IS_QKV: tl.constexpr = EPILOGUE == "qkv"
    GATED: tl.constexpr = EPILOGUE == "gated"
    SETS: tl.constexpr = 1 if EPILOGUE == "linear" else 2
    if IS_QKV:
        N: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * (HEAD_DIM // 2)
    else:
        N = n_cols
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(N, BLOCK_N)
    rows = _rows_of(tile, N, EPILOGUE, HEAD_DIM, APART, BLOCK_N)
    if EARLY:
        _prefetch_rows(w_ptr, rows, stride_wn, n_inner, BLOCK_K)
        pdl_wait()
    if PREFETCH_NEXT:  # before x, for which a CTA would wait with no other load in flight
        next_w = _load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
    if IS_QKV:
        exists, position, page, line, written = locate_tokens(
            starts_ptr, counts_ptr, table_ptr, 0, 0, tl.zeros((1,), tl.int64), 1, capacity, n_pages, HAS_COUNTS, PAGE
        )
    x, rstd = _load_x(x_ptr, norm_ptr, n_inner, EPS, OFFSET, EVEN_K, BLOCK_K)
    if ROWS == 2:
        x2, rstd2 = _load_x(x_ptr + stride_xm, norm_ptr, n_inner, EPS, OFFSET, EVEN_K, BLOCK_K)

    for t in tl.range(tile, tiles, programs, num_stages=1):
        # With its last tile: a dependent that starts before that is only in the way.
        if LAUNCH_DEPENDENTS:  # noqa: SIM102  # a constant, which decides before there is a program
            if t + programs >= tiles:
                pdl_launch_dependents()
        cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = _rows_of(t, N, EPILOGUE, HEAD_DIM, APART, BLOCK_N)
        if IS_QKV:
            pair = tl.minimum(cols, N - 1)
            head, i = pair // (HEAD_DIM // 2), pair % (HEAD_DIM // 2)
            first = i * 2 if APART == 1 else i  # of the pair's two elements of its head
        bias = tl.zeros((BLOCK_N * SETS,), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows).to(tl.float32)
        if IS_QKV:
            cos, sin = load_angles_of(
                cos_ptr, sin_ptr, exists, position, first, stride_ct, stride_st, n_angles, BY_POSITION
            )  # fmt: skip
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            if ROWS == 2:
                residual2 = tl.load(residual_ptr + stride_rm + cols, mask=cols < N, other=0.0).to(tl.float32)
        if PREFETCH_NEXT:
            w = next_w
            next_rows = _rows_of(t + programs, N, EPILOGUE, HEAD_DIM, APART, BLOCK_N)
            next_w = _load_rows(
                w_ptr, next_rows, stride_wn, stride_wk, n_inner, t + programs < tiles, EVEN_K, BLOCK_K
            )  # fmt: skip
        else:
            w = _load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
        w = w.to(tl.float32)

        if IS_QKV:
            # q, k and v are rounded before they are rotated, too.
            z = tl.sum(w * x, axis=1)
            z = scale_and_shift(z, rstd, 1.0, bias, True, False, HAS_BIAS, out_ptr.dtype.element_ty)
            a, b = tl.split(z.reshape(BLOCK_N, 2))
            rotate_and_store(
                a, b, cos, sin, out_ptr, k_cache_ptr, v_cache_ptr, head, first, cols < N, exists, page, line, written,
                stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, KV_HEADS, HEAD_DIM,
                APART,
            )  # fmt: skip
        else:
            if ROWS == 2:
                z, z2 = tl.reduce((w * x, w * x2), 1, _add_pairs)
                z2 = _finish(z2 * rstd2, bias, HAS_BIAS, ACTIVATION, GATED, BLOCK_N)
                if HAS_RESIDUAL:
                    z2 += residual2
                tl.store(out_ptr + stride_om + cols, z2.to(out_ptr.dtype.element_ty), mask=cols < N)
            else:
                z = tl.sum(w * x, axis=1)
            z = _finish(z * rstd, bias, HAS_BIAS, ACTIVATION, GATED, BLOCK_N)
            if HAS_RESIDUAL:
                z += residual
            tl.store(out_ptr + cols, z.to(out_ptr.dtype.element_ty), mask=cols < N)


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute that problem so; None where it can. It takes any layout of the weight."""
    if p.m > ROWS or p.batch != 1:
        return f"kernel 'gemv_persistent' takes one or two rows of x, not {p.batch} x {p.m} (batch x rows)"
    if c.block_m < p.m:
        return f"block_m is {c.block_m}, expected at least {p.m}"
    if p.x_layout != "k":
        return "kernel 'gemv_persistent' takes an x that is contiguous along k"
    if p.n * (1 + p.gated) >= 2**31:
        return f"the weight has {p.n * (1 + p.gated)} rows, expected fewer than 2^31"
    if c.split_k > 1:
        return f"split_k is {c.split_k}, expected 1: kernel 'gemv_persistent' has whole rows"
    if c.block_k < p.k:
        return f"block_k is {c.block_k}, expected at least {p.k}: kernel 'gemv_persistent' has whole rows"
    if c.num_stages > 2:
        return f"num_stages is {c.num_stages}, expected 1, or 2 to load the next tile before this one is summed"
    threads = c.num_warps * target.warp_size
    elements = (p.m + c.num_stages * c.block_n * (1 + p.gated)) * c.block_k // threads
    if elements > 128:
        return f"x and num_stages tiles of the weight are {elements} elements a thread, more than 128"
    return None


def configs(p: Problem, target: runtime.Target) -> list[GemmConfig]:
    """16 elements of x a thread, and 32 of the weight: two rows of 4096 elements a tile. Empty where others are faster.

    In decoding steps on an H200, against kernels "gemv" and "skinny": the gated GEMV took 116 us less of Qwen2.5-7B's
    3990, 142 of Llama-3-8B's 4090 and 197 of Granite-8B-code's 4450; q, k and v took up to 115 less. With two rows of x
    the gated one took 52 to 170 less. It does not load the
    next tile early, because the second row takes those registers. Other GEMVs of two rows took longer.
    """
    width = library.power_of_two(p.k)
    if p.dtype.itemsize != 2 or width > 8192 or p.m > (ROWS if p.gated else 1):
        return []
    threads = max(128, width // 16)
    rows = max(1 + p.gated, 32 * threads // width)
    next_too = p.m == 1 and target.arch != "sm_120"  # for which the compiler spills the next tile
    warps, stages = threads // target.warp_size, 1 + next_too
    return [GemmConfig("gemv_persistent", p.m, rows // (1 + p.gated), width, 1, 1, warps, stages)]


def is_limited(w: Tensor, target: runtime.Target) -> bool:
    """Whether threads are limited to REGISTERS. A weight whose rows are not aligned, or not contiguous, is loaded
    element by element, each into a register: more than that."""
    aligned = w.stride(-1) == 1 and w.stride(-2) % 16 == 0 and w.data_ptr() % 16 == 0
    return target.arch.startswith("sm_") and aligned


def programs_for(tiles: int, c: GemmConfig, target: runtime.Target) -> int:
    """As many CTAs as run at once where threads are limited to REGISTERS, or as there are tiles."""
    each = max(1, THREADS // (c.num_warps * target.warp_size))
    return min(tiles, each * target.multiprocessors)


def prepare(o: Operands, c: GemmConfig, qkv: QkvOutput = NO_QKV) -> Start:
    """For one row of x or two. The sums are float32's own, whatever `o.precision` says.

    With `qkv` out is q, `(1, 1, Hq, D)`, and `c` is that of the linear kernel: half of its rows make a tile's pairs.
    The start then takes `qkv.tensors` after its other arguments.

    It is launched before the previous kernel has ended, which took 0.04 ms off Llama-3-8B's step of 4.1 ms on an H200.
    The gated one is launched after that: an early launch made the step 0.1 ms slower.
    """
    x, w = o.x, o.w
    is_qkv = qkv is not NO_QKV
    if isinstance(x, FunctionalTensor) and not is_qkv:
        raise launching.Untraceable("a limit on registers, or an early launch")
    epilogue = "qkv" if is_qkv else "gated" if o.gated else "linear"
    n_cols = w.shape[-2] // 2 if is_qkv else o.out.shape[-1]
    block_n = c.block_n // 2 if is_qkv else c.block_n
    n_inner = x.shape[-1]
    target = runtime.target(w.device)
    along_k = w.stride(-1) == 1 or n_inner == 1  # a line that is prefetched lies along k
    early = pdl.early(x) and along_k and not o.gated
    tensors = (x, o.norm_weight, w, o.bias, o.residual, o.out, *qkv.tensors)
    constants = {
        "EPILOGUE": epilogue, "EPS": o.eps, "OFFSET": o.offset, "ACTIVATION": o.activation,
        "HAS_BIAS": o.bias is not None, "HAS_RESIDUAL": o.residual is not None,
        **dict(zip(CONSTANTS, qkv.constants, strict=True)), "EVEN_K": n_inner == c.block_k, "ROWS": x.shape[-2],
        "BLOCK_N": block_n, "BLOCK_K": c.block_k, "PREFETCH_NEXT": c.num_stages > 1,
        "LAUNCH_DEPENDENTS": pdl.supported(target), "EARLY": early,
    }  # fmt: skip
    limit: dict[str, Any] = {"maxnreg": REGISTERS} if is_limited(w, target) else {}
    launcher = launching.launcher(
        gemv_persistent_kernel, tensors, constants, num_warps=c.num_warps, **limit, **pdl.options(early)
    )
    stride_xm, stride_rm, stride_om = (
        None if is_qkv else 0 if t is None else t.stride(-2) for t in (x, o.residual, o.out)
    )  # fmt: skip
    strides = (stride_xm, w.stride(-2), w.stride(-1), stride_rm, stride_om, *qkv.strides, n_inner)
    programs = programs_for(library.cdiv(n_cols, block_n), c, target)
    start = launching.bind(launcher, programs, strides=strides, numbers=(n_cols, *qkv.sizes))

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
        x_scale: Tensor | None, weight_scale: Tensor | None, *of_qkv: Tensor | None,
    ) -> None:  # fmt: skip
        start(x, norm_weight, w, bias, residual, out, *(of_qkv or NO_QKV.tensors))

    return run
