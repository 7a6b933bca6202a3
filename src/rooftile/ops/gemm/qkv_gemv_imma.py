"""The one kernel for weights of int8 and int4 on the integer matrix unit.

How it is multiplied `primitives/digits.py` says. A tile has pairs of rows of the weight, i and i + head_dim / 2 of a
head, which RoPE turns together: a thread has the sums of both. Where the token goes, and its angles, it asks for before
it makes x's digits, so that at the end nothing is waited for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.gemv_imma import options
from rooftile.ops.gemm.qkv_common import angles_of, into_place, place_of, rounded
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig
from rooftile.ops.kv_cache.kernel import _places as places
from rooftile.ops.kv_cache.launch import Cache
from rooftile.primitives.digits import first_weights, in_pairs_of_rows, pairs_apart, sum_products, tile_rows
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.weights import in_pairs

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def _of_weight(row, first, D: gl.constexpr, N_PAIRS: gl.constexpr):
    """Which rows of the weight a tile's are; what is past the last pair is in bounds, and not stored."""
    pair, second = in_pairs_of_rows(row)
    pair = gl.minimum(first + pair, N_PAIRS - 1)
    return pair // (D // 2) * D + pair % (D // 2) + second * (D // 2)


@gluon.jit(do_not_specialize=["capacity", "n_pages", "n_angles"])
def _qkv_gemv_imma_kernel(
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
    stride_kcb,
    stride_kch,
    stride_kct,
    stride_vcb,
    stride_vch,
    stride_vct,
    stride_ct,
    stride_st,
    capacity,
    n_pages,
    n_angles,
    K: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    Q_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    HAS_COUNTS: gl.constexpr,
    BY_POSITION: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    HALF: gl.constexpr = D // 2
    N_PAIRS: gl.constexpr = (Q_HEADS + 2 * HEADS) * HALF
    COUNT: gl.constexpr = BLOCK_N // 2
    HAS_SCALE: gl.constexpr = GROUP == 0
    flat: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0]))
    first = gl.program_id(0) * COUNT
    loaded, summed = tile_rows(BLOCK_N, SLICES)
    rows = _of_weight(loaded, first, D, N_PAIRS), _of_weight(summed, first, D, N_PAIRS)
    if EARLY:
        pdl_launch_dependents()
    coming = first_weights(w_ptr, rows, 0, K, GROUP, SLICES, 1, AHEAD, stride_wn)
    if EARLY:
        pdl_wait()

    pair = first + gl.arange(0, COUNT, layout=flat)
    mine = pair < N_PAIRS
    pair = gl.minimum(pair, N_PAIRS - 1)
    head = pair // HALF
    i = pair % HALF
    row = head * D + i
    scale_a, scale_b, bias_a, bias_b = 0.0, 0.0, 0.0, 0.0
    if HAS_SCALE:
        scale_a = gl.load(scale_ptr + row).to(gl.float32)
        scale_b = gl.load(scale_ptr + row + HALF).to(gl.float32)
    if HAS_BIAS:
        bias_a = gl.load(bias_ptr + row).to(gl.float32)
        bias_b = gl.load(bias_ptr + row + HALF).to(gl.float32)
    there, position, page, line, written = places(
        lengths_ptr, counts_ptr, table_ptr, 0, 0, pair.to(gl.int64) * 0, 1, capacity, n_pages, HAS_COUNTS, PAGE
    )
    cos, sin = angles_of(cos_ptr, sin_ptr, there, position, i, stride_ct, stride_st, n_angles, BY_POSITION)
    z, total = sum_products(
        x_ptr, norm_ptr, w_ptr, scale_ptr, rows, coming, 0, K, GROUP, PAIRS, True, OFFSET, SLICES, 1, AHEAD, stride_wn
    )
    a, b = pairs_apart(z, COUNT, flat)
    rstd = gl.rsqrt(total / K + EPS)
    a = rounded(a, rstd, scale_a, bias_a, DTYPE, HAS_SCALE, HAS_BIAS)
    b = rounded(b, rstd, scale_b, bias_b, DTYPE, HAS_SCALE, HAS_BIAS)
    into_place(
        a, b, cos, sin, q_ptr, k_cache_ptr, v_cache_ptr, head, i, mine, there, page, line, written,
        stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, HEADS, D, HALF,
    )  # fmt: skip


@functools.cache
def _plan(
    k: int, group: int, dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, pairs: str,
    heads: tuple[int, int, int], page: int, has_counts: bool, by_position: bool, c: WeightOnlyConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "K": k,
        "EPS": eps,
        "OFFSET": offset,
        "GROUP": group,
        "PAIRS": pairs,
        "HAS_BIAS": dtypes[4] is not None,
        "Q_HEADS": heads[0],
        "HEADS": heads[1],
        "D": heads[2],
        "PAGE": page,
        "HAS_COUNTS": has_counts,
        "BY_POSITION": by_position,
        "BLOCK_N": c.block_n,
        "SLICES": c.slices,
        "AHEAD": c.num_stages - 1,
        "EARLY": c.prefetch >= 0,
    }
    return launching.KernelLauncher(_qkv_gemv_imma_kernel, constants, num_warps=c.num_warps, **options(c, group, False))


def launch(
    x: Tensor, norm_weight: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor,
    q_out: Tensor, eps: float, offset: float, cache: Cache, c: WeightOnlyConfig,
) -> None:  # fmt: skip
    """Launch it: x (1, K) contiguous, w int8 (N, K) or uint8 (N, K/2), cos and sin with a row for each position, or
    one, q_out (1, 1, Hq, D). Of `c` a program has half the rows as pairs."""
    place = place_of(cos, sin, q_out, cache)
    k, group, pairs = int(x.shape[1]), 0, ""
    dtypes = tuple(None if t is None else t.dtype for t in (x, norm_weight, w, scale, bias, *place.tensors))
    if w.dtype == torch.uint8:
        group = k // int(scale.shape[1])
        scale, pairs = in_pairs(scale)
        w = w.view(torch.int8)
    plan = _plan(k, group, dtypes, eps, offset, pairs, *place.key, c)
    programs = library.cdiv(w.shape[0] // 2, c.block_n // 2)
    tensors = (x, norm_weight, w, scale, bias, *place.tensors)
    launching.launch(plan, programs, tensors, (w.stride(0), *place.strides), place.numbers)
