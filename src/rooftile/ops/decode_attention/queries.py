"""The rows of a tile: the query heads of one KV head, times the new tokens, and what they hold."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def rows_of(within, n_new, rows, GROUP: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """An item's rows, and which of them there are; their tokens, and their heads."""
    row = (within % TILES) * ROWS + rows
    return row, (rows < ROWS) & (row < n_new * GROUP), row // GROUP, within // TILES * GROUP + row % GROUP


@triton.jit
def _columns(
    q_ptr, rows_at, mask, first: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns of the query's rows, transposed; in `along_rows`'s order, of pairs."""
    cols = tl.arange(0, D)
    if PAIRS != "":
        cols = cols % (D // 2) * 2 + cols // (D // 2)
    cols += first
    return tl.load(q_ptr + rows_at[None, :] + cols[:, None], mask=mask[None, :] & (cols < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def queries_of(
    q_ptr, part, n_new, rows, stride_qb, stride_qt, stride_qh, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The query's rows of a part, in two parts of their columns; of a part of no blocks nothing is read."""
    seq, within, _, _, low, high, _, _, _, _, _ = part
    _, mask, token, head = rows_of(within, n_new, rows, GROUP, TILES, ROWS)
    mask &= low < high
    at = seq.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = _columns(q_ptr, at, mask, 0, D0, HEAD_DIM, PAIRS)
    q_second = q
    if D1 > 0:
        q_second = _columns(q_ptr, at, mask, D0, D1, HEAD_DIM, PAIRS)
    return q, q_second


@triton.jit
def largest_of(q):
    return tl.max(tl.abs(q.to(tl.float32)), axis=0)


@triton.jit
def scaled(q, by):
    return (q.to(tl.float32) * by[None, :]).to(tl.float16)
