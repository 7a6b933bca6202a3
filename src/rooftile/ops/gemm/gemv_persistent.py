"""One row of x, or two, held in registers while rows of the weight pass: multiply and sum, perhaps behind a norm.

As many programs as run at once share out the tiles of the weight, each of whole rows, 1024 threads a multiprocessor.
A thread has its elements of x, scaled by the norm's weight, for as long as its program runs, so that nothing but the
weight is loaded for a tile, and the next tile is asked for while this one's sums meet. In kernel "gemv" every program
has to bring x to its threads anew, past barriers, and waits with empty hands when it begins and when it ends. What that
is worth stands at `configs`.

Of a gated product a tile has a row of the gate and its row of up in turns: their sums lie side by side.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch

import triton  # isort: skip
import triton.language as tl  # isort: skip

ROWS = 2  # of x, at most: each takes as many registers as the other
THREADS, REGISTERS = 1024, 64  # of a multiprocessor, and of each: all that it has


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _rows_of(tile, n_cols, BLOCK_N: tl.constexpr, SETS: tl.constexpr):
    """The tile's rows of the weight, of SETS sets of n_cols in turns; in bounds, so that their loads need no mask."""
    r = tl.arange(0, BLOCK_N * SETS)
    return (tl.minimum(tile * BLOCK_N + r // SETS, n_cols - 1) + r % SETS * n_cols).to(tl.int64)


@triton.jit
def prefetch_rows(w_ptr, rows, stride_wn, n_inner, BLOCK_K: tl.constexpr):
    """Bring those rows, contiguous along k, into the L2."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lines = tl.minimum(tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE, n_inner - 1)
    prefetch(w_ptr + rows[:, None] * stride_wn + lines[None, :])


@triton.jit
def load_rows(
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
def hold(x_ptr, norm_ptr, n_inner, EPS: tl.constexpr, OFFSET: tl.constexpr, HAS_NORM: tl.constexpr,
         EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """A row of x, float32 (1, K), times the norm's weight where there is one; and the norm's factor."""
    ks = tl.arange(0, BLOCK_K)
    if EVEN_K:
        x = tl.load(x_ptr + ks, eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(x_ptr + ks, mask=ks < n_inner, other=0.0, eviction_policy="evict_last").to(tl.float32)
    rstd = 1.0
    if HAS_NORM:
        if EVEN_K:
            scale = tl.load(norm_ptr + ks, eviction_policy="evict_last").to(tl.float32)
        else:
            scale = tl.load(norm_ptr + ks, mask=ks < n_inner, other=0.0, eviction_policy="evict_last").to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_inner + EPS)
        x *= scale + OFFSET
    return x[None, :], rstd


@triton.jit
def _finish(z, bias, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the sums of a tile become, float32 (BLOCK_N,)."""
    if HAS_BIAS:
        z += bias
    if GATED:
        gate, up = tl.split(z.reshape(BLOCK_N, 2))
        z = activate(gate, ACTIVATION) * up
    elif ACTIVATION != "":
        z = activate(z, ACTIVATION)
    return z


@triton.jit(do_not_specialize=["n_cols"])
def _gemv_persistent_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    stride_xm,
    stride_wn,
    stride_wk,
    stride_om,
    stride_rm,
    n_inner,
    n_cols,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    LETS_START: tl.constexpr,
    EARLY: tl.constexpr,
):
    SETS: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(n_cols, BLOCK_N)
    rows = _rows_of(tile, n_cols, BLOCK_N, SETS)
    if EARLY:
        prefetch_rows(w_ptr, rows, stride_wn, n_inner, BLOCK_K)
        pdl_wait()
    if AHEAD:  # before x, for which a program would wait with nothing else under way
        coming = load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
    x, rstd = hold(x_ptr, norm_ptr, n_inner, EPS, OFFSET, HAS_NORM, EVEN_K, BLOCK_K)
    if ROWS == 2:
        second, second_rstd = hold(x_ptr + stride_xm, norm_ptr, n_inner, EPS, OFFSET, HAS_NORM, EVEN_K, BLOCK_K)

    for t in tl.range(tile, tiles, programs, num_stages=1):
        # With its last tile: what starts before that is only in the way.
        if LETS_START:  # noqa: SIM102  # a constant, which decides before there is a program
            if t + programs >= tiles:
                pdl_launch_dependents()
        cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = cols < n_cols
        rows = _rows_of(t, n_cols, BLOCK_N, SETS)
        bias = tl.zeros((BLOCK_N * SETS,), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            if ROWS == 2:
                second_residual = tl.load(residual_ptr + stride_rm + cols, mask=inside, other=0.0).to(tl.float32)
        if AHEAD:
            w = coming
            following = _rows_of(t + programs, n_cols, BLOCK_N, SETS)
            coming = load_rows(
                w_ptr, following, stride_wn, stride_wk, n_inner, t + programs < tiles, EVEN_K, BLOCK_K
            )  # fmt: skip
        else:
            w = load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
        w = w.to(tl.float32)
        if ROWS == 2:
            z, y = tl.reduce((w * x, w * second), 1, _add_pairs)
            y = _finish(y * second_rstd, bias, HAS_BIAS, ACTIVATION, GATED, BLOCK_N)
            if HAS_RESIDUAL:
                y += second_residual
            tl.store(out_ptr + stride_om + cols, y.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            z = tl.sum(w * x, axis=1)
        z = _finish(z * rstd, bias, HAS_BIAS, ACTIVATION, GATED, BLOCK_N)
        if HAS_RESIDUAL:
            z += residual
        tl.store(out_ptr + cols, z.to(out_ptr.dtype.element_ty), mask=inside)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], rows: int, eps: float, offset: float, activation: str, gated: bool,
    even_k: bool, lets_start: bool, early: bool, limited: bool, c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "ACTIVATION": activation,
        "GATED": gated,
        "HAS_NORM": dtypes[1] is not None,
        "HAS_BIAS": dtypes[4] is not None,
        "HAS_RESIDUAL": dtypes[5] is not None,
        "EVEN_K": even_k,
        "ROWS": rows,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "AHEAD": c.num_stages > 1,
        "LETS_START": lets_start,
        "EARLY": early,
    }
    return launching.KernelLauncher(
        _gemv_persistent_kernel, constants, num_warps=c.num_warps, **limit(limited), **pdl.options(early)
    )


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can. Any layout of the weight is taken."""
    if c.pingpong or c.stream_k:
        return f"{'pingpong' if c.pingpong else 'stream_k'} is True, which kernel 'hopper' alone has"
    if p.m > ROWS or p.batch != 1:
        return f"kernel 'gemv_persistent' takes one or two rows of x, not {p.batch} x {p.m}"
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
        return f"num_stages is {c.num_stages}, expected 1, or 2 for the next tile's loads ahead of this one's sums"
    threads = c.num_warps * target.warp_size
    numbers = (p.m + c.num_stages * c.block_n * (1 + p.gated)) * c.block_k // threads
    if numbers > 128:
        return f"x and num_stages tiles of the weight are {numbers} elements a thread, more than 128"
    return None


def configs(p: Problem, target: runtime.Target) -> list[MatmulConfig]:
    """16 elements of x a thread, and 32 of the weight: two rows of 4096 elements a tile. Empty where that is no good.

    In decoding steps on an H200, against kernels "gemv" and "skinny": the gated product of one row took 116 us less of
    Qwen2.5-7B's 3990, 142 of Llama-3-8B's 4090 and 197 of Granite-8B-code's 4450; q, k and v up to 115 less; o, which
    has no norm, so that a tuned table decides, 15 to 29. Of two rows the gated product took 52 to 170 less; for the
    second row's registers the next tile waits. Others of two rows took more.
    """
    width = library.power_of_two(p.k)
    if p.dtype.itemsize != 2 or width > 8192 or p.m > (ROWS if p.gated else 1):
        return []
    threads = max(128, width // 16)
    rows = max(1 + p.gated, 32 * threads // width)
    ahead = p.m == 1 and target.arch != "sm_120"  # for which the compiler spills it
    warps, stages = threads // target.warp_size, 1 + ahead
    return [MatmulConfig("gemv_persistent", p.m, rows // (1 + p.gated), width, 1, 1, warps, stages)]


def is_limited(w: Tensor, target: runtime.Target) -> bool:
    """Whether threads are held to REGISTERS. Rows that are not aligned, or not contiguous, are loaded one number at a
    time, each into a register: more than that."""
    aligned = w.stride(-1) == 1 and w.stride(-2) % 16 == 0 and w.data_ptr() % 16 == 0
    return target.arch.startswith("sm_") and aligned


def limit(limited: bool) -> dict[str, Any]:
    """That, as the options of a plan."""
    return {"maxnreg": REGISTERS} if limited else {}


def programs_for(tiles: int, c: MatmulConfig, target: runtime.Target) -> int:
    """As many as run at once where threads are held to REGISTERS, or as there are tiles."""
    each = max(1, THREADS // (c.num_warps * target.warp_size))
    return min(tiles, each * target.multiprocessors)


def launch_normed(
    x: Tensor, norm_weight: Tensor | None, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None,
    eps: float, offset: float, activation: str, gated: bool, c: MatmulConfig, early: bool,
) -> None:  # fmt: skip
    """Launch it: x (M, K) of one row or two with a last stride of 1, w (N, K) or (2N, K), out (M, N).

    early: whether it starts while the kernel ahead still ends.
    """
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("a limit on registers, or an early launch")
    n_cols, n_inner = out.shape[-1], x.shape[-1]
    target = runtime.target(x.device)
    lets_start = pdl.supported(target)
    programs = programs_for(library.cdiv(n_cols, c.block_n), c, target)
    dtypes = tuple(None if t is None else t.dtype for t in (x, norm_weight, w, out, bias, residual))
    # A prefetch is of lines along k.
    early = early and lets_start and (w.stride(-1) == 1 or n_inner == 1)
    even = bool(n_inner == c.block_k)
    how = even, lets_start, early, is_limited(w, target), c
    plan = _plan(dtypes, x.shape[-2], eps, offset, activation, gated, *how)
    strides = (x.stride(-2), w.stride(-2), w.stride(-1), out.stride(-2), 0 if residual is None else residual.stride(-2))
    launching.launch(plan, programs, (x, norm_weight, w, out, bias, residual), (*strides, n_inner), (n_cols,))


def launch(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    precision: str, c: MatmulConfig,
) -> None:  # fmt: skip
    """The product without a norm. The multiply and the sum are float32's own, whatever `precision` was asked for."""
    launch_normed(x, None, w, out, bias, residual, 0.0, 0.0, activation, gated, c, early=False)
