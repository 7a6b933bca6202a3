"""What the kernels of the portable backward share: what they are compiled for, rows in two parts, and probabilities.

A head's dimension is held in one or two blocks, powers of two: 80 as 64 + 16.
"""

from __future__ import annotations

import dataclasses

from rooftile.ops.attention.parts import is_seen, load_rows, store_rows
from rooftile.primitives.scores import LOG2E, capped_scores

import triton  # isort: skip
import triton.language as tl  # isort: skip


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that a kernel is compiled for but dtypes and strides: its one constant, T.

    Attributes:
        rows, cols: queries and keys of a tile.
        head_dim, head_parts, value_dim, value_parts: a dimension and its blocks, as `split_dim` gives them.
        capped, has_left, has_right: see `Scoring.flags`.
        shared: query heads share KV heads; how many is an argument.
        alibi: dimensions of the slopes: 0 for none, 1 by head, 2 by sequence and head.
        even: the sequence is a whole number of steps.
        wanted: which gradients: "dq", "dk", "dv" or "dkdv".
    """

    rows: int
    cols: int
    stages: int
    head_dim: int
    head_parts: tuple[int, int]
    value_dim: int
    value_parts: tuple[int, int]
    shared: bool
    capped: bool
    has_left: bool
    has_right: bool
    mask: str
    alibi: int
    packed: bool
    even: bool
    wanted: str

    @property
    def limited(self) -> bool:
        return self.has_left or self.has_right


@triton.jit
def load(ptr, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr):
    """Both parts of rows (R, 1); without a second part, the first one twice."""
    a = load_rows(ptr, rows, inside, stride, N, 0, A, MASKED)
    b = a
    if B > 0:
        b = load_rows(ptr, rows, inside, stride, N, A, B, MASKED)
    return a, b


@triton.jit
def zeros(R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Two accumulators; without a second part, the second one is a column that is not used."""
    return tl.zeros((R, A), tl.float32), tl.zeros((R, B if B > 0 else 1), tl.float32)


@triton.jit
def store(ptr, a, b, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Store both parts to rows (R, 1)."""
    store_rows(ptr, a, rows, inside, stride, N, 0, A)
    if B > 0:
        store_rows(ptr, b, rows, inside, stride, N, A, B)


@triton.jit
def dot(a, b, x, y, acc, B: tl.constexpr):
    """acc + (a, b) @ (x, y)ᵀ, summed over both parts."""
    acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    if B > 0:
        acc = tl.dot(b, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def add_dots(a, b, left, x, y, B: tl.constexpr):
    """(a, b) + left @ (x, y)."""
    left = left.to(x.dtype)
    a = tl.dot(left, x, a, input_precision="ieee")
    if B > 0:
        b = tl.dot(left, y, b, input_precision="ieee")
    return a, b


@triton.jit
def load_lse(lse_ptr, row, n_q):
    """lse times log2(e); +inf, which makes p 0, for rows that see nothing (-inf) or don't exist."""
    lse = tl.load(lse_ptr + row, mask=row < n_q, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def probabilities(
    products,
    lse,
    rows,
    cols,
    offset,
    n_q,
    n_k,
    mask_ptr,
    stride_mq,
    stride_mk,
    slope,
    scoring,
    MASKED: tl.constexpr,
    T: tl.constexpr,
):
    """p of q·k, and the scores before biases; rows and cols broadcast to the tile, transposed or not."""
    factor, cap, left, right = scoring
    scores = capped_scores(products, factor, cap, T.capped)
    biased = scores
    if T.alibi:
        biased -= tl.abs(rows + offset - cols).to(tl.float32) * slope
    if T.mask != "":
        there = (rows < n_q) & (cols < n_k)
        at = mask_ptr + rows.to(tl.int64) * stride_mq + cols.to(tl.int64) * stride_mk
        mask = tl.load(at, mask=there, other=0.0)
    if T.mask == "float":
        biased += mask.to(tl.float32) * LOG2E
    p = tl.exp2(biased - lse)
    if MASKED:
        visible = is_seen(rows + offset, cols, n_k, left, right, T.has_left, T.has_right)
        if T.mask == "bool":
            visible &= mask != 0
        p = tl.where(visible, p, 0.0)
    return p, scores


@triton.jit
def uncapped_gradient(ds, scores, cap, CAPPED: tl.constexpr):
    """The gradient of the scores before the cap: ds, the gradient of the capped scores, times 1 - tanh².

    It is not multiplied by `scale` yet. `scores` are what `capped_scores` gave, so tanh is scores / cap.
    """
    if CAPPED:
        t = scores * (1.0 / cap)
        return ds * (1.0 - t * t)
    else:
        return ds
