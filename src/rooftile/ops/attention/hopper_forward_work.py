"""Which tiles a program of the attention for sm_90 has, and what of the keys each of them sees."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def count_tiles(table_ptr, size, T: gl.constexpr):
    """How many tiles this program has."""
    if T.tabled:
        return gl.load(table_ptr + gl.program_id(0))
    else:
        return gl.cdiv(size[0] - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def place(i, table_ptr, size, T: gl.constexpr):
    """Of this program's tile i: batch, head, first query, and the first and the end of the blocks of keys it sees.

    At least one block, so that every tile takes the same way.
    """
    heads, n_q, n_k = size[1], size[2], size[3]
    tile = gl.program_id(0) + i * gl.num_programs(0)
    if T.tabled:
        tile = gl.load(table_ptr + gl.num_programs(0) + tile)
    per_head = gl.cdiv(n_q, gl.constexpr(T.tile_rows))
    head = tile // per_head
    row = (tile - head * per_head) * T.tile_rows
    shift = n_k - n_q
    begin = 0
    if T.left >= 0:
        begin = gl.maximum(row + shift - T.left, 0) // T.keys
    end = n_k
    if T.right >= 0:
        end = gl.minimum(gl.minimum(row + T.tile_rows, n_q) + shift + T.right, n_k)
    end = gl.maximum(gl.cdiv(end, gl.constexpr(T.keys)), begin + 1)
    return head // heads, head % heads, row, begin, end
