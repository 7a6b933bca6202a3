"""Epilogue parts that the one-row mainloops share. They are element-wise: kernels in Triton and in Gluon call the same.

z * rstd * scale + bias                                 `scale_and_shift`
q, k rotated by RoPE, k and v written into the cache    `load_angles_of`, `rotate_and_store`, with the host's
                                                        `QkvOutput`
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides, unit_last
from rooftile.primitives.paging import Cache

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def scale_and_shift(
    z, rstd, scale, bias, HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDED: tl.constexpr = tl.float32,
):  # fmt: skip
    """`z * rstd * scale + bias`, each where there is one, in float32, rounded to another dtype where one is given."""
    if HAS_NORM:
        z *= rstd
    if HAS_SCALE:
        z *= scale
    if HAS_BIAS:
        z += bias
    return z.to(ROUNDED).to(tl.float32)


@triton.jit
def load_angles_of(
    cos_ptr, sin_ptr, exists, position, first, stride_ct, stride_st, n_angles, BY_POSITION: tl.constexpr
):  # fmt: skip
    """cos and sin for pairs whose first elements are elements `first` of a head.

    The tables have a row for each position, or (not BY_POSITION) one row. A position outside of them gives NaN.
    """
    angle = position
    if not BY_POSITION:
        angle = position * 0
    known = exists & (angle >= 0) & (angle < n_angles)
    cos = tl.load(cos_ptr + angle * stride_ct + first, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + angle * stride_st + first, mask=known, other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def rotate_and_store(
    a, b, cos, sin, q_ptr, k_cache_ptr, v_cache_ptr, head, first, inside, exists, page, line, written, stride_kcb,
    stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs (a, b) of q and k, and write q to its output, k and v to line `line` of page `page`.

    a is element `first` of head `head`, and b element `first + APART`; heads count those of q, then of k, then of v.
    a and b are joined before the three stores, so that elements change their layout once.
    """
    of_q, of_v = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    rotated = tl.where(exists[:, None], tl.join(a * cos - b * sin, b * cos + a * sin), 0.0)
    y = tl.where(of_v[:, None], tl.join(a, b), rotated).to(q_ptr.dtype.element_ty)
    elements = tl.join(first, first + APART)
    tl.store(q_ptr + (head * HEAD_DIM)[:, None] + elements, y, mask=(inside & of_q)[:, None])
    at = page * stride_kcb + line * stride_kct + (head - Q_HEADS).to(tl.int64) * stride_kch
    tl.store(k_cache_ptr + at[:, None] + elements, y, mask=(inside & written & ~of_q & ~of_v)[:, None])
    at = page * stride_vcb + line * stride_vct + (head - Q_HEADS - KV_HEADS).to(tl.int64) * stride_vch
    tl.store(v_cache_ptr + at[:, None] + elements, y, mask=(inside & written & of_v)[:, None])


@dataclasses.dataclass(frozen=True)
class QkvOutput:
    """Kernel arguments of the epilogue that rotates q and k and writes k and v into a cache, for one token.

    Attributes:
        tensors: the caches, cos and sin, starts, counts, the page table.
        strides: of pages (or batch entries), heads and tokens of both caches, then of the rows of cos and of sin.
        sizes: positions of a sequence, pages, rows of cos.
        constants: Q_HEADS, KV_HEADS, HEAD_DIM, APART (elements between the two of a pair), PAGE (tokens of a page, or
            0), HAS_COUNTS and BY_POSITION (whether cos has a row for each position), in the order of `CONSTANTS`.
    """

    tensors: tuple[Tensor | None, ...] = (None,) * 7
    strides: tuple[int | None, ...] = (None,) * 8
    sizes: tuple[int, int, int] = (0, 0, 0)
    constants: tuple[int, ...] = (0, 0, 0, 0, 0, False, False)

    @staticmethod
    def of(cos: Tensor, sin: Tensor, q_heads: int, head_dim: int, style: str, cache: Cache) -> QkvOutput:
        """For tables of angles, `(positions, D)` or `(1, 1, D)`, and the cache that k and v go to."""
        kv_heads = int(cache.k.shape[cache.layout.index("h")])
        cos, sin = unit_last(cos), unit_last(sin)
        of_cache = (*axis_strides(cache.k, cache.layout), *axis_strides(cache.v, cache.layout))
        apart = head_dim // 2 if style == "half" else 1
        return QkvOutput(
            (cache.k, cache.v, cos, sin, *cache.indices()),
            (*of_cache, cos.stride(-2), sin.stride(-2)),
            (*cache.numbers(), cos.shape[-2]),
            (q_heads, kv_heads, head_dim, apart, cache.page_size, cache.counts is not None, cos.dim() == 2),
        )

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return tuple(None if t is None else t.dtype for t in self.tensors)


CONSTANTS = ("Q_HEADS", "KV_HEADS", "HEAD_DIM", "APART", "PAGE", "HAS_COUNTS", "BY_POSITION")
NO_QKV = QkvOutput()
