"""The one kernel for weights of 16 bits: x is normalised once and stays in registers while pairs of rows pass.

It is the GEMV of `gemv_persistent.py`, whose docstring says why, over tiles that are pairs of the weight's rows which
RoPE turns together: their sums lie side by side, as those of a gate and its up do there. Where the token goes is asked
for once, and a pair's angle at the head of its tile, so that nothing is waited for once the sums are known.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig
from rooftile.ops.gemm.gemv_persistent import hold, is_limited, limit, load_rows, prefetch_rows, programs_for
from rooftile.ops.gemm.qkv_common import angles_of, into_place, place_of
from rooftile.ops.kv_cache.kernel import _places as places
from rooftile.ops.kv_cache.launch import Cache
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton  # isort: skip
import triton.language as tl  # isort: skip

STYLES = ("half", "interleaved")


@triton.jit
def _pairs_of(tile, N_PAIRS: tl.constexpr, PAIRS: tl.constexpr):
    """The tile's pairs; in bounds, so that their loads need no mask."""
    return tl.minimum(tile * PAIRS + tl.arange(0, PAIRS), N_PAIRS - 1)


@triton.jit
def _rows_of(tile, N_PAIRS: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr, PAIRS: tl.constexpr):
    """The rows of the weight of the tile's pairs, a pair's two side by side."""
    r = tl.arange(0, PAIRS * 2)
    pair = tl.minimum(tile * PAIRS + r // 2, N_PAIRS - 1)
    if APART == 1:
        first = pair * 2
    else:
        first = pair + pair // HALF * HALF
    return (first + r % 2 * APART).to(tl.int64)


@triton.jit(do_not_specialize=["capacity", "n_pages", "n_angles"])
def _qkv_gemv_persistent_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
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
    HAS_BIAS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BY_POSITION: tl.constexpr,
    APART: tl.constexpr,
    EVEN_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    LETS_START: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    N_PAIRS: tl.constexpr = (Q_HEADS + 2 * HEADS) * HALF
    TILES: tl.constexpr = (N_PAIRS + PAIRS - 1) // PAIRS
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = _rows_of(tile, N_PAIRS, HALF, APART, PAIRS)
    if EARLY:
        prefetch_rows(w_ptr, rows, stride_wn, n_inner, BLOCK_K)
        pdl_wait()
    if AHEAD:  # before x, for which a program would wait with nothing else under way
        coming = load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
    there, position, page, line, written = places(
        lengths_ptr, counts_ptr, table_ptr, 0, 0, tl.zeros((1,), tl.int64), 1, capacity, n_pages, HAS_COUNTS, PAGE
    )
    x, rstd = hold(x_ptr, norm_ptr, n_inner, EPS, OFFSET, True, EVEN_K, BLOCK_K)

    for t in tl.range(tile, TILES, programs, num_stages=1):
        # With its last tile: what starts before that is only in the way.
        if LETS_START:  # noqa: SIM102  # a constant, which decides before there is a program
            if t + programs >= TILES:
                pdl_launch_dependents()
        rows = _rows_of(t, N_PAIRS, HALF, APART, PAIRS)
        pair = _pairs_of(t, N_PAIRS, PAIRS)
        head, i = pair // HALF, pair % HALF
        first = i * 2 if APART == 1 else i  # of the pair's two elements of its head
        bias = tl.zeros((PAIRS * 2,), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows).to(tl.float32)
        cos, sin = angles_of(
            cos_ptr, sin_ptr, there, position, first, stride_ct, stride_st, n_angles, BY_POSITION
        )  # fmt: skip
        if AHEAD:
            w = coming
            following = _rows_of(t + programs, N_PAIRS, HALF, APART, PAIRS)
            coming = load_rows(
                w_ptr, following, stride_wn, stride_wk, n_inner, t + programs < TILES, EVEN_K, BLOCK_K
            )  # fmt: skip
        else:
            w = load_rows(w_ptr, rows, stride_wn, stride_wk, n_inner, True, EVEN_K, BLOCK_K)
        z = tl.sum(w.to(tl.float32) * x, axis=1) * rstd
        if HAS_BIAS:
            z += bias
        a, b = tl.split(z.to(DTYPE).to(tl.float32).reshape(PAIRS, 2))  # the product as it would be written
        mine = t * PAIRS + tl.arange(0, PAIRS) < N_PAIRS
        into_place(
            a, b, cos, sin, q_ptr, k_cache_ptr, v_cache_ptr, head, first, mine, there, page, line, written,
            stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, HEADS, D, APART,
        )  # fmt: skip


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, heads: tuple[int, int, int], page: int,
    has_counts: bool, by_position: bool, apart: int, even_k: bool, lets_start: bool, early: bool, limited: bool,
    c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "HAS_BIAS": dtypes[3] is not None,
        "Q_HEADS": heads[0],
        "HEADS": heads[1],
        "D": heads[2],
        "PAGE": page,
        "HAS_COUNTS": has_counts,
        "BY_POSITION": by_position,
        "APART": apart,
        "EVEN_K": even_k,
        "PAIRS": c.block_n // 2,
        "BLOCK_K": c.block_k,
        "AHEAD": c.num_stages > 1,
        "LETS_START": lets_start,
        "EARLY": early,
    }
    return launching.KernelLauncher(
        _qkv_gemv_persistent_kernel, constants, num_warps=c.num_warps, **limit(limited), **pdl.options(early)
    )


def launch(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor,
    eps: float, offset: float, style: str, cache: Cache, c: MatmulConfig,
) -> None:  # fmt: skip
    """Launch it: x (1, K) contiguous, w (N, K), cos and sin with a row for each position, or one, q_out (1, 1, Hq, D).

    `c` is of rms_norm_linear's kernel "gemv_persistent" for one row, whose tiles of `block_n` rows are half as many
    pairs.
    """
    n_inner, head_dim = x.shape[-1], q_out.shape[-1]
    target = runtime.target(x.device)
    lets_start = pdl.supported(target)
    # A prefetch is of lines along k.
    early = pdl.early(x) and (w.stride(1) == 1 or n_inner == 1)
    place = place_of(cos, sin, q_out, cache)
    dtypes = tuple(None if t is None else t.dtype for t in (x, norm_weight, w, bias, *place.tensors))
    apart = head_dim // 2 if style == "half" else 1
    even = bool(n_inner == c.block_k)
    plan = _plan(dtypes, eps, offset, *place.key, apart, even, lets_start, early, is_limited(w, target), c)
    programs = programs_for(library.cdiv(w.shape[0] // 2, c.block_n // 2), c, target)
    strides = (*w.stride(), *place.strides, n_inner)
    launching.launch(plan, programs, (x, norm_weight, w, bias, *place.tensors), strides, place.numbers)
