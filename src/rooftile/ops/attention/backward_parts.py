"""What both kernels of attention's backward are built from: tiling, places of programs, loads, products."""

from __future__ import annotations

import dataclasses

from rooftile import runtime  # noqa: F401  # before Triton: it fixes the mode of the process
from rooftile.ops.attention.forward_kernel import load_rows, store_rows
from rooftile.ops.attention.scores import LOG2E, capped, seen

import triton  # isort: skip
import triton.language as tl  # isort: skip


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that a kernel is compiled for but dtypes and strides: one constant of it.

    Attributes:
        rows, cols: queries and keys of a tile.
        head_dim, head_parts, value_dim, value_parts: a dimension, and the powers of two that hold it; the second may
            be 0.
        shared: query heads share KV heads; how many do is a number of the launch.
        even: the walk's steps fill the sequence: nothing lies past its end.
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
    scale: float
    softcap: float
    left: int
    right: int
    mask: str
    alibi: bool
    packed: bool
    even: bool
    wanted: str

    @property
    def windowed(self) -> bool:
        return self.left >= 0 or self.right >= 0


@triton.jit
def place(n_lanes, n_blocks, together):
    """Which lane (a head of a batch entry) and which of its blocks this program has.

    The blocks of `together` lanes take turns, so that what they walk over stays in the L2, and blocks of a low number
    start first in all of them.
    """
    section = tl.program_id(0) // (together * n_blocks)
    i = tl.program_id(0) - section * together * n_blocks
    first = section * together
    size = tl.minimum(n_lanes - first, together)
    return first + i % size, i // size


@triton.jit
def load(ptr, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr):
    """Rows (R, 1) in their two parts; where there is no second, the first stands for it."""
    a = load_rows(ptr, rows, inside, stride, N, 0, A, MASKED)
    b = a
    if B > 0:
        b = load_rows(ptr, rows, inside, stride, N, A, B, MASKED)
    return a, b


@triton.jit
def zeros(R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Two accumulators; where there is no second part, it is one column that nothing touches."""
    return tl.zeros((R, A), tl.float32), tl.zeros((R, B if B > 0 else 1), tl.float32)


@triton.jit
def store(ptr, a, b, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Store both parts to rows (R, 1)."""
    store_rows(ptr, a, rows, inside, stride, N, 0, A)
    if B > 0:
        store_rows(ptr, b, rows, inside, stride, N, A, B)


@triton.jit
def product(a, b, x, y, acc, B: tl.constexpr):
    """acc + (a, b) @ (x, y)ᵀ, summed over both parts."""
    acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    if B > 0:
        acc = tl.dot(b, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def add_products(a, b, left, x, y, B: tl.constexpr):
    """(a, b) + left @ (x, y)."""
    left = left.to(x.dtype)
    a = tl.dot(left, x, a, input_precision="ieee")
    if B > 0:
        b = tl.dot(left, y, b, input_precision="ieee")
    return a, b


@triton.jit
def load_lse(lse_ptr, row, n_q):
    """Times log2(e). Of rows that see nothing (-inf), and that are not there, +inf: it makes every p of theirs 0."""
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
    MASKED: tl.constexpr,
    T: tl.constexpr,
):
    """p of q·k, and the scores before biases; rows and cols broadcast to the tile, whichever way it lies."""
    scores = capped(products, T.scale, T.softcap)
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
        visible = seen(rows + offset, cols, n_k, T.left, T.right)
        if T.mask == "bool":
            visible &= mask != 0
        p = tl.where(visible, p, 0.0)
    return p, scores
