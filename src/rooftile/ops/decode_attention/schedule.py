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
    parts = tl.maximum(tl.minimum(programs // items, longest // LEAST), 1)
    shares = tl.maximum(tl.minimum(programs, total // LEAST), 1)
    longest_program = ((items * parts + programs - 1) // programs) * ((longest + parts - 1) // parts)
    equal = (total + shares - 1) // shares
    aligned = longest_program <= equal + equal // 32 + SURPLUS
    return blocks, aligned, parts, shares, total // shares, total % shares


@triton.jit
def begin_of_share(share, each, more):
    """The first block of a share."""
    return share * each + tl.minimum(share, more)


@triton.jit
def owner_of_block(block, each, more):
    """The share that a block is in."""
    longer = more * (each + 1)
    return tl.where(block < longer, block // (each + 1), more + (block - longer) // each)


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
def part_at(
    at,
    stop,
    lengths,
    ends,
    aligned,
    parts,
    n_new,
    per_seq,
    capacity,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The item that `at` is in, and the part of its blocks that is this program's, from `low` to `high`.

    Returns:
        (seq, within, begin, n_keys, first_block, n_blocks, low, high): `within` is the item's place in its sequence,
        and `begin`, where shares are not aligned, the place of its first block among all.
    """
    seq = at // parts // per_seq
    begin = at * 0
    if not aligned:
        seq, begin = sequence_of_block(ends, at)
    n_keys, first_block, n_blocks = blocks_of(length_of(lengths, seq, BLOCK_B), n_new, capacity, WINDOW, BLOCK_N)
    within = at // parts % per_seq
    low = (at % parts) * n_blocks // tl.minimum(parts, n_blocks)
    high = tl.minimum((at % parts + 1) * n_blocks // tl.minimum(parts, n_blocks), n_blocks)
    if not aligned:
        within = (at - begin) // n_blocks
        begin += within * n_blocks
        low = at - begin
        high = tl.minimum(n_blocks, stop - begin)
    return seq, within, begin, n_keys, first_block, n_blocks, low, high


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
