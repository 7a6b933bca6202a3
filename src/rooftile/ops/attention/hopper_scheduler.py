"""The tile scheduler of the Hopper forward: how many tiles a CTA has, and the sequence, head and rows of each."""

from __future__ import annotations

from rooftile.ops.attention import packed
from rooftile.ops.attention.work_order import count_of, divide_by_reciprocal, partner_of, tile_of
from rooftile.primitives.gluon import packed_at

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def count_tiles(size, T: gl.constexpr):
    """How many tiles this CTA has."""
    tiles, _heads, _n_q, _n_k = size
    if T.single:
        return 1
    elif T.packed or T.limited:
        return count_of(gl.program_id(0), gl.num_programs(0), tiles)
    else:
        return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_at(i, size, limits, order, T: gl.constexpr):
    """This CTA's tile i: its sequence, head and first query, and the range [begin, end) of blocks of keys that it sees.

    The range is never empty, so that all tiles take the same path. The sequence is its index in the batch, or, packed,
    a tuple: the end of its queries, their number, the end of its keys (the sequence's index if they are in pages), and
    their number.
    """
    if T.packed:
        tile = packed.listed_tile(order, i, gl.program_id(0), gl.num_programs(0))
        head, row, begin, end, end_q, n_q, end_k, n_k = tile
        return (end_q, n_q, end_k, n_k), head, row, begin, end
    else:
        return _tile_in_batch(i, size, limits, order, T)


@gluon.jit
def first_row(row, mine: gl.constexpr, size, T: gl.constexpr):
    """A consumer's first query, of the tile whose first row is given."""
    if T.paired and mine:
        _tiles, _heads, n_q, _n_k = size
        return partner_of(row, n_q, T.rows)
    else:
        return row + mine * T.rows


@gluon.jit
def _tile_in_batch(i, size, limits, order, T: gl.constexpr):
    """`tile_at` of a batch without packing: a formula of i."""
    _tiles, heads, n_q, n_k = size
    left, right = limits
    blocks = gl.cdiv(n_q, gl.constexpr(T.tile_rows))
    if T.single or T.limited:
        if T.single:
            all_heads, all_heads_reciprocal, heads_reciprocal, _group_reciprocal, _unused = order
            block = divide_by_reciprocal(gl.program_id(0), all_heads_reciprocal)
            head = gl.program_id(0) - block * all_heads
        else:
            head, block = tile_of(i, gl.program_id(0), gl.num_programs(0), order, blocks)
        if T.has_right:  # the last queries see the most keys
            block = blocks - 1 - block
    else:
        tile = gl.program_id(0) + i * gl.num_programs(0)
        # Signed, here and below: with unsigned division ptxas orders the mainloop so that heads of 64 take 4 % longer.
        head = tile // blocks
        block = tile - head * blocks
    ROWS: gl.constexpr = T.rows if T.paired else T.tile_rows  # adjacent queries of a tile: all, or one consumer's
    if T.paired:
        block += gl.cdiv(n_q, gl.constexpr(T.rows)) - blocks
    row = block * ROWS
    shift = n_k - n_q
    begin = 0
    if T.has_left:
        begin = gl.maximum(row + shift - left, 0) // T.keys
    end = n_k
    if T.has_right:
        end = gl.minimum(gl.minimum(row + ROWS, n_q) + shift + right, n_k)
    end = gl.maximum(gl.cdiv(end, gl.constexpr(T.keys)), begin + 1)
    if T.single:
        batch = divide_by_reciprocal(head, heads_reciprocal)
        return batch, head - batch * heads, row, begin, end
    return head // heads, head % heads, row, begin, end


@gluon.jit
def size_of(seq, size, T: gl.constexpr):
    """The size with the lengths of that sequence."""
    if T.packed:
        tiles, heads, _all_q, _all_k = size
        _end_q, n_q, _end_k, n_k = seq
        return tiles, heads, n_q, n_k
    else:
        return size


@gluon.jit
def rows_at(seq, SIDE: gl.constexpr, head, row, T: gl.constexpr):
    """Where TMA finds rows: of queries and the output (SIDE 0), or of keys and values (1)."""
    if T.packed:
        return packed_at(seq[2 * SIDE], seq[2 * SIDE + 1], head, row)
    else:
        return seq, head, row, 0
