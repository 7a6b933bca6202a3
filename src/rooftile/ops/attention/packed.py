"""The tiles of packed sequences, listed on the device for a persistent kernel.

The host knows how many tokens and sequences there are, but no length. So a kernel ahead lists the tiles: some rows of
one sequence and head, with the columns that they see. For the forward the rows are queries and the columns keys; for
gradients of keys and values it may be the other way round. Each program of the persistent kernel then reads its own
tiles, one after another, and all of its warps see the same ones.

The tiles of a head are ranked by how many blocks of columns they see, the longest first, of all sequences together.
`work_order` says which program takes the tile of a rank. There are at most `TileList.most` tiles of a head, however
the tokens are divided into sequences.

Starts may be anything. They are clamped to the tokens, and one that is less than an earlier one counts as that one:
sequences never overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.launching import bind, launcher
from rooftile.ops.attention.slots import larger
from rooftile.ops.attention.work_order import count_of, slot_of, work_order_on_device

import triton  # isort: skip
import triton.language as tl  # isort: skip

_FIELDS = tl.constexpr(8)  # of a tile in the list; the list's first is the number of tiles


@dataclasses.dataclass(frozen=True)
class TileList:
    """What is listed, and for how many programs.

    Args:
        heads: all have the same tiles.
        sequences: how many are packed.
        n_rows, n_cols: of all sequences together.
        rows: rows of a tile.
        cols: columns of a block.
        left, right: row i of n stands at p = i + m - n among its m columns, and sees those from p - left to p + right;
            -1 is no limit.
        multiprocessors: the most programs.
        heads_in_l2: how many heads are worked on at the same time.
        counted: columns are not packed: in place of their starts come how many each sequence has, n_cols at most. A
            tile then has its sequence in place of end_col.
    """

    heads: int
    sequences: int
    n_rows: int
    n_cols: int
    rows: int
    cols: int
    left: int
    right: int
    multiprocessors: int
    heads_in_l2: int
    counted: bool = False

    @property
    def most(self) -> int:
        """An upper bound of the tiles of a head. The last tile of each sequence may have one row."""
        nonempty = min(self.sequences, self.n_rows)
        return (self.n_rows + nonempty * (self.rows - 1)) // self.rows

    @property
    def programs(self) -> int:
        """Programs of the persistent kernel. Each has one tile at least, perhaps one of no rows."""
        return max(1, min(self.multiprocessors, self.heads * self.most))

    @property
    def numel(self) -> int:
        """int32 elements of the list."""
        rounds = library.cdiv(max(1, self.heads * self.most), self.programs)
        return _FIELDS.value * (1 + rounds * self.programs)


@triton.jit
def count_listed(tiles_ptr, program, programs):
    """How many tiles of the list a program has: one or more."""
    return count_of(program, programs, tl.load(tiles_ptr))


@triton.jit
def listed_tile(tiles_ptr, i, program, programs):
    """A program's tile i: (head, row, begin, end, end_row, n_rows, end_col, n_cols).

    Its rows are those from `row` on of its sequence, which has n_rows, the last of them before end_row of all. They see
    the blocks of columns from begin to end, one or more, counted from the sequence's first column. It has n_cols, the
    last of them before end_col of all.
    """
    at = tiles_ptr + (1 + i * programs + program) * _FIELDS
    head, row, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    end_row, n_rows, end_col, n_cols = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    return head, row, begin, end, end_row, n_rows, end_col, n_cols


@triton.jit
def _ranges(starts_ptr, seqs, sequences, total, before):
    """Where sequences end, their lengths, and the last end. `before` is that of the sequences before these."""
    begins = tl.minimum(tl.load(starts_ptr + tl.minimum(seqs, sequences)), total)
    begins = tl.associative_scan(tl.maximum(begins, before), 0, larger)
    ends = tl.minimum(tl.load(starts_ptr + tl.minimum(seqs + 1, sequences)), total)
    ends = tl.maximum(ends, begins)
    return ends, ends - begins, tl.max(ends, 0)


@triton.jit
def _columns(col_starts_ptr, seqs, sequences, n_cols, before, COUNTED: tl.constexpr):
    """`_ranges` of the columns; where they are counted, the sequences in place of their ends."""
    if COUNTED:
        counts = tl.load(col_starts_ptr + tl.minimum(seqs, sequences - 1))
        return seqs, tl.minimum(tl.maximum(counts, 0), n_cols), before
    else:
        return _ranges(col_starts_ptr, seqs, sequences, n_cols, before)


@triton.jit
def _sizes(n_rows, n_cols, left, right, ROWS: tl.constexpr):
    """Tiles of sequences, and (slope, most): the tile of rank j sees about min(slope - j * ROWS, most) columns."""
    tiles = tl.cdiv(n_rows, ROWS)
    slope = n_cols + tiles * ROWS  # all of them
    if right >= 0:
        slope += right - n_rows
    elif left >= 0:
        slope = n_rows + left
    most = n_cols
    if (right >= 0) & (left >= 0):
        most = tl.minimum(n_cols, left + right + ROWS)
    return tiles, slope, most


@triton.jit(
    do_not_specialize=["sequences", "n_rows", "n_cols", "heads", "programs", "heads_in_l2", "left", "right"],
    do_not_specialize_on_alignment=["starts_ptr", "col_starts_ptr"],
)
def list_tiles_kernel(
    starts_ptr, col_starts_ptr, tiles_ptr, sequences, n_rows, n_cols, heads, programs, heads_in_l2, left, right,
    ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, SEQS: tl.constexpr, HEADS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """A program lists TILES tiles of each head, numbered from sequence to sequence."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    zeros = tl.zeros((TILES,), tl.int32)
    seq, first, its_end, its_n, its_col_end, its_n_cols = zeros, zeros, zeros, zeros, zeros, zeros
    count, before, cols_before = 0, 0, 0
    for start in tl.range(0, sequences, SEQS, num_stages=1):
        seqs = start + tl.arange(0, SEQS)
        ends, n, before = _ranges(starts_ptr, seqs, sequences, n_rows, before)
        col_ends, n_c, cols_before = _columns(col_starts_ptr, seqs, sequences, n_cols, cols_before, COUNTED)
        tiles, _, _ = _sizes(n, n_c, left, right, ROWS)
        tile_ends = count + tl.cumsum(tiles, 0)
        tile_begins = tile_ends - tiles
        has_it = (tile_begins[None, :] <= tile[:, None]) & (tile[:, None] < tile_ends[None, :])
        seq += tl.sum(tl.where(has_it, seqs[None, :], 0), 1)
        first += tl.sum(tl.where(has_it, tile_begins[None, :], 0), 1)
        its_end += tl.sum(tl.where(has_it, ends[None, :], 0), 1)
        its_n += tl.sum(tl.where(has_it, n[None, :], 0), 1)
        its_col_end += tl.sum(tl.where(has_it, col_ends[None, :], 0), 1)
        its_n_cols += tl.sum(tl.where(has_it, n_c[None, :], 0), 1)
        count += tl.sum(tiles, 0)

    # In its sequence, the tile has rank j. Before it in its head come the longer tiles of all sequences, and of the
    # sequences before its own those that are as long. Lengths are in blocks: a tile longer than u has over u * COLS.
    j = tile - first
    its_tiles, slope, its_most = _sizes(its_n, its_n_cols, left, right, ROWS)
    blocks = tl.maximum(tl.cdiv(tl.minimum(slope - j * ROWS, its_most), COLS), 1)
    rank = j
    before, cols_before = 0, 0
    for start in tl.range(0, sequences, SEQS, num_stages=1):
        seqs = start + tl.arange(0, SEQS)
        _, n, before = _ranges(starts_ptr, seqs, sequences, n_rows, before)
        _, n_c, cols_before = _columns(col_starts_ptr, seqs, sequences, n_cols, cols_before, COUNTED)
        tiles, slopes, widest = _sizes(n, n_c, left, right, ROWS)
        least = (blocks[:, None] - (seqs[None, :] < seq[:, None]).to(tl.int32)) * COLS
        longer = tl.where(widest[None, :] > least, tl.cdiv(tl.maximum(slopes[None, :] - least, 0), ROWS), 0)
        longer = tl.where(least == 0, tiles[None, :], tl.minimum(longer, tiles[None, :]))
        rank += tl.sum(tl.where(seqs[None, :] == seq[:, None], 0, longer), 1)

    row = j * ROWS
    if right >= 0:  # the last rows see the most columns
        row = (its_tiles - 1 - j) * ROWS
    shift = its_n_cols - its_n
    begin = zeros
    if left >= 0:
        begin = tl.maximum(row + shift - left, 0) // COLS
    end = its_n_cols
    if right >= 0:
        end = tl.minimum(tl.minimum(row + ROWS, its_n) + shift + right, end)
    end = tl.maximum(tl.cdiv(tl.maximum(end, 0), COLS), begin + 1)

    order = work_order_on_device(heads, count, programs, heads_in_l2)
    for start in tl.range(0, heads, HEADS, num_stages=1):
        head = start + tl.arange(0, HEADS)[None, :]
        slot = slot_of(head, rank[:, None], programs, order, count)
        at = tiles_ptr + (1 + slot) * _FIELDS
        inside = (tile < count)[:, None] & (head < heads)
        tl.store(at, head, mask=inside)
        tl.store(at + 1, row[:, None], mask=inside)
        tl.store(at + 2, begin[:, None], mask=inside)
        tl.store(at + 3, end[:, None], mask=inside)
        tl.store(at + 4, its_end[:, None], mask=inside)
        tl.store(at + 5, its_n[:, None], mask=inside)
        tl.store(at + 6, its_col_end[:, None], mask=inside)
        tl.store(at + 7, its_n_cols[:, None], mask=inside)

    if tl.program_id(0) == 0:
        tl.store(tiles_ptr, tl.maximum(heads * count, programs))
        # In the first round, the programs that have no tile get one of no rows and one block of no columns.
        field = tl.arange(0, _FIELDS)[None, :]
        for start in tl.range(heads * count, programs, TILES, num_stages=1):
            slot = start + tl.arange(0, TILES)[:, None]
            tl.store(tiles_ptr + (1 + slot) * _FIELDS + field, (field == 3).to(tl.int32), mask=slot < programs)


_TILES = 16


def prepare_tiles(x: TileList) -> Callable[[Tensor, Tensor], Tensor]:
    """The launch, to be called with the starts of rows and of columns, (sequences + 1,) int32. It returns the list.

    Where columns are counted, their counts are (sequences,) int32.
    """
    constants = {"ROWS": x.rows, "COLS": x.cols, "TILES": _TILES, "SEQS": 256, "HEADS": 16, "COUNTED": x.counted}
    numbers = (x.sequences, x.n_rows, x.n_cols, x.heads, x.programs, x.heads_in_l2, x.left, x.right)
    programs = library.cdiv(max(1, x.most), _TILES)
    start = bind(launcher(list_tiles_kernel, (), constants, num_warps=4), programs, numbers=numbers)
    numel = x.numel

    def run(starts: Tensor, col_starts: Tensor) -> Tensor:
        tiles = torch.empty(numel, dtype=torch.int32, device=starts.device)
        start(starts, col_starts, tiles)
        return tiles

    return run
