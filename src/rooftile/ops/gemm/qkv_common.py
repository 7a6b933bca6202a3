"""What the kernels have in common: the token's angles, and its place in the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.kv_cache.launch import Cache, axis_strides, unit_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def angles_of(cos_ptr, sin_ptr, there, position, first, stride_ct, stride_st, n_angles, BY_POSITION: tl.constexpr):
    """cos and sin of pairs whose `first` elements are those of a head, by the token's position or of its one row."""
    angle = position
    if not BY_POSITION:
        angle = position * 0
    known = there & (angle >= 0) & (angle < n_angles)  # a position outside of the table is turned to NaN
    cos = tl.load(cos_ptr + angle * stride_ct + first, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + angle * stride_st + first, mask=known, other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def rounded(z, rstd, scale, bias, DTYPE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The product as it would be written, in float32."""
    z *= rstd
    if HAS_SCALE:
        z *= scale
    if HAS_BIAS:
        z += bias
    return z.to(DTYPE).to(tl.float32)


@triton.jit
def into_place(
    a, b, cos, sin, q_ptr, k_cache_ptr, v_cache_ptr, head, first, mine, there, page, line, written, stride_kcb,
    stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Turn the pairs (a, b), elements `first` and `first + APART` of their heads, but those of v; write them.

    One tensor of both elements for the stores of all three, so that the numbers are brought to their layout once.
    """
    of_q, of_v = head < Q_HEADS, head >= Q_HEADS + HEADS
    turned = tl.where(there[:, None], tl.join(a * cos - b * sin, b * cos + a * sin), 0.0)
    y = tl.where(of_v[:, None], tl.join(a, b), turned).to(q_ptr.dtype.element_ty)
    elements = tl.join(first, first + APART)
    tl.store(q_ptr + (head * D)[:, None] + elements, y, mask=(mine & of_q)[:, None])
    at = page * stride_kcb + line * stride_kct + (head - Q_HEADS).to(tl.int64) * stride_kch
    tl.store(k_cache_ptr + at[:, None] + elements, y, mask=(mine & written & ~of_q & ~of_v)[:, None])
    at = page * stride_vcb + line * stride_vct + (head - Q_HEADS - HEADS).to(tl.int64) * stride_vch
    tl.store(v_cache_ptr + at[:, None] + elements, y, mask=(mine & written & of_v)[:, None])


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a launch's arguments those that say where q, k and v go, and by what angles q and k are turned."""

    tensors: tuple[Tensor | None, ...]  # q, the caches, cos and sin, lengths, counts, the table
    strides: tuple[int, ...]  # of the caches' blocks, heads and rows, and of the rows of cos and sin
    numbers: tuple[int, ...]  # positions, pages, angles
    key: tuple[Any, ...]  # of a plan: heads of q and of k, and their size; a page; whether counts; by position


def place_of(cos: Tensor, sin: Tensor, q_out: Tensor, cache: Cache) -> Place:
    """That of one token, q_out (1, 1, Hq, D)."""
    q_heads, head_dim = q_out.shape[-2:]
    heads, _, _, page, has_counts, *_ = cache.constants(cache.k.shape[cache.layout.index("h")], head_dim, head_dim)
    cos, sin = unit_last(cos), unit_last(sin)
    of_cache = (*axis_strides(cache.k, cache.layout), *axis_strides(cache.v, cache.layout))
    return Place(
        (q_out, cache.k, cache.v, cos, sin, *cache.indices()),
        (*of_cache, cos.stride(-2), sin.stride(-2)),
        (*cache.numbers(), cos.shape[-2]),
        ((q_heads, heads, head_dim), page, has_counts, cos.dim() == 2),
    )
