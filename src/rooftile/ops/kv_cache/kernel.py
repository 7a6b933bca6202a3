"""The two kernels that write new keys and values into a cache."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: it fixes the mode of the process
from rooftile.primitives.paging import locate_tokens
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.quantize import magnitude, rounded, scale_of
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _begin(EARLY: tl.constexpr):
    """What is behind may be decode attention, which looks at lengths and pages at once: it shall find them as they are
    now. These kernels write neither."""
    if EARLY:
        pdl_wait()
        pdl_launch_dependents()


@triton.jit
def _inverse(most, scale_ptr, heads, written, n_heads, stride_sh, SCALES: tl.constexpr, FORMAT: tl.constexpr):
    """What a row is multiplied by before it is rounded: the scale is given, or that of the row, which is stored."""
    if SCALES == "token":
        scale = scale_of(most, FORMAT)
        tl.store(scale_ptr, scale, mask=written)
    else:
        scale = tl.load(scale_ptr + heads * stride_sh, mask=heads < n_heads, other=1.0)
        scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    return 1.0 / scale


@triton.jit
def _copy(
    x_ptr,
    y_ptr,
    scale_ptr,
    stride_xb,
    stride_xh,
    stride_xt,
    stride_yb,
    stride_yh,
    stride_yt,
    stride_sb,
    stride_sh,
    stride_st,
    n_heads,
    batch,
    tokens,
    block,
    row,
    written,
    D: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The heads of those tokens as the cache keeps them, at their places in it."""
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
            most = tl.max(magnitude(x), axis=2, keep_dims=True)
            x = x * _inverse(most, scale_ptr, heads, head_mask, n_heads, stride_sh, SCALES, FORMAT)
        x = rounded(x, FORMAT, SCALES == "token", y_ptr.dtype.element_ty)

    tl.store(y_ptr + block * stride_yb + row * stride_yt + heads * stride_yh + cols, x, mask=mask)


@triton.jit
def _turn(
    x_ptr,
    tokens,
    there,
    cos,
    sin,
    R: tl.constexpr,
    D: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The heads at x_ptr: their pairs turned, in float32, and what stands behind the rotary dimension."""
    a, b = load_pairs(x_ptr, pair_columns(there, R, BLOCK_R), R, PAIRS_IN, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=False)
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
    if R < D:
        rest = tl.load(x_ptr + rest, mask=there & (rest < D), other=0.0)
    return a * cos - b * sin, b * cos + a * sin, rest


# The strides of lengths' and the table's rows follow the batch; the numbers after them change from call to call.
@triton.jit(do_not_specialize=["stride_tb", "n_tokens", "capacity", "n_pages"])
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    lengths_ptr,
    counts_ptr,
    table_ptr,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_kcb,
    stride_kch,
    stride_kct,
    stride_vcb,
    stride_vch,
    stride_vct,
    stride_ksb,
    stride_ksh,
    stride_kst,
    stride_vsb,
    stride_vsh,
    stride_vst,
    stride_tb,
    n_tokens,
    capacity,
    n_pages,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,
):
    _begin(EARLY)
    blocks = tl.cdiv(n_tokens, BLOCK_T)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    _, _, block, row, written = locate_tokens(
        lengths_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS, PAGE
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
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_ptr,
    sin_ptr,
    lengths_ptr,
    counts_ptr,
    table_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_qob,
    stride_qoh,
    stride_qot,
    stride_kcb,
    stride_kch,
    stride_kct,
    stride_vcb,
    stride_vch,
    stride_vct,
    stride_ksb,
    stride_ksh,
    stride_kst,
    stride_vsb,
    stride_vsh,
    stride_vst,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_tb,
    n_tokens,
    capacity,
    n_pages,
    n_angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    R: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    _begin(EARLY)
    blocks = tl.cdiv(n_tokens, BLOCK_T)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    there, position, block, row, written = locate_tokens(
        lengths_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS, PAGE
    )
    if BY_POSITION:
        angles = position
    else:
        angles = tokens
    cos, sin = load_angles(
        cos_ptr, sin_ptr, None, batch, angles, there, stride_cb, stride_ct, stride_sb, stride_st, 0, 0, n_angles,
        R, False, False, ANGLE_STEP, BLOCK_R,
    )  # fmt: skip
    # What is no token, or no pair, has no angle, and is zero.
    turned = there[:, None, None] & (tl.arange(0, BLOCK_R // 2)[None, None, :] < R // 2)
    cos, sin = tl.where(turned, cos, 0.0), tl.where(turned, sin, 0.0)
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]

    heads = tl.arange(0, BLOCK_Q)[None, :, None].to(tl.int64)
    at = tokens[:, None, None]
    head_mask = (at < n_tokens) & (heads < Q_HEADS)
    a, b, x = _turn(
        q_ptr + batch * stride_qb + at * stride_qt + heads * stride_qh, tokens,
        there[:, None, None] & (heads < Q_HEADS), cos, sin, R, D, PAIRS_IN, BLOCK_T, BLOCK_Q, BLOCK_R, BLOCK_REST,
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
    a, b, x = _turn(
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
            most = tl.max(tl.maximum(magnitude(a), magnitude(b)), axis=2, keep_dims=True)
            if R < D:
                most = tl.maximum(most, tl.max(magnitude(x), axis=2, keep_dims=True))
            inverse = _inverse(most, k_scale_ptr, heads, head_mask, HEADS, stride_ksh, SCALES, FORMAT)
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
