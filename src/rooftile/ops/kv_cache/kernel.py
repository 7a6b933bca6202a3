"""The two kernels that write new keys and values into a cache, and their launches.

A program writes all heads of a few tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides, unit_last_of
from rooftile.primitives import pdl, quantize
from rooftile.primitives.paging import Cache, locate_tokens
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.quantize import magnitude, rounded, scale_of
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _wait(PDL: tl.constexpr):
    """Wait first: the next kernel may be decode attention, which reads starts and pages without a wait of its own, and
    must find them final. These kernels write neither."""
    if PDL:
        pdl_wait()
        pdl_launch_dependents()


@triton.jit
def _inverse(largest, scale_ptr, heads, written, n_heads, stride_sh, SCALES: tl.constexpr, FORMAT: tl.constexpr):
    """The factor of each row before rounding: 1 / the given scale, or 1 / the row's own scale, which is stored."""
    if SCALES == "token":
        scale = scale_of(largest, FORMAT)
        tl.store(scale_ptr, scale, mask=written)
    else:
        scale = tl.load(scale_ptr + heads * stride_sh, mask=heads < n_heads, other=1.0)
        scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    return 1.0 / scale


@triton.jit
def _copy(
    x_ptr, y_ptr, scale_ptr, stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt, stride_sb, stride_sh,
    stride_st, n_heads, batch, tokens, block, row, written, D: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy (and quantize) the heads of some tokens into the cache."""
    heads = tl.arange(0, BLOCK_H)[None, :, None].to(tl.int64)
    cols = tl.arange(0, BLOCK_D)[None, None, :]
    block, row = block[:, None, None], row[:, None, None]
    head_mask = written[:, None, None] & (heads < n_heads)
    mask = head_mask & (cols < D)

    x = tl.load(x_ptr + batch * stride_xb + tokens[:, None, None] * stride_xt + heads * stride_xh + cols, mask=mask)

    if FORMAT != "":
        x = tl.where(mask, x.to(tl.float32), 0.0)
        if SCALES != "":
            if SCALES == "token":
                scale_ptr += block * stride_sb + row * stride_st + heads * stride_sh
            largest = tl.max(magnitude(x), axis=2, keep_dims=True)
            x = x * _inverse(largest, scale_ptr, heads, head_mask, n_heads, stride_sh, SCALES, FORMAT)
        x = rounded(x, FORMAT, SCALES == "token", y_ptr.dtype.element_ty)

    tl.store(y_ptr + block * stride_yb + row * stride_yt + heads * stride_yh + cols, x, mask=mask)


@triton.jit
def _rotate(
    x_ptr, tokens, exists, cos, sin, R: tl.constexpr, D: tl.constexpr, PAIRS_IN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The heads at x_ptr: their rotated pairs, in float32, and the elements past the rotary dimension."""
    a, b = load_pairs(x_ptr, pair_columns(exists, R, BLOCK_R), R, PAIRS_IN, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=False)
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
    if R < D:
        rest = tl.load(x_ptr + rest, mask=exists & (rest < D), other=0.0)
    return a * cos - b * sin, b * cos + a * sin, rest


# The page table's row stride and the sizes change from call to call: they select no kernel.
@triton.jit(do_not_specialize=["stride_tb", "n_tokens", "capacity", "n_pages"])
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, counts_ptr, table_ptr,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_kcb, stride_kch, stride_kct, stride_vcb,
    stride_vch, stride_vct, stride_ksb, stride_ksh, stride_kst, stride_vsb, stride_vsh, stride_vst, stride_tb,
    n_tokens, capacity, n_pages,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    SCALES: tl.constexpr, FORMAT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _wait(PDL)
    blocks = tl.cdiv(n_tokens, BLOCK_T)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    _, _, block, row, written = locate_tokens(
        starts_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS, PAGE
    )

    _copy(
        k_ptr, k_cache_ptr, k_scale_ptr,
        stride_kb, stride_kh, stride_kt, stride_kcb, stride_kch, stride_kct, stride_ksb, stride_ksh, stride_kst,
        HEADS, batch, tokens, block, row, written, D, SCALES, FORMAT, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    _copy(
        v_ptr, v_cache_ptr, v_scale_ptr,
        stride_vb, stride_vh, stride_vt, stride_vcb, stride_vch, stride_vct, stride_vsb, stride_vsh, stride_vst,
        HEADS, batch, tokens, block, row, written, DV, SCALES, FORMAT, BLOCK_H, BLOCK_DV,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_tb", "n_tokens", "capacity", "n_pages", "n_angles"])
def rope_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, starts_ptr,
    counts_ptr, table_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_qob,
    stride_qoh, stride_qot, stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, stride_ksb,
    stride_ksh, stride_kst, stride_vsb, stride_vsh, stride_vst, stride_cb, stride_ct, stride_sb, stride_st, stride_tb,
    n_tokens, capacity, n_pages, n_angles,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    SCALES: tl.constexpr, FORMAT: tl.constexpr, Q_HEADS: tl.constexpr, R: tl.constexpr, BY_POSITION: tl.constexpr,
    ANGLE_STEP: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _wait(PDL)
    blocks = tl.cdiv(n_tokens, BLOCK_T)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    exists, position, block, row, written = locate_tokens(
        starts_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS, PAGE
    )
    if BY_POSITION:
        angles = position
    else:
        angles = tokens
    cos, sin = load_angles(
        cos_ptr, sin_ptr, None, batch, angles, exists, stride_cb, stride_ct, stride_sb, stride_st, 0, 0, n_angles,
        R, False, False, ANGLE_STEP, BLOCK_R,
    )  # fmt: skip
    # Masked tokens and pairs have no angle, and give zeros.
    rotated = exists[:, None, None] & (tl.arange(0, BLOCK_R // 2)[None, None, :] < R // 2)
    cos, sin = tl.where(rotated, cos, 0.0), tl.where(rotated, sin, 0.0)
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]

    heads = tl.arange(0, BLOCK_Q)[None, :, None].to(tl.int64)
    at = tokens[:, None, None]
    head_mask = (at < n_tokens) & (heads < Q_HEADS)
    a, b, x = _rotate(
        q_ptr + batch * stride_qb + at * stride_qt + heads * stride_qh, tokens,
        exists[:, None, None] & (heads < Q_HEADS), cos, sin, R, D, PAIRS_IN, BLOCK_T, BLOCK_Q, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    q_out_ptr += batch * stride_qob + at * stride_qot + heads * stride_qoh
    DTYPE: tl.constexpr = q_out_ptr.dtype.element_ty
    columns = pair_columns(head_mask, R, BLOCK_R)
    store_pairs(q_out_ptr, a.to(DTYPE), b.to(DTYPE), columns, R, PAIRS_OUT, BLOCK_T, BLOCK_Q, BLOCK_R)
    if R < D:
        tl.store(q_out_ptr + rest, x, mask=head_mask & (rest < D))

    heads = tl.arange(0, BLOCK_H)[None, :, None].to(tl.int64)
    block_at, row_at = block[:, None, None], row[:, None, None]
    head_mask = written[:, None, None] & (heads < HEADS)
    a, b, x = _rotate(
        k_ptr + batch * stride_kb + at * stride_kt + heads * stride_kh, tokens,
        head_mask, cos, sin, R, D, PAIRS_IN, BLOCK_T, BLOCK_H, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    STORED: tl.constexpr = k_cache_ptr.dtype.element_ty
    if FORMAT == "":
        a, b = a.to(STORED), b.to(STORED)
    else:
        if R < D:
            x = x.to(tl.float32)
        if SCALES != "":
            if SCALES == "token":
                k_scale_ptr += block_at * stride_ksb + row_at * stride_kst + heads * stride_ksh
            largest = tl.max(tl.maximum(magnitude(a), magnitude(b)), axis=2, keep_dims=True)
            if R < D:
                largest = tl.maximum(largest, tl.max(magnitude(x), axis=2, keep_dims=True))
            inverse = _inverse(largest, k_scale_ptr, heads, head_mask, HEADS, stride_ksh, SCALES, FORMAT)
            a, b = a * inverse, b * inverse
            if R < D:
                x = x * inverse
        a = rounded(a, FORMAT, SCALES == "token", STORED)
        b = rounded(b, FORMAT, SCALES == "token", STORED)
        if R < D:
            x = rounded(x, FORMAT, SCALES == "token", STORED)
    k_cache_ptr += block_at * stride_kcb + row_at * stride_kct + heads * stride_kch
    store_pairs(k_cache_ptr, a, b, pair_columns(head_mask, R, BLOCK_R), R, PAIRS_OUT, BLOCK_T, BLOCK_H, BLOCK_R)
    if R < D:
        tl.store(k_cache_ptr + rest, x, mask=head_mask & (rest < D))

    _copy(
        v_ptr, v_cache_ptr, v_scale_ptr,
        stride_vb, stride_vh, stride_vt, stride_vcb, stride_vch, stride_vct, stride_vsb, stride_vsh, stride_vst,
        HEADS, batch, tokens, block, row, written, DV, SCALES, FORMAT, BLOCK_H, BLOCK_DV,
    )  # fmt: skip


# Launches


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key: hashed by identity
class CacheWriteConfig:
    """Tokens and warps of a program."""

    block_t: int
    num_warps: int


@functools.cache
def config(elements: int, target: runtime.Target) -> CacheWriteConfig:
    """At least 4096 elements a program and 16 a thread; `elements` is the padded size of a token in q, k or v."""
    if target is runtime.INTERPRETER:
        return CacheWriteConfig(block_t=16, num_warps=4)
    tokens = max(1, 4096 // elements)
    return CacheWriteConfig(tokens, min(1024 // target.warp_size, max(1, tokens * elements // (16 * target.warp_size))))


def _block(n: int) -> int:
    return library.power_of_two(max(1, n))


def _constants(k: Tensor, v: Tensor, layout: str, cache: Cache) -> dict[str, Any]:
    return {
        "HEADS": int(k.shape[layout.index("h")]),
        "D": int(k.shape[3]),
        "DV": int(v.shape[3]),
        "PAGE": cache.page_size,
        "HAS_COUNTS": cache.counts is not None,
        "SCALES": cache.scales,
        "FORMAT": "" if cache.k.dtype == k.dtype else str(cache.k.dtype).removeprefix("torch."),
    }


def _copies_of(cache: Cache, first: int, last: int) -> library.Copies:
    """Conversions of the cache's tensors in a launch: those of `Cache.tensors` from `first`, of `indices` to `last`."""
    copies = library.Copies()
    if quantize.writable(cache.k) is not cache.k:
        copies |= dict.fromkeys((first, first + 1), _as_bytes)
    library.contiguous_of(cache.starts, copies, last - 2)
    library.contiguous_of(cache.counts, copies, last - 1)
    if cache.page_table is not None:
        unit_last_of(cache.page_table, copies, last)
    return copies


def _as_bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


@functools.cache
def _launcher(
    kernel: Any, dtypes: tuple[torch.dtype | None, ...], constants: tuple[tuple[str, Any], ...], num_warps: int
) -> launching.KernelLauncher:
    early = dict(constants)["PDL"]
    return launching.KernelLauncher(kernel, dict(constants), num_warps=num_warps, **pdl.options(early))


def _bind(
    kernel: Any, tensors: tuple[Tensor | None, ...], constants: dict[str, Any], c: CacheWriteConfig, programs: int,
    strides: tuple[int, ...], numbers: tuple[int, ...], copies: library.Copies,
) -> Callable[..., None]:  # fmt: skip
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    launcher = _launcher(kernel, dtypes, tuple(constants.items()), c.num_warps)
    return library.copying(launching.bind(launcher, programs, strides=strides, numbers=numbers), copies)


def prepare_append(k: Tensor, v: Tensor, layout: str, cache: Cache) -> Callable[..., None]:
    """A launch of `append_kernel`: `start(k, v, *cache.tensors(), *cache.indices())`."""
    if k.numel() + v.numel() == 0:
        return library.start_nothing
    copies = _copies_of(cache, 2, 8)
    k, v = unit_last_of(k, copies, 0), unit_last_of(v, copies, 1)
    batch, n_tokens = k.shape[0], k.shape[layout.index("t")]
    constants = _constants(k, v, layout, cache)
    heads, head_dim, value_dim = (_block(constants[name]) for name in ("HEADS", "D", "DV"))
    c = config(heads * max(head_dim, value_dim), runtime.target(k.device))
    constants |= {"BLOCK_T": c.block_t, "BLOCK_H": heads, "BLOCK_D": head_dim, "BLOCK_DV": value_dim}
    constants["PDL"] = pdl.early(k)
    starts, counts, table = cache.indices()
    strides = (*axis_strides(k, layout), *axis_strides(v, layout), *cache.strides())
    return _bind(
        append_kernel, (k, v, *cache.tensors(), starts, counts, table), constants, c,
        batch * library.cdiv(n_tokens, c.block_t), (*strides, 0 if table is None else table.stride(0)),
        (n_tokens, *cache.numbers()), copies,
    )  # fmt: skip


def prepare_rope(
    q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, cos: Tensor, sin: Tensor, style: str, layout: str, cache: Cache
) -> Callable[..., None]:
    """A launch of `rope_kernel`: `start(q, k, v, q_out, *cache.tensors(), cos, sin, *cache.indices())`."""
    if q.numel() + k.numel() + v.numel() == 0:
        return library.start_nothing
    copies = _copies_of(cache, 4, 12)
    q, k, v, cos, sin = (unit_last_of(x, copies, i) for x, i in ((q, 0), (k, 1), (v, 2), (cos, 8), (sin, 9)))
    batch, n_tokens, q_heads = q.shape[0], q.shape[layout.index("t")], int(q.shape[layout.index("h")])
    constants, rotary = _constants(k, v, layout, cache), int(cos.shape[-1])
    heads, head_dim, value_dim = constants["HEADS"], constants["D"], constants["DV"]
    largest = max(_block(max(heads, q_heads)) * _block(head_dim), _block(heads) * _block(value_dim))
    c = config(largest, runtime.target(q.device))
    constants |= {
        "Q_HEADS": q_heads,
        "R": rotary,
        "BY_POSITION": cos.dim() == 2,
        "ANGLE_STEP": 2 if style == "interleaved" else 1,
        "PAIRS_IN": style != "half",
        "PAIRS_OUT": style == "interleaved",
        "BLOCK_T": c.block_t,
        "BLOCK_H": _block(heads),
        "BLOCK_DV": _block(value_dim),
        "BLOCK_Q": _block(q_heads),
        "BLOCK_R": _block(rotary),
        "BLOCK_REST": _block(head_dim - rotary),
        "PDL": pdl.early(q),
    }
    starts, counts, table = cache.indices()
    tables = [s for x in (cos, sin) for s in (x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0, x.stride(-2))]
    strides = [s for x in (q, k, v, q_out) for s in axis_strides(x, layout)]
    return _bind(
        rope_kernel, (q, k, v, q_out, *cache.tensors(), cos, sin, starts, counts, table), constants, c,
        batch * library.cdiv(n_tokens, c.block_t),
        (*strides, *cache.strides(), *tables, 0 if table is None else table.stride(0)),
        (n_tokens, *cache.numbers(), cos.shape[-2]), copies,
    )  # fmt: skip
