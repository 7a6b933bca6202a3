"""The list of the tiles of packed sequences, and the order in which programs take them."""

import itertools
import random

import pytest
import torch

from rooftile.ops.attention import packed, work_order
from rooftile.ops.attention.packed import TileList

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _read_kernel(tiles_ptr, counts_ptr, out_ptr, programs, PROGRAMS: tl.constexpr, ROUNDS: tl.constexpr):
    """counts (PROGRAMS,), and (8, ROUNDS, PROGRAMS) fields of the programs' tiles."""
    program = tl.arange(0, PROGRAMS)
    count = packed.count_listed(tiles_ptr, program, programs)
    tl.store(counts_ptr + program, count, mask=program < programs)
    for i in range(ROUNDS):
        ptrs = tiles_ptr + tl.where((program < programs) & (i < count), 0, -8 * (1 + i * programs + program))
        fields = packed.listed_tile(ptrs, i, program, programs)
        for f in tl.static_range(8):
            tl.store(out_ptr + (f * ROUNDS + i) * PROGRAMS + program, fields[f])


def read(tiles, x):
    """The tiles of each program, in its order."""
    lanes, rounds = 1 << (x.programs - 1).bit_length(), x.numel // 8 // x.programs
    counts = torch.zeros(lanes, dtype=torch.int32, device=tiles.device)
    found = torch.zeros(8, rounds, lanes, dtype=torch.int32, device=tiles.device)
    _read_kernel[(1,)](tiles, counts, found, x.programs, lanes, rounds)
    n, fields = counts.tolist(), found.permute(2, 1, 0).tolist()
    return [[tuple(fields[p][i]) for i in range(n[p])] for p in range(x.programs)]


def sanitized(starts, total):
    """Starts within the tensor, none less than an earlier one."""
    return list(itertools.accumulate((min(max(n, 0), total) for n in starts), max))


def expected_tiles(x, starts, col_starts):
    """What `listed_tile` has to give, of each tile of one row or more, in no order."""
    starts, col_starts = sanitized(starts, x.n_rows), sanitized(col_starts, x.n_cols)
    tiles = []
    for s in range(x.sequences):
        n, m = starts[s + 1] - starts[s], col_starts[s + 1] - col_starts[s]
        for row in range(0, n, x.rows):
            p, last = row + m - n, min(row + x.rows, n) - 1 + m - n
            begin = max(p - x.left, 0) // x.cols if x.left >= 0 else 0
            stop = min(last + x.right + 1, m) if x.right >= 0 else m
            end = max(-(-stop // x.cols), begin + 1)
            tiles.append((row, begin, end, starts[s + 1], n, col_starts[s + 1], m))
    return [(head, *tile) for head in range(x.heads) for tile in tiles]


def cumulated(lengths):
    return list(itertools.accumulate(lengths, initial=0))


def listed(x, starts, col_starts, device):
    run = packed.prepare_tiles(x)
    return read(run(*(torch.tensor(s, dtype=torch.int32, device=device) for s in (starts, col_starts))), x)


def split(taken):
    """The tiles of all programs, and those of no rows."""
    tiles = [tile for tiles in taken for tile in tiles]
    return [tile for tile in tiles if tile[5]], [tile for tile in tiles if not tile[5]]


def drawn_lengths(draw, sequences, mean):
    kind = draw.choice(("equal", "any", "skewed", "edges", "tiny"))
    if kind == "equal":
        return [mean] * sequences
    if kind == "skewed":
        lengths = [draw.randint(0, 9) for _ in range(sequences)]
        lengths[draw.randrange(sequences)] = 20 * mean
        return lengths
    if kind == "edges":
        return [draw.choice((0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256)) for _ in range(sequences)]
    return [draw.randint(0, 2 * mean if kind == "any" else 4) for _ in range(sequences)]


def test_every_tile_of_every_sequence_and_head_is_listed_once(device):
    draw = random.Random(0)
    for trial in range(12):
        sequences = draw.choice((1, 2, 5, 17, 40, 300 if trial % 5 == 0 else 8))
        lengths = drawn_lengths(draw, sequences, draw.choice((20, 150, 400)))
        others = lengths if draw.random() < 0.5 else drawn_lengths(draw, sequences, draw.choice((20, 150, 400)))
        starts, col_starts = cumulated(lengths), cumulated(others)
        left, right = draw.choice(((-1, -1), (-1, 0), (100, 0), (60, 40), (200, -1), (-1, 30)))
        rows, cols = draw.choice(((128, 128), (192, 128), (128, 64)))
        heads, programs, in_l2 = draw.choice((1, 3, 8, 17)), draw.choice((1, 7, 132)), draw.choice((1, 2, 4, 40))
        x = TileList(heads, sequences, starts[-1], col_starts[-1], rows, cols, left, right, programs, in_l2)
        if x.n_rows == 0:
            continue
        taken = listed(x, starts, col_starts, device)
        real, none = split(taken)
        assert sorted(real) == sorted(expected_tiles(x, starts, col_starts))
        assert all(taken)
        assert all(tile == (0, 0, 0, 1, 0, 0, 0, 0) for tile in none)
        assert not none or len(real) + len(none) == x.programs
        assert len(real) <= x.heads * x.most


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (300, 0), (300, -1)])
def test_longer_tiles_of_a_head_come_first(left, right, device):
    """A tile of one program has no fewer blocks than its next, but for the parts of a block at a window's edges."""
    lengths = [5, 3000, 0, 700, 700, 1, 64, 2000]
    starts = cumulated(lengths)
    x = TileList(1, len(lengths), starts[-1], starts[-1], 128, 128, left, right, 1, 1)
    (tiles,) = listed(x, starts, starts, device)
    blocks = [end - begin for _, _, begin, end, *_ in tiles]
    assert all(a >= b - (left >= 0) for a, b in itertools.pairwise(blocks))
    assert blocks[0] == max(blocks)


def test_programs_end_together_where_one_sequence_is_long_and_many_are_short(device):
    lengths = [3] * 70 + [6000] + [3] * 70
    starts = cumulated(lengths)
    x = TileList(4, len(lengths), starts[-1], starts[-1], 128, 128, -1, 0, 16, 4)
    taken = listed(x, starts, starts, device)
    sums = [sum(end - begin + 1.5 for _, _, begin, end, *_ in tiles) for tiles in taken]
    assert max(sums) <= 1.05 * sum(sums) / len(sums)


@pytest.mark.parametrize("starts", [[3, 20, -4, 60, 15], [50, 60, 70], [-9, -3, 0], [5, 2, 30], [0, 40, 0, 40, 0, 40]])
def test_starts_that_are_wrong_list_no_row_twice_and_none_outside(starts, device):
    x = TileList(2, len(starts) - 1, 40, 40, 8, 8, -1, 0, 132, 4)  # a start may be several tiles before the last
    taken = listed(x, starts, starts, device)
    real, _ = split(taken)
    assert sorted(real) == sorted(expected_tiles(x, starts, starts))
    rows = [(head, end - n + i) for head, row, _, _, end, n, *_ in real for i in range(row, min(row + x.rows, n))]
    assert len(rows) == len(set(rows))
    assert all(0 <= row < 40 for _, row in rows)


@triton.jit
def _order_kernel(
    out_ptr, heads, blocks, programs, heads_in_l2, slots_ptr, n, BLOCK: tl.constexpr,
):  # fmt: skip
    order = work_order.work_order_on_device(heads, blocks, programs, heads_in_l2)
    for i in tl.static_range(5):
        tl.store(out_ptr + i, order[i])
    slot = tl.arange(0, BLOCK)
    head, rank = work_order.tile_of(slot // programs, slot % programs, programs, order, blocks)
    tl.store(slots_ptr + slot, work_order.slot_of(head, rank, programs, order, blocks), mask=slot < n)


def test_the_slot_of_a_tile_is_where_a_program_finds_it(device):
    draw = random.Random(0)
    for _ in range(40):
        heads, programs, in_l2 = draw.randint(1, 60), draw.choice((1, 7, 108, 132)), draw.randint(1, 40)
        blocks = draw.randint(1, 60)
        tiles = heads * blocks
        order = torch.zeros(5, dtype=torch.int32, device=device)
        slots = torch.zeros(tiles, dtype=torch.int32, device=device)
        _order_kernel[(1,)](order, heads, blocks, programs, in_l2, slots, tiles, BLOCK=1 << (tiles - 1).bit_length())
        assert tuple(order.tolist()) == tuple(work_order.work_order(heads, blocks, programs, in_l2))
        # The last round may be partial: its tiles are those of the first lanes, whose programs the rotation decides.
        full = tiles // programs * programs
        assert slots.tolist()[:full] == list(range(full))
