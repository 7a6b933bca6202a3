"""RoPE: the first R elements of a head as pairs (a, b), and the angles by which a token rotates them."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: it fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def pair_columns(row_mask, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Columns of a head's pairs, where their elements are R / 2 apart and where they are adjacent, and the masks."""
    half = tl.arange(0, BLOCK_R // 2)[None, None, :]
    full = tl.arange(0, BLOCK_R)[None, None, :]
    return half, full, row_mask & (half < R // 2), row_mask & (full < R)


@triton.jit
def load_pairs(
    x_ptr,
    columns,
    R: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONCE: tl.constexpr,
):
    """The pairs of the heads at x_ptr as two float32 tiles (tokens, heads, pairs). ONCE: they are not read again.

    Pairs of adjacent elements (NEIGHBOURS) are loaded as vectors, and split in registers.
    """
    half, full, half_mask, full_mask = columns
    EVICTION: tl.constexpr = "evict_first" if ONCE else ""
    if NEIGHBOURS:
        x = tl.load(x_ptr + full, mask=full_mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK_R // 2, 2)))
    else:
        a = tl.load(x_ptr + half, mask=half_mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        b = tl.load(x_ptr + half + R // 2, mask=half_mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(
    y_ptr,
    a,
    b,
    columns,
    R: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Store pairs as `load_pairs` loads them, in the dtype of y_ptr."""
    half, full, half_mask, full_mask = columns
    if NEIGHBOURS:
        tl.store(y_ptr + full, tl.reshape(tl.join(a, b), (BLOCK_T, BLOCK_H, BLOCK_R)), mask=full_mask)
    else:
        tl.store(y_ptr + half, a, mask=half_mask)
        tl.store(y_ptr + half + R // 2, b, mask=half_mask)


@triton.jit
def load_angles(
    cos_ptr,
    sin_ptr,
    position_ptr,
    batch,
    tokens,
    token_mask,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_pb,
    stride_pt,
    n_positions,
    R: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    INVERSE: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """cos and sin of the angles, or of their negatives (INVERSE), as float32 tiles (tokens, 1, pairs).

    Positions outside of the table, and elements that are masked out, are NaN.
    """
    if HAS_POSITIONS:
        position = tl.load(position_ptr + batch * stride_pb + tokens * stride_pt, mask=token_mask, other=0).to(tl.int64)
    else:
        position = tokens
    # A position outside the table is never read: its rotation is NaN.
    known = (position >= 0) & (position < n_positions)
    half = tl.arange(0, BLOCK_R // 2)
    angle_mask = (token_mask & known)[:, None] & (half < R // 2)[None, :]
    angle = position[:, None] * stride_ct + half[None, :] * ANGLE_STEP
    cos = tl.load(cos_ptr + batch * stride_cb + angle, mask=angle_mask, other=float("nan")).to(tl.float32)
    angle = position[:, None] * stride_st + half[None, :] * ANGLE_STEP
    sin = tl.load(sin_ptr + batch * stride_sb + angle, mask=angle_mask, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    return cos[:, None, :], sin[:, None, :]
