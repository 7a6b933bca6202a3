"""The one kernel for what `held` and `digits` do not take: every program brings all of x, by parts.

A program has `block_n` pairs of rows of the weight, i and i + head_dim / 2 of a head, which RoPE turns together, and
walks along them and x as `rms_norm_linear` does for one row. Where the token goes, and its angles, it asks for while
the first step's parts of the weight are on their way, so that at the end nothing is waited for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig
from rooftile.ops.gemm.norm_gemv import add_step, load_step
from rooftile.ops.gemm.qkv_common import angles_of, into_place, place_of, rounded
from rooftile.ops.kv_cache.kernel import _places as places
from rooftile.ops.kv_cache.launch import Cache
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.weights import Format, no_sums

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Blocks of its weights that a program brings into the L2 before the kernel ahead has ended, as rms_norm_linear's does;
# -1: it is started after it.
PREFETCH = 1
STYLES = ("half",)


@triton.jit(do_not_specialize=["capacity", "n_pages", "n_angles"])
def _qkv_gemv_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_ptr,
    sin_ptr,
    lengths_ptr,
    counts_ptr,
    table_ptr,
    stride_wn,
    stride_wk,
    stride_kcb,
    stride_kch,
    stride_kct,
    stride_vcb,
    stride_vch,
    stride_vct,
    stride_ct,
    stride_st,
    n_inner,
    capacity,
    n_pages,
    n_angles,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    TRICKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BY_POSITION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    N_PAIRS: tl.constexpr = (Q_HEADS + 2 * HEADS) * HALF
    pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = pair < N_PAIRS
    pair = tl.minimum(pair, N_PAIRS - 1)  # in bounds, so that loads need no mask
    head = pair // HALF
    i = pair % HALF
    rows = (head * D + i).to(tl.int64)
    block = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + block.to(tl.int64)[None, :] * stride_wk
    other_ptrs = w_ptr + (rows + HALF)[:, None] * stride_wn + block.to(tl.int64)[None, :] * stride_wk
    if PREFETCH >= 0:
        pdl_launch_dependents()
        LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE
        for b in tl.static_range(PREFETCH):
            at = tl.minimum(lines + b * BLOCK_K, n_inner - 1)[None, :]
            prefetch(w_ptr + rows[:, None] * stride_wn + at)
            prefetch(w_ptr + (rows + HALF)[:, None] * stride_wn + at)
        pdl_wait()

    row_scale, other_scale, row_bias, other_bias = 0.0, 0.0, 0.0, 0.0
    if HAS_SCALE:
        row_scale = tl.load(scale_ptr + rows)
        other_scale = tl.load(scale_ptr + rows + HALF)
    if HAS_BIAS:
        row_bias = tl.load(bias_ptr + rows).to(tl.float32)
        other_bias = tl.load(bias_ptr + rows + HALF).to(tl.float32)

    # The first step's loads, then those of the token's place, which wait for one another, then all else.
    w, other, x, norm = load_step(
        w_ptrs, other_ptrs, scale_ptr, rows, rows + HALF, x_ptr, norm_ptr, 0, 0, n_inner, True, GROUP, GROUPS, PAIRS,
        EVEN_K, BLOCK_K,
    )  # fmt: skip
    there, position, page, line, written = places(
        lengths_ptr, counts_ptr, table_ptr, 0, 0, tl.zeros((1,), tl.int64), 1, capacity, n_pages, HAS_COUNTS, PAGE
    )
    cos, sin = angles_of(cos_ptr, sin_ptr, there, position, i, stride_ct, stride_st, n_angles, BY_POSITION)

    a_sums = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    b_sums = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    a_sums, b_sums, squares = add_step(a_sums, b_sums, squares, w, other, x, norm, OFFSET, True, TRICKS)
    for k in tl.range(BLOCK_K, n_inner, BLOCK_K, num_stages=STAGES):
        step = k.to(tl.int64) * stride_wk
        w, other, x, norm = load_step(
            w_ptrs, other_ptrs, scale_ptr, rows, rows + HALF, x_ptr, norm_ptr, k, step, n_inner, True, GROUP, GROUPS,
            PAIRS, EVEN_K, BLOCK_K,
        )  # fmt: skip
        a_sums, b_sums, squares = add_step(a_sums, b_sums, squares, w, other, x, norm, OFFSET, True, TRICKS)

    n = n_inner if GROUP == 0 else 2 * n_inner  # elements of x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n + EPS)
    # One sum for both rows of a pair: each is a way through shared memory.
    z = tl.sum(tl.permute(tl.join(a_sums, b_sums), (2, 0, 1)), axis=2)
    a, b = tl.split(tl.permute(z, (1, 0)))
    a = rounded(a, rstd, row_scale, row_bias, DTYPE, HAS_SCALE, HAS_BIAS)
    b = rounded(b, rstd, other_scale, other_bias, DTYPE, HAS_SCALE, HAS_BIAS)
    into_place(
        a, b, cos, sin, q_ptr, k_cache_ptr, v_cache_ptr, head, i, mine, there, page, line, written,
        stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, HEADS, D, HALF,
    )  # fmt: skip


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, form: Format, heads: tuple[int, int, int],
    page: int, has_counts: bool, by_position: bool, even_k: bool, prefetched: int, c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        **form.constants(),
        "HAS_BIAS": dtypes[4] is not None,
        "Q_HEADS": heads[0],
        "HEADS": heads[1],
        "D": heads[2],
        "PAGE": page,
        "HAS_COUNTS": has_counts,
        "BY_POSITION": by_position,
        "EVEN_K": even_k,
        "BLOCK_N": c.block_n // 2,
        "BLOCK_K": c.block_k,
        "STAGES": c.num_stages,
        "PREFETCH": prefetched,
    }
    return launching.KernelLauncher(_qkv_gemv_kernel, constants, num_warps=c.num_warps, **pdl.options(prefetched >= 0))


def launch(
    x: Tensor, norm_weight: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None, cos: Tensor, sin: Tensor,
    q_out: Tensor, eps: float, offset: float, cache: Cache, c: MatmulConfig,
) -> None:  # fmt: skip
    """Launch it: x (1, K) contiguous, w (N, K), cos and sin with a row for each position, or one, q_out (1, 1, Hq, D).

    `c` is of rms_norm_linear's kernel for one row, of which a program has half the rows as pairs.
    """
    n_inner = w.shape[-1]
    # A prefetch is of lines along k.
    early = pdl.early(x) and (w.stride(1) == 1 or n_inner == 1)
    w, scale, form = Format.of(w, scale, x.shape[-1], x.dtype)
    place = place_of(cos, sin, q_out, cache)
    tensors = (x, norm_weight, w, scale, bias, *place.tensors)
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    even = bool(n_inner % c.block_k == 0)
    plan = _plan(dtypes, eps, offset, form, *place.key, even, PREFETCH if early else -1, c)
    programs = library.cdiv(w.shape[0] // 2, c.block_n // 2)
    launching.launch(plan, programs, tensors, (*w.stride(), *place.strides, n_inner), place.numbers)
