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
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.scores import LN2, LOG2E

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


@triton.jit
def rescaled(m, top):
    """2^(m - top), where m is at most top; 0 for the m of what saw no key."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2(m - top))


@triton.jit
def leave_part(
    partial_ptr,
    slot,
    m,
    total,
    o,
    o_second,
    rows,
    mask,
    WIDTH: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
):
    at = partial_ptr + slot.to(tl.int64) * (ROWS * (WIDTH + 2))
    cols = tl.arange(0, V0)[None, :]
    tl.store(at + rows[:, None] * WIDTH + cols, o, mask=mask[:, None])
    if V1 > 0:
        cols = V0 + tl.arange(0, V1)[None, :]
        tl.store(at + rows[:, None] * WIDTH + cols, o_second, mask=mask[:, None])
    at += ROWS * WIDTH
    tl.store(at + rows, m, mask=mask)
    tl.store(at + ROWS + rows, total, mask=mask)


@triton.jit
def _parts_of_o(at, part, rows, cols, mask, WIDTH: tl.constexpr):
    """Some parts' rows of o, (parts, rows, cols); past the L1, where another program's stores may not be."""
    pointers = at[:, None, None] + rows[None, :, None] * WIDTH + cols[None, None, :]
    return tl.load(pointers, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")


@triton.jit
def bring_together(
    partial_ptr,
    first,
    late,
    count,
    rows,
    mask,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """m, l and o (in two parts of its columns) of an item's rows, of all its parts."""
    WIDTH: tl.constexpr = V0 + V1
    top = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    o = tl.zeros((rows.shape[0], V0), tl.float32)
    o_second = tl.zeros((rows.shape[0], V1 if V1 > 0 else 1), tl.float32)
    cols = tl.arange(0, V0)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        part = start + tl.arange(0, AT_ONCE)
        there = (part < count)[:, None] & mask[None, :]
        at = partial_ptr + slot_of(part, first, late).to(tl.int64) * (ROWS * (WIDTH + 2))
        of_row = at[:, None] + ROWS * WIDTH + rows[None, :]
        m = tl.load(of_row, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(of_row + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        values = _parts_of_o(at, part, rows, cols, there, WIDTH)
        new = tl.maximum(top, tl.max(m, axis=0))
        kept = rescaled(top, new)
        weight = rescaled(m, new[None, :])
        total = total * kept + tl.sum(sums * weight, axis=0)
        o = o * kept[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        if V1 > 0:
            values = _parts_of_o(at, part, rows, V0 + tl.arange(0, V1), there, WIDTH)
            o_second = o_second * kept[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        top = new
    return top, total, o, o_second


@triton.jit
def _write(out_ptr, o, row, mask, first: tl.constexpr, V: tl.constexpr, VALUE_DIM: tl.constexpr):
    cols = first + tl.arange(0, V)[None, :]
    out = out_ptr + row[:, None] * VALUE_DIM + cols
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (cols < VALUE_DIM))


@triton.jit
def finish(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    m,
    total,
    o,
    o_second,
    seq,
    kv_head,
    rows,
    mask,
    n_new,
    kv_heads,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
):
    """The softmax's last step, and the results of a KV head's rows: row r is head r % GROUP of token r // GROUP."""
    head = kv_head * GROUP + rows % GROUP
    token = rows // GROUP
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(m, sink)
        kept = rescaled(m, new)
        total = total * kept + rescaled(sink, new)
        o = o * kept[:, None]
        o_second = o_second * kept[:, None]
        m = new
    # A row that saw nothing is 0, and the logarithm of its sum -inf.
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    row = (seq.to(tl.int64) * n_new + token) * (kv_heads * GROUP) + head
    _write(out_ptr, o * inverse, row, mask, 0, V0, VALUE_DIM)
    if V1 > 0:
        _write(out_ptr, o_second * inverse, row, mask, V0, V1, VALUE_DIM)
    if HAS_LSE:
        lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(total)) * LN2)
        at = (seq.to(tl.int64) * (kv_heads * GROUP) + head) * n_new + token
        tl.store(lse_ptr + at, lse, mask=mask)


@triton.jit(do_not_specialize=["n_seqs", "n_new", "kv_heads", "capacity", "programs"])
def combine_kernel(
    lengths_ptr,
    sinks_ptr,
    partial_ptr,
    out_ptr,
    lse_ptr,
    n_seqs,
    n_new,
    kv_heads,
    capacity,
    programs,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SURPLUS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of an item; nothing where the item was done whole."""
    per_seq = kv_heads * TILES
    item = tl.program_id(0) // ROWS
    rows = tl.program_id(0) % ROWS + tl.arange(0, 1)
    # The kernel before let this one start when the lengths were there already: only its parts are waited for.
    if EARLY:
        pdl_launch_dependents()
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    blocks, aligned, parts, _, each, more = share_out(
        lengths, n_seqs, n_new, per_seq, capacity, programs, WINDOW, BLOCK_B, BLOCK_N, LEAST, SURPLUS
    )
    seq = item // per_seq
    within = item % per_seq
    seqs = tl.arange(0, BLOCK_B)
    n_blocks = tl.sum(tl.where(seqs == seq, blocks, 0), axis=0)
    begin = tl.sum(tl.where(seqs < seq, blocks, 0), axis=0) * per_seq + within * n_blocks
    first, late, count = parts_of_item(item, begin, n_blocks, aligned, parts, each, more)
    row = (within % TILES) * ROWS + rows
    mask = row < n_new * GROUP
    if EARLY:
        pdl_wait()
    if count > 1:
        m, total, o, o_second = bring_together(partial_ptr, first, late, count, rows, mask, V0, V1, ROWS, AT_ONCE)
        finish(
            out_ptr, lse_ptr, sinks_ptr, m, total, o, o_second, seq, within // TILES, row, mask, n_new, kv_heads,
            VALUE_DIM, GROUP, HAS_SINKS, HAS_LSE, V0, V1,
        )  # fmt: skip
