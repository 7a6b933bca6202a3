"""Static scheduling of a persistent kernel: the order in which its programs take their tiles.

With causality or a window, tiles differ in length, and programs that end at different times leave SMs idle. So heads
are taken in groups whose keys and values fit in the L2, and the tiles of a group from the longest to the shortest, in
rounds. In each round every program takes one tile:

    round 0    in the order of the programs
    round 1    in the opposite order, so that two rounds together are about equally long for all programs
    round 2    as round 0, but rotated, so that the same programs don't always get the longer of almost equal tiles

A group has full rounds only. The shortest tiles of each group, fewer than a round, wait until all groups are done, and
are then dealt out in the same way. The order is a formula of the program and the round (`tile_of`), so a new length
costs nothing. Against a list schedule (each tile to the program that is free first), the longest program has at most 1
percent or one block of keys more; see tests/test_attention_hopper.py.
"""

from __future__ import annotations

from typing import NamedTuple

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

_ROTATION = tl.constexpr(13)  # two rounds later, a 13th of the programs on: the best of 2 to 20 in the tests' shapes


@triton.jit
def divide(a, b):
    """a // b for nonnegative ints. Unsigned division takes half of the instructions."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


class WorkOrder(NamedTuple):
    """What `tile_of` takes: `wide` groups of `width` heads, then `narrow` groups of one head fewer."""

    width: int
    wide: int
    narrow: int
    wide_rounds: int  # full rounds of a wide group
    narrow_rounds: int


def work_order(heads: int, blocks: int, programs: int, heads_in_l2: int) -> WorkOrder:
    """The order for so many heads, of all batch entries, with so many blocks of queries each.

    `heads_in_l2` is how many heads a group may have. Groups that would not fill a round are merged.
    """
    groups = max(1, min(library.cdiv(heads, heads_in_l2), heads * blocks // programs))
    width = library.cdiv(heads, groups)
    groups = library.cdiv(heads, width)
    narrow = groups * width - heads
    return WorkOrder(
        width, groups - narrow, narrow, width * blocks // programs, (width - 1) * blocks // programs
    )  # fmt: skip


@triton.jit
def work_order_on_device(heads, blocks, programs, heads_in_l2):
    """`work_order`, where the device alone knows the number of blocks."""
    groups = tl.maximum(1, tl.minimum(tl.cdiv(heads, heads_in_l2), heads * blocks // programs))
    width = tl.cdiv(heads, groups)
    groups = tl.cdiv(heads, width)
    narrow = groups * width - heads
    return width, groups - narrow, narrow, width * blocks // programs, (width - 1) * blocks // programs


@triton.jit
def _rotation(i, programs):
    """By how many places the programs are rotated in round i."""
    return i // 2 % _ROTATION * (programs // _ROTATION)


@triton.jit
def _turn(i, program, programs):
    """Which of a round's tiles is a program's: its turn in round i."""
    turn = program - _rotation(i, programs)
    turn = tl.where(turn < 0, turn + programs, turn)
    return tl.where(i % 2 == 1, programs - 1 - turn, turn)


@triton.jit
def _program_in(i, turn, programs):
    """The program with that turn in round i."""
    program = tl.where(i % 2 == 1, programs - 1 - turn, turn) + _rotation(i, programs)
    return tl.where(program >= programs, program - programs, program)


@triton.jit
def count_of(program, programs, tiles):
    """How many of all tiles a program has."""
    rounds = tiles // programs
    return rounds + tl.where(_turn(rounds, program, programs) < tiles - rounds * programs, 1, 0)


@triton.jit
def tile_of(i, program, programs, order, blocks):
    """A program's tile i: its head, over all batch entries, and its rank among the head's tiles, the longest first."""
    width, wide, narrow, wide_rounds, narrow_rounds = order
    turn = _turn(i, program, programs)
    rounds = wide * wide_rounds + narrow * narrow_rounds
    wide_left = wide * (width * blocks - wide_rounds * programs)
    late = i >= rounds
    left = (i - rounds) * programs + turn
    is_wide = tl.where(late, left < wide_left, i < wide * wide_rounds)

    # A full round belongs to one group. After the full rounds, the groups take turns with their last tiles.
    its_rounds = tl.where(is_wide, wide_rounds, narrow_rounds)
    n = tl.where(late, left - tl.where(is_wide, 0, wide_left), i - tl.where(is_wide, 0, wide * wide_rounds))
    by = tl.where(late, tl.where(is_wide, wide, narrow), its_rounds)
    quotient = divide(n, by)
    rest = n - quotient * by
    group = tl.where(late, rest, quotient)
    rank = tl.where(late, its_rounds * programs + quotient, rest * programs + turn)

    heads = tl.where(is_wide, width, width - 1)
    first = group * heads + tl.where(is_wide, 0, wide * width)
    place = divide(rank, heads)
    return first + rank - place * heads, place


@triton.jit
def slot_of(head, place, programs, order, blocks):
    """The inverse of `tile_of`: i * programs + program for the tile of that rank among a head's tiles."""
    width, wide, narrow, wide_rounds, narrow_rounds = order
    rounds = wide * wide_rounds + narrow * narrow_rounds
    wide_left = wide * (width * blocks - wide_rounds * programs)
    is_wide = head < wide * width
    heads = tl.maximum(tl.where(is_wide, width, width - 1), 1)  # heads that do not exist may be given
    head -= tl.where(is_wide, 0, wide * width)
    group = head // heads
    rank = place * heads + head - group * heads

    its_rounds = tl.where(is_wide, wide_rounds, narrow_rounds)
    n = rank // programs
    full = n < its_rounds
    left = (rank - its_rounds * programs) * tl.where(is_wide, wide, narrow) + group + tl.where(is_wide, 0, wide_left)
    i = tl.where(full, group * its_rounds + n + tl.where(is_wide, 0, wide * wide_rounds), rounds + left // programs)
    turn = tl.where(full, rank, left) % programs
    return i * programs + _program_in(i, turn, programs)


# A program for each tile

MOST_TILES = 1 << 15  # of which a program finds its own by `divide_by_reciprocal`


class Reciprocals(NamedTuple):
    """What a kernel divides by where each program has one tile, for `divide_by_reciprocal`. The first copy of keys
    waits for the quotients, and a product takes fewer instructions than a division.
    """

    all_heads: int  # of all batch entries
    all_heads_reciprocal: int
    heads_reciprocal: int  # of the heads of one batch entry
    group_reciprocal: int  # of the heads that share keys
    unused: int = 0  # the kernel has the arguments of a `WorkOrder`


def reciprocals(batch: int, heads: int, kv_heads: int) -> Reciprocals:
    """Those for so many heads."""
    return Reciprocals(batch * heads, *(-(-(1 << 30) // n) for n in (batch * heads, heads, heads // kv_heads)))


@triton.jit
def divide_by_reciprocal(number, reciprocal):
    """number // n, by 2^30 / n, rounded up. It is exact for numbers and n up to `MOST_TILES`."""
    return ((number.to(tl.int64) * reciprocal.to(tl.int64)) >> 30).to(tl.int32)


@triton.jit
def partner_of(row, n_q, ROWS: tl.constexpr):
    """The first row of the block of queries that goes with the one at `row`, of the last half of all blocks.

    With causality the two see about as many keys together as any other two. Of an odd number of blocks the last has no
    partner: that one is past the last query.
    """
    blocks = tl.cdiv(n_q, ROWS)
    other = (blocks - 1 - blocks % 2) * ROWS - row
    return tl.where(other < 0, blocks * ROWS, other)


@triton.jit
def end_of(row, end, n_q, n_k, right, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The end of the blocks of keys that the block of queries at `row` sees, of blocks 0 to `end`; at least 1."""
    own = tl.minimum(tl.minimum(row + ROWS, n_q) + (n_k - n_q) + right, n_k)
    own = tl.where(row < n_q, tl.cdiv(own, KEYS), 0)
    return tl.minimum(tl.maximum(own, 1), end)


@triton.jit
def skips_of(longest, end):
    """Of a ring that is filled for `longest` blocks of keys: the slots that a consumer of the blocks up to `end` skips
    before its first scores, and between those and its first values.
    """
    return tl.maximum(2 * (longest - end) - 1, 0), tl.minimum(longest - end, 1)
