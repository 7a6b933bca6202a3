"""Who does which part of the work, derived on the device from the lengths: no program waits for the host to know them.

A sequence's keys are counted in blocks, at least one, so that an empty sequence has somebody to write its zeros. An
item is the keys of one sequence as seen by one tile of query rows, those of a KV head or some of them. The programs
share the items in one of two ways, which every program derives alike:

- aligned: each item is cut into the same number of parts, and program w does parts w, w + programs, ... It wins where
  the lengths are much alike, or the items are many: a program has one part, and whole items need no reduction;
- in shares: all blocks of all items in a row, cut into equal shares (stream-K): any lengths, any batch.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

# For LEAST, blocks of the smallest part: more than there are. Nothing is cut then, whatever the lengths.
WHOLE = tl.constexpr(1 << 30)


@triton.jit
def blocks_of(lengths, n_new, capacity, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys there are of each length, the first block that is seen of them, and how many are read."""
    n_keys = tl.minimum(tl.maximum(lengths, 0), capacity).to(tl.int32)
    end = (n_keys + (BLOCK_N - 1)) // BLOCK_N
    first = end * 0
    if WINDOW > 0:
        first = tl.maximum(n_keys - n_new - (WINDOW - 1), 0) // BLOCK_N
    return n_keys, first, tl.maximum(end - first, 1)


@triton.jit
def load_lengths(lengths_ptr, n_seqs, BLOCK_B: tl.constexpr):
    """All lengths; past the L1, which may hold what was read before the kernel before had ended."""
    seqs = tl.arange(0, BLOCK_B)
    return tl.load(lengths_ptr + seqs, mask=seqs < n_seqs, other=0, cache_modifier=".cg")


@triton.jit
def length_of(lengths, seq, BLOCK_B: tl.constexpr):
    """One of them; it costs a few shuffles, and a load as much as a read of the L2."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_B) == seq, tl.maximum(lengths, 0), 0), axis=0)


@triton.jit
def share_out(
    lengths,
    n_seqs,
    n_new,
    per_seq,
    capacity,
    programs,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    """The blocks of each sequence, and how they are shared: aligned or not, the parts of an item, the shares.

    `per_seq` is how many items a sequence has. No part or share is less than LEAST blocks where that can be; aligned
    parts are taken where the longest program has at most SURPLUS blocks more than an equal share, and a 32nd of it.

    Returns:
        (blocks, aligned, parts, shares, each, more): shares are of `each` blocks, the first `more` of them of one more.
    """
    seqs = tl.arange(0, BLOCK_B)
    _, _, blocks = blocks_of(lengths, n_new, capacity, WINDOW, BLOCK_N)
    blocks = tl.where(seqs < n_seqs, blocks, 0)
    total = tl.sum(blocks, axis=0) * per_seq
    longest = tl.max(blocks, axis=0)
    items = n_seqs * per_seq
    if LEAST == WHOLE:  # as below, with nothing left to compute
        parts = 1
        shares = 1
        each = total
        more = 0
        aligned = True
    else:
        parts = tl.maximum(tl.minimum(programs // items, longest // LEAST), 1)
        shares = tl.maximum(tl.minimum(programs, total // LEAST), 1)
        longest_program = ((items * parts + programs - 1) // programs) * ((longest + parts - 1) // parts)
        each = total // shares
        more = total - each * shares
        equal = tl.where(more > 0, each + 1, each)
        aligned = longest_program <= equal + equal // 32 + SURPLUS
    return blocks, aligned, parts, shares, each, more


@triton.jit
def begin_of_share(share, each, more):
    """The first block of a share."""
    return share * each + tl.minimum(share, more)


@triton.jit
def owner_of_block(block, each, more):
    """The share that a block is in."""
    longer = more * (each + 1)
    among = block < longer
    # One division of either, in place of both.
    share = tl.where(among, block, block - longer) // tl.where(among, each + 1, each)
    return tl.where(among, share, more + share)


@triton.jit
def sequence_of_block(ends, block):
    """The sequence that a block is of, and the first block of that sequence, given the ends of all."""
    before = ends <= block
    return tl.sum(before.to(tl.int32), axis=0), tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def program_range(program, programs, blocks, aligned, parts, shares, each, more, n_seqs, per_seq):
    """Where a program begins and stops: in parts where they are aligned, else in blocks; and the sequences' ends."""
    ends = blocks
    at = program
    stop = n_seqs * per_seq * parts
    if not aligned:
        ends = tl.cumsum(blocks, axis=0) * per_seq
        at = begin_of_share(program, each, more)
        stop = tl.where(program < shares, begin_of_share(program + 1, each, more), at)
    return at, stop, ends


@triton.jit
def parts_of_item(item, begin, n_blocks, aligned, parts, each, more):
    """Who has the parts of the item that begins at block `begin`: the first of them, if it had begun another item
    before, and how many they are."""
    first = item * parts
    count = tl.minimum(parts, n_blocks)
    late = first * 0
    if not aligned:
        first = owner_of_block(begin, each, more)
        count = owner_of_block(begin + n_blocks - 1, each, more) - first + 1
        late = (begin > begin_of_share(first, each, more)).to(tl.int32)
    return first, late, count


@triton.jit
def slot_of(part, first, late):
    """The slot of a part of an item whose first part is program `first`'s."""
    return 2 * (first + part) + tl.where(part == 0, late, 0)


@triton.jit
def part_at(
    at,
    stop,
    program,
    programs,
    lengths,
    sharing,
    n_new,
    per_seq,
    capacity,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The item that `at` is in, and the part of its blocks that is this program's, from `low` to `high`.

    Returns:
        (seq, within, n_keys, first_block, low, high, after, slot, first, late, count): `within` is the item's place in
        its sequence, `after` where this program's next part is, `slot` where this one is left if there are others, and
        the last are those of `parts_of_item`. `at` may be `stop` or more: then `high` is `low`, and the others mean
        nothing.
    """
    ends, aligned, parts, each, more = sharing
    item = at // parts
    nth = at - item * parts
    # Both are computed either way: a sum of a warp's lanes (redux) under a condition may be guarded by a predicate that
    # ptxas 12.8 and 12.9 have given away; it was seen with 32 sequences in float32. `rooftile inspect` looks for those.
    of_block, begin_of_block = sequence_of_block(ends, at)
    seq = tl.where(aligned, item // per_seq, of_block)
    begin = tl.where(aligned, 0, begin_of_block)
    n_keys, first_block, n_blocks = blocks_of(length_of(lengths, seq, BLOCK_B), n_new, capacity, WINDOW, BLOCK_N)
    within = item - seq * per_seq
    cuts = tl.minimum(parts, n_blocks)
    low = nth * n_blocks // cuts
    high = tl.minimum((nth + 1) * n_blocks // cuts, n_blocks)
    if not aligned:
        within = (at - begin) // n_blocks
        begin += within * n_blocks
        low = at - begin
        high = tl.minimum(n_blocks, stop - begin)
    first, late, count = parts_of_item(seq * per_seq + within, begin, n_blocks, aligned, parts, each, more)
    after = tl.where(aligned, at + programs, begin + high)
    high = tl.where(at < stop, high, low)
    # Aligned parts are counted through: `at` is the item's first, and this one's place after it.
    slot = tl.where(aligned, 2 * at, slot_of(program - first, first, late))
    return seq, within, n_keys, first_block, low, high, after, slot, first, late, count


@triton.jit
def no_part(after):
    """One of no blocks, as `part_at` returns it."""
    return after, after, after, after, after, after, after, after, after, after, after


@triton.jit
def plan_of(
    lengths,
    program,
    n_seqs,
    n_new,
    per_seq,
    capacity,
    programs,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    """What a program does, all from the lengths: a long chain of divisions and sums, each waiting for the one before.

    Returns:
        (sharing, at, stop): the sequences' `ends` and `share_out`'s (aligned, parts, each, more); the program's range.
    """
    blocks, aligned, parts, shares, each, more = share_out(
        lengths, n_seqs, n_new, per_seq, capacity, programs, WINDOW, BLOCK_B, BLOCK_N, LEAST, SURPLUS
    )
    at, stop, ends = program_range(program, programs, blocks, aligned, parts, shares, each, more, n_seqs, per_seq)
    return (ends, aligned, parts, each, more), at, stop


@triton.jit
def differ(lengths, guess):
    """Whether any length is another than was guessed."""
    return tl.max((lengths != guess).to(tl.int32), axis=0) > 0
