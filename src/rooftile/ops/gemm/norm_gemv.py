"""One row of x: multiply and sum, with the row's sum of squares taken beside the products.

A program has `block_n` rows of the weight (gated, as many of the gate and of up) and walks along them and x, `block_k`
elements at a time. Every program reads all of x and of the norm's weight, out of the L2 or its own L1: a few kilobytes
beside `block_n` rows of the weight. Weights of 8 bits have a scale for each row, which multiplies its sum.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import gemv as product
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last
from rooftile.primitives.weights import Format, add_products, load_columns, load_scales, no_sums

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Blocks of its weights that a program brings into the L2 before the kernel ahead has ended; -1: it is started after it.
PREFETCH = 1
# The gated product is: of Llama-3-8B's step of decoding, 4391 us with an early start, it took 200 off. Its thousands of
# programs fill the GPU while the product ahead still has most of its weights to read.
GATED_PREFETCH = -1


@triton.jit
def load_step(
    w_ptrs, other_ptrs, scale_ptr, rows, other_rows, x_ptr, norm_ptr, k, step, n_inner, TWO: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What is multiplied from stored column k on: of the weight's rows (of TWO sets of them both) with the scales of
    their groups, of x, and of the norm's weight.

    All loads before the first of them is used: x is brought to the layout of w past a barrier.
    """
    ks = k + tl.arange(0, BLOCK_K)
    inside = ks < n_inner
    if EVEN_K:
        w = tl.load(w_ptrs + step, eviction_policy="evict_first")
        other = w
        if TWO:
            other = tl.load(other_ptrs + step, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs + step, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        other = w
        if TWO:
            other = tl.load(other_ptrs + step, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    x = load_columns(x_ptr, ks, inside, GROUP, GROUPS, EVEN_K, "evict_last")
    norm = load_columns(norm_ptr, ks, inside, GROUP, GROUPS, EVEN_K, "evict_last")
    scales = load_scales(scale_ptr, rows, k, GROUP, GROUPS, PAIRS, BLOCK_K)
    other_scales = scales
    if TWO:
        other_scales = load_scales(scale_ptr, other_rows, k, GROUP, GROUPS, PAIRS, BLOCK_K)
    return (w, scales), (other, other_scales), x, norm


@triton.jit
def _scaled(x, norm, OFFSET: tl.constexpr):
    """x by the norm's weight, and the squares of x."""
    x = x.to(tl.float32)
    return x * (norm.to(tl.float32) + OFFSET), x * x


@triton.jit
def add_step(acc, acc_other, squares, w, other, x, norm, OFFSET: tl.constexpr, TWO: tl.constexpr, TRICKS: tl.constexpr):
    """The sums with the products of what `load_step` gave, and the squares of x."""
    first, more = _scaled(x[0], norm[0], OFFSET)
    squares += more
    if len(x) == 1:
        scaled = (first,)
    else:
        second, more = _scaled(x[1], norm[1], OFFSET)
        squares += more
        scaled = first, second  # type: ignore[assignment]  # of another length
    acc = add_products(acc, w[0], scaled, w[1], TRICKS)
    if TWO:
        acc_other = add_products(acc_other, other[0], scaled, other[1], TRICKS)
    return acc, acc_other, squares


@triton.jit(do_not_specialize=["n_cols"])
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    bias_ptr,
    partial_ptr,
    counters_ptr,
    stride_wn,
    stride_wk,
    n_inner,
    n_cols,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    TRICKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(cols, n_cols - 1).to(tl.int64)  # in bounds, so that loads need no mask
    block = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + block.to(tl.int64)[None, :] * stride_wk
    up_ptrs = w_ptr + (rows + n_cols)[:, None] * stride_wn + block.to(tl.int64)[None, :] * stride_wk
    length = tl.cdiv(n_inner, SPLIT * BLOCK_K) * BLOCK_K
    start = part * length
    if PREFETCH >= 0:
        pdl_launch_dependents()
        LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = start + tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE
        for b in tl.static_range(PREFETCH):
            prefetch(w_ptr + rows[:, None] * stride_wn + tl.minimum(lines + b * BLOCK_K, n_inner - 1)[None, :])
        pdl_wait()

    # Asked for now: at the end a program would wait for them with nothing else under way.
    if HAS_SCALE:
        row_scale = tl.load(scale_ptr + rows)
        if GATED:
            up_scale = tl.load(scale_ptr + n_cols + rows)
    if HAS_BIAS:
        row_bias = tl.load(bias_ptr + rows).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + n_cols + rows).to(tl.float32)

    acc = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    up = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.range(start, tl.minimum(start + length, n_inner), BLOCK_K, num_stages=STAGES):
        step = k.to(tl.int64) * stride_wk
        w, w_up, x, norm = load_step(
            w_ptrs, up_ptrs, scale_ptr, rows, rows + n_cols, x_ptr, norm_ptr, k, step, n_inner, GATED, GROUP, GROUPS,
            PAIRS, EVEN_K, BLOCK_K,
        )  # fmt: skip
        acc, up, squares = add_step(acc, up, squares, w, w_up, x, norm, OFFSET, GATED, TRICKS)
    z = tl.sum(acc, axis=1)
    if GATED:
        z_up = tl.sum(up, axis=1)
    total = tl.sum(squares, axis=0)

    if SPLIT > 1:
        # The parts' sums, and behind those of all programs their sums of squares.
        first = tile.to(tl.int64) * SPLIT
        EACH: tl.constexpr = (1 + GATED) * BLOCK_N
        sums = partial_ptr + first * EACH + tl.arange(0, BLOCK_N)
        totals = partial_ptr + tl.num_programs(0).to(tl.int64) * EACH + first
        tl.store(sums + part * BLOCK_N, z)
        if GATED:
            tl.store(sums + (SPLIT + part) * BLOCK_N, z_up)
        tl.store(totals + part, total)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = tl.zeros((BLOCK_N,), tl.float32)
        total = 0.0
        for s in tl.static_range(SPLIT):
            z += tl.load(sums + s * BLOCK_N, cache_modifier=".cg")
            total += tl.load(totals + s, cache_modifier=".cg")
        if GATED:
            z_up = tl.zeros((BLOCK_N,), tl.float32)
            for s in tl.static_range(SPLIT):
                z_up += tl.load(sums + (SPLIT + s) * BLOCK_N, cache_modifier=".cg")

    n = n_inner if GROUP == 0 else 2 * n_inner  # elements of x
    rstd = tl.rsqrt(total / n + EPS)
    z *= rstd
    if HAS_SCALE:
        z *= row_scale
    if HAS_BIAS:
        z += row_bias
    if GATED:
        z_up *= rstd
        if HAS_SCALE:
            z_up *= up_scale
        if HAS_BIAS:
            z_up += up_bias
        z = activate(z, ACTIVATION) * z_up
    tl.store(out_ptr + cols, z.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, activation: str, form: Format,
    even_k: bool, prefetched: int, c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    options = {"launch_pdl": True} if prefetched >= 0 else {}
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "ACTIVATION": activation,
        "GATED": activation != "",
        **form.constants(),
        "HAS_BIAS": dtypes[4] is not None,
        "EVEN_K": even_k,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "SPLIT": c.split_k,
        "STAGES": c.num_stages,
        "PREFETCH": prefetched,
    }
    return launching.KernelLauncher(_gemv_kernel, constants, num_warps=c.num_warps, **options)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target, numbers: int = 1) -> str | None:
    """Why this kernel can't run that problem so; None where it can. Any layout of the weight is taken."""
    return product.can_implement(p, c, target, numbers)


def launch(
    x: Tensor, norm_weight: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, eps: float, offset: float,
    c: MatmulConfig, activation: str = "", scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch it: x (1, K) contiguous, w (N, K), out (1, N); with an activation it is gated, and w (2N, K).

    Of 8 bits w has `scale`, float32, one for each of its rows; of int4 K / 2 columns, and one for each group.
    """
    n_cols, n_inner = out.shape[-1], w.shape[-1]
    tiles = library.cdiv(n_cols, c.block_n)
    partial = counters = None
    if c.split_k > 1:
        each = c.block_n * (2 if activation else 1)
        partial = torch.empty(tiles * c.split_k * (each + 1), dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    # A prefetch is of lines along k.
    early = pdl.supported(runtime.target(x.device)) and (w.stride(1) == 1 or n_inner == 1)
    prefetched = (GATED_PREFETCH if activation else PREFETCH) if early else -1
    w, scale, form = Format.of(w, scale, x.shape[-1], x.dtype)
    dtypes = (x.dtype, norm_weight.dtype, w.dtype, *(None if t is None else t.dtype for t in (scale, bias)))
    plan = _plan(dtypes, eps, offset, activation, form, bool(n_inner % c.block_k == 0), prefetched, c)
    tensors = (x, norm_weight, w, scale, out, bias, partial, counters)
    launching.launch(plan, tiles * c.split_k, tensors, (*w.stride(), n_inner), (n_cols,))
