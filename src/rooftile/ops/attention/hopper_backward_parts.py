"""What the kernels of the Hopper backward share: their tiling, probabilities, and writing a gradient (Gluon)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rooftile.launching import Descriptor
from rooftile.ops.attention.problem import Scoring
from rooftile.ops.attention.slots import find_block, sequence_span
from rooftile.primitives.gluon import describe, describe_packed, packed_at, store_tile
from rooftile.primitives.scores import LOG2E

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma  # isort: skip

BARRIERS = 1024  # bytes of shared memory, at most, for barriers, captured arguments of warps, and alignment
REGISTERS = 168  # of a thread at launch; the producer then leaves most of its own to the consumers
KEYS = 128  # of a tile of dk and dv
ROWS = {64: 128, 128: 64}  # queries of a step, by padded head_dim
# Bytes of the heads that are worked on together, which CTAs read again and again: no more than stay in the L2. On an
# H200 with 2 x 16 heads of 8192 causal queries, 8 MiB a head: 536 TF/s with 1 head at a time, 594 with 2, 561 with 4,
# 552 with 8; with 8 x 16 of 2048, 2 MiB a head: 433 with 1, 435 with 2, 450 with 8.
_L2 = 16 << 20


def padded(head_dim: int) -> int:
    """Columns of a tile. TMA reads zeros past the head, and writes nothing there."""
    return 64 if head_dim <= 64 else 128


def heads_together(batch_heads: int, head_bytes: int, blocks: int, programs: int) -> int:
    """Heads whose blocks are worked on at the same time: as many as the L2 holds, or as the programs take at once.

    With fewer, the longest blocks of the last heads would begin last, and most SMs would wait for them: on an H200 the
    gradients of 4 x 32 causal heads of 4096 x 64, with 8 KV heads, took 1530 us with two KV heads at a time, and 1346
    with four, in two runs.
    """
    return max(1, min(batch_heads, max(_L2 // head_bytes, programs // blocks)))


def describe_rows(t: Tensor, rows: int, packed: bool) -> Descriptor:
    """t, (B, H, T, D), in tiles of so many rows."""
    columns = padded(t.shape[3])
    if packed:
        return describe_packed(t, (rows, columns), gl.NVMMASharedLayout(128, 16, 5))
    return describe(t, (1, 1, rows, columns), gl.NVMMASharedLayout(128, 16, 4))


def scoring_numbers(s: Scoring) -> tuple[float, float, float, int, int]:
    """The kernels' last numbers: scale, factor, cap, left and right."""
    return s.scale, *s.numbers


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """What both kernels are compiled for: the head, and what happens to a score.

    Args:
        dim: columns of a tile of q, k, v and dout, 64 or 128; those past the head are zeros.
        capped, has_left, has_right: see `Scoring.flags`.
        masked: a query may not see all keys of a block, or the last block of keys is not whole.
        stat_rows: queries of a block of the rows' lse and delta in memory, (batch, heads, blocks, 2, stat_rows).
            With packed sequences, a block is where its slot (`slots`) is.
        factor: `Scoring.default_factor`; if it is 0, the factor is an argument.
        packed: the tensors are packed sequences.
    """

    dim: int
    capped: bool
    has_left: bool
    has_right: bool
    masked: bool
    stat_rows: int
    factor: float
    packed: bool

    @property
    def acc_layout(self) -> gl.NVMMADistributedLayout:
        """Of 64 rows of dq, dk or dv in a consumer's registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.dim, 16])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        """Of p or ds as wgmma's first operand, in registers."""
        return gl.DotOperandLayout(0, self.acc_layout, 2)

    @property
    def shared_layout(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def find_work(slot, starts_ptr, size, sequences, SIDE: gl.constexpr, T: gl.constexpr):
    """Of packed sequences: the block of queries (SIDE 0) or of keys (1) of a slot, its entry, and its sequence's size.

    An entry is what `rows_at` and `stat_blocks` take: of dense tensors the batch entry, here the ends and lengths of
    the sequence's queries and of its keys, its first block of rows' statistics, and the blocks of a head.
    """
    total_q, _total_k, heads, group = size
    if SIDE == 0:
        index, start_q, n_q, block = find_block(slot, starts_ptr, sequences, SIDE, T.rows)
        start_k, n_k = sequence_span(starts_ptr, index, 1)
    else:
        index, start_k, n_k, block = find_block(slot, starts_ptr, sequences, SIDE, T.keys)
        start_q, n_q = sequence_span(starts_ptr, index, 0)
    first = start_q // T.stat_rows + index
    entry = ((start_q + n_q, n_q), (start_k + n_k, n_k), first, total_q // T.stat_rows + sequences)
    return block, entry, (n_q, n_k, heads, group)


@gluon.jit
def rows_at(entry, SIDE: gl.constexpr, head, row, T: gl.constexpr):
    """Where a tile from `row` on is: of the queries (SIDE 0) or of the keys (1)."""
    if T.packed:
        end, length = entry[SIDE]
        return packed_at(end, length, head, row)
    else:
        return entry, head, row, 0


@gluon.jit
def stat_blocks(entry, head, size, INT: gl.constexpr, T: gl.constexpr):
    """The first block of lse and delta of a head's rows, and how many blocks further on the next head's is."""
    n_q, _n_k, heads, _group = size
    if T.packed:
        _of_queries, _of_keys, first, blocks = entry
        return head.to(INT) * blocks + first, blocks
    else:
        blocks = gl.cdiv(n_q, gl.constexpr(T.stat_rows))
        return (entry * heads + head).to(INT) * blocks, blocks


@gluon.jit
def write(z, memory, desc, at):
    """Start the TMA store of a consumer's 64 rows of a gradient from `memory`, which nothing but its own earlier stores
    may still read."""
    tma.store_wait(0)
    memory.store(z.to(desc.dtype))
    fence_async_shared()  # makes it visible to TMA
    store_tile(desc, at, memory)


@gluon.jit
def _tanh(x):
    """tanh as 1 - 2 / (1 + e^2x). Its absolute error is a float32 rounding of 1."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * LOG2E)))


@gluon.jit
def _span(first, N: gl.constexpr, AXIS: gl.constexpr, T: gl.constexpr):
    """Indices from `first` on, along an axis of a tile of scores."""
    numbers = first + gl.arange(0, N, layout=gl.SliceLayout(1 - AXIS, T.scores_layout))
    return gl.expand_dims(numbers, 1 - AXIS)


@gluon.jit
def probabilities(s, lse, key, p_first, n_k, scoring, KEY_AXIS: gl.constexpr, T: gl.constexpr):
    """p of a tile of q·k, and with a soft cap the derivative of the capped score by the score, in 16 bits.

    lse, times log2(e), lies along the queries. The tile's keys are those from `key` on, and p_first is the position of
    its first query among them. scoring is `Scoring.numbers`. The derivative is in 16 bits as it is kept in registers
    until dp is complete.
    """
    KEYS: gl.constexpr = s.shape[KEY_AXIS]
    ROWS: gl.constexpr = s.shape[1 - KEY_AXIS]
    factor, cap, left, right = scoring
    if T.factor != 0:
        factor = gl.constexpr(T.factor)
    slope = s
    if T.capped:
        t = _tanh(s * factor)
        slope = (1.0 - t * t).to(gl.float16)
        p = gl.exp2(t * cap - lse)
    else:
        p = gl.exp2(s * factor - lse)
    if T.masked:
        masked = key + KEYS > n_k
        if T.has_right:
            masked |= key + (KEYS - 1) > p_first + right
        if T.has_left:
            masked |= key < p_first + (ROWS - 1) - left
        if masked:
            # The scalar `right` goes into the first index. Added to the vector, which is the same in all steps, it
            # would make the compiler keep the sum in registers.
            keys = _span(key, KEYS, KEY_AXIS, T)
            if T.has_right:
                seen = keys <= gl.minimum(_span(p_first + right, ROWS, 1 - KEY_AXIS, T), n_k - 1)
            else:
                seen = keys < n_k
            if T.has_left:
                seen &= keys >= _span(p_first - left, ROWS, 1 - KEY_AXIS, T)
            p = gl.where(seen, p, 0.0)
    return p, slope


@gluon.jit
def scores_gradient(p, slope, dp, delta, dtype: gl.constexpr, T: gl.constexpr):
    """ds of a tile, before `scale`, in 16 bits."""
    ds = p * (dp - delta)
    if T.capped:
        ds *= slope.to(gl.float32)
    return ds.to(dtype)
