"""How the work is partitioned among programs, and how the results of its splits are combined.

Each program derives its work on the device, from the lengths, so the host need not know them. A sequence's keys are
counted in blocks. Every sequence counts at least one block, so that some program writes the zeros of an empty one. An
item is the keys of one sequence and KV head for one tile of query rows. Split-KV (Flash-Decoding) divides the items
among the programs in one of two ways; every program makes the same choice:

- aligned: each item has the same number of splits, and program w takes splits w, w + programs, ... This is faster where
  lengths are similar or items are many: a program has one split, and whole items need no reduction;
- shares: the blocks of all sequences form one sequence, cut into equal shares (stream-K), for any lengths and batch. An
  item counts as ITEM_COST more than its blocks, or a program with many short sequences would end last.

A token's KV heads are next to each other in most caches. So a group of programs, one for each KV head, has a share:
they read the same tokens at about the same time, as programs with consecutive aligned items do. Where groups would
leave too many programs without work, each program has a share of its own, of the items one after another.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.scores import LN2, LOG2E

import triton  # isort: skip
import triton.language as tl  # isort: skip


# A value of MIN_BLOCKS that no item reaches: no item is split, whatever the lengths.
NEVER_SPLIT = tl.constexpr(1 << 30)

# What an item takes beside its blocks, in blocks: its plan, its queries, a pipeline that fills and drains, its result.
# On an H200 a program took about 4 us for an empty sequence, and 2 us for a block. Where 203 of a server's 256 rows had
# 512 to 640 keys and the others none, equal shares of blocks took 215 us a layer, and shares with this cost 125.
ITEM_COST = tl.constexpr(2)


# Partition


@triton.jit
def count_blocks(lengths, n_new, capacity, window, BLOCK_N: tl.constexpr):
    """For each length: its keys, the first block that the window sees, and the number of blocks to read.

    Here and below `window` is None where there is none.
    """
    n_keys = tl.minimum(tl.maximum(lengths, 0), capacity).to(tl.int32)
    end = (n_keys + (BLOCK_N - 1)) // BLOCK_N
    first = end * 0
    if window is not None:
        first = tl.maximum(n_keys - n_new - (window - 1), 0) // BLOCK_N
    return n_keys, first, tl.maximum(end - first, 1)


@triton.jit
def load_lengths(lengths_ptr, n_seqs, BLOCK_B: tl.constexpr, seqs=None):
    """All lengths. They bypass the L1, which may hold values read before the previous kernel ended.

    Here and below `seqs` are the numbers from 0 to BLOCK_B - 1, which kernels in Gluon give, in a layout of theirs.
    """
    if seqs is None:
        seqs = tl.arange(0, BLOCK_B)
    return tl.load(lengths_ptr + seqs, mask=seqs < n_seqs, other=0, cache_modifier=".cg")


@triton.jit
def select_length(lengths, seq, BLOCK_B: tl.constexpr, seqs=None):
    """One sequence's length. It costs a few shuffles, where a load would read the L2."""
    if seqs is None:
        seqs = tl.arange(0, BLOCK_B)
    return tl.sum(tl.where(seqs == seq, tl.maximum(lengths, 0), 0), axis=0)


@triton.jit
def partition_work(
    lengths, n_seqs, n_new, per_seq, capacity, programs, window, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, SLACK: tl.constexpr, seqs=None,
):  # fmt: skip
    """Partition the blocks of all sequences, of `per_seq` items (KV heads) each, among the programs of one row tile.

    A split or share has at least MIN_BLOCKS blocks where possible. Splits are aligned if those of the busiest program
    then cost at most SLACK blocks plus 1/32 more than an equal share.

    Returns:
        (costs, aligned, splits, group, shares, each, more): the cost of an item of each sequence, in blocks; splits of
        an item; programs of a group; a share costs `each` blocks, and the first `more` shares cost one more.
    """
    if seqs is None:
        seqs = tl.arange(0, BLOCK_B)
    _, _, blocks = count_blocks(lengths, n_new, capacity, window, BLOCK_N)
    blocks = tl.where(seqs < n_seqs, blocks, 0)
    costs = tl.where(seqs < n_seqs, blocks + ITEM_COST, 0)
    group = tl.where(programs % per_seq * 16 <= programs, per_seq, 1)  # at most a 16th has no work
    total = tl.sum(costs, axis=0) * (per_seq // group)
    longest = tl.max(blocks, axis=0)
    items = n_seqs * per_seq
    if MIN_BLOCKS == NEVER_SPLIT:  # the values below, as constants
        splits = 1
        group = 1
        shares = 1
        each = total
        more = 0
        aligned = True
    else:
        splits = tl.maximum(tl.minimum(programs // items, longest // MIN_BLOCKS), 1)
        most = tl.sum(blocks, axis=0) * (per_seq // group) // MIN_BLOCKS
        shares = tl.maximum(tl.minimum(programs // group, most), 1)
        busiest = ((items * splits + programs - 1) // programs) * ((longest + splits - 1) // splits + ITEM_COST)
        each = total // shares
        more = total - each * shares
        equal = tl.where(more > 0, each + 1, each)
        aligned = busiest <= equal + ITEM_COST + equal // 32 + SLACK  # a share may begin within an item
    return costs, aligned, splits, group, shares, each, more


@triton.jit
def share_begin(share, each, more):
    """Where a share begins, before `_cut`."""
    return share * each + tl.minimum(share, more)


@triton.jit
def share_at(position, each, more):
    """The share that holds a position."""
    longer = more * (each + 1)
    among = position < longer
    # Selecting the operands first takes one division instead of two.
    share = tl.where(among, position, position - longer) // tl.where(among, each + 1, each)
    return tl.where(among, share, more + share)


@triton.jit
def sequence_at(ends, position):
    """The sequence that holds a position, and where that sequence begins, given where all sequences end."""
    before = ends <= position
    return tl.sum(before.to(tl.int32), axis=0), tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def _cut(position, ends, in_turns):
    """A boundary of shares that no item's ITEM_COST goes across: it moves to the begin of the item.

    `in_turns`: items of a sequence that one program reads in turn.
    """
    begin = tl.max(tl.where(ends <= position, ends, 0), axis=0)
    end = tl.min(tl.where(ends > position, ends, 0x7FFFFFFF), axis=0)
    within = (position - begin) % tl.maximum((end - begin) // in_turns, 1)
    return tl.where(within <= ITEM_COST, position - within, position)


@triton.jit
def program_range(program, costs, aligned, splits, group, shares, each, more, n_seqs, per_seq):
    """Where a program's work begins and stops (in splits if aligned, else in costs), and where each sequence ends."""
    ends = costs
    at = program
    stop = n_seqs * per_seq * splits
    if not aligned:
        ends = tl.cumsum(costs, axis=0) * (per_seq // group)
        share = program // group
        at = _cut(share_begin(share, each, more), ends, per_seq // group)
        stop = tl.where(share < shares, _cut(share_begin(share + 1, each, more), ends, per_seq // group), at)
    return at, stop, ends


@triton.jit
def splits_of_item(item, member, begin, n_blocks, aligned, splits, group, each, more):
    """Which programs hold the splits of an item.

    `member`: which program of each group reads its KV head. `begin`: where it begins among all that these read.

    Returns:
        (first, stride, second_slot, count): the first program, and how many programs later the next one is; 1 if this
        is the second item of that program, else 0; and the number of splits.
    """
    first = item * splits
    stride = group * 0 + 1
    count = tl.minimum(splits, n_blocks)
    second_slot = first * 0
    if not aligned:
        share = share_at(begin + ITEM_COST, each, more)
        first = share * group + member
        stride = group
        count = share_at(begin + ITEM_COST + n_blocks - 1, each, more) - share + 1
        second_slot = (begin > share_begin(share, each, more)).to(tl.int32)
    return first, stride, second_slot, count


@triton.jit
def partial_slot(split, first, stride, second_slot):
    """Where the partial result of an item's split is stored; program `first` has the item's first split."""
    return 2 * (first + split * stride) + tl.where(split == 0, second_slot, 0)


def partial_numbers(programs: int, rows: int, width: int) -> int:
    """How many numbers the partial results of all splits are: `store_partial` has two slots for each program."""
    return 2 * programs * rows * (width + 2)


@triton.jit
def work_at(
    at, stop, program, programs, lengths, partition, n_new, per_seq, capacity, window,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, seqs=None,
):  # fmt: skip
    """A program's work at position `at`: blocks `low` to `high` of one item.

    Returns:
        (seq, item_in_seq, n_keys, first_block, low, high, after, slot, first, stride, second_slot, count):
        `item_in_seq` is the item's index in its sequence, `after` the position of the program's next work, `slot` where
        the partial result is stored if the item has other splits; the last four are those of `splits_of_item`. If `at`
        is `stop` or more, `high` is `low` and the other values are meaningless.
    """
    ends, aligned, splits, group, each, more = partition
    item = at // splits
    split = at - item * splits
    # Both cases are computed unconditionally. ptxas 12.8 and 12.9 may guard a conditional warp reduction (redux) by a
    # predicate whose register they have reused (seen with 32 sequences in float32); `rooftile inspect` finds those.
    of_position, begin_of_sequence = sequence_at(ends, at)
    seq = tl.where(aligned, item // per_seq, of_position)
    begin = tl.where(aligned, 0, begin_of_sequence)
    length = select_length(lengths, seq, BLOCK_B, seqs)
    n_keys, first_block, n_blocks = count_blocks(length, n_new, capacity, window, BLOCK_N)
    item_in_seq = item - seq * per_seq
    n_splits = tl.minimum(splits, n_blocks)
    low = split * n_blocks // n_splits
    high = tl.minimum((split + 1) * n_blocks // n_splits, n_blocks)
    member = program % group
    if not aligned:
        in_turn = (at - begin) // (n_blocks + ITEM_COST)
        item_in_seq = in_turn * group + member
        begin += in_turn * (n_blocks + ITEM_COST)
        low = tl.maximum(at - begin - ITEM_COST, 0)
        high = tl.minimum(n_blocks, stop - begin - ITEM_COST)
    first, stride, second_slot, count = splits_of_item(
        seq * per_seq + item_in_seq, member, begin, n_blocks, aligned, splits, group, each, more
    )
    after = tl.where(aligned, at + programs, begin + ITEM_COST + high)
    high = tl.where(at < stop, high, low)
    # Aligned: `at` is the item's first split plus the index of this one.
    slot = tl.where(aligned, 2 * at, 2 * program + tl.where(program == first, second_slot, 0))
    return seq, item_in_seq, n_keys, first_block, low, high, after, slot, first, stride, second_slot, count


@triton.jit
def no_work(after):
    """No blocks, as `work_at` returns them."""
    return after, after, after, after, after, after, after, after, after, after, after, after


@triton.jit
def plan_work(
    lengths, program, n_seqs, n_new, per_seq, capacity, programs, window, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, SLACK: tl.constexpr, seqs=None,
):  # fmt: skip
    """A program's plan, derived from the lengths by a long chain of dependent divisions and sums.

    Returns:
        (partition, at, stop): `partition` is (ends, aligned, splits, group, each, more), where each sequence ends and
        the results of `partition_work`; `at` and `stop` are the program's range.
    """
    costs, aligned, splits, group, shares, each, more = partition_work(
        lengths, n_seqs, n_new, per_seq, capacity, programs, window, BLOCK_B, BLOCK_N, MIN_BLOCKS, SLACK, seqs
    )
    at, stop, ends = program_range(program, costs, aligned, splits, group, shares, each, more, n_seqs, per_seq)
    return (ends, aligned, splits, group, each, more), at, stop


@triton.jit
def any_differs(lengths, guess):
    """Whether any length differs from the guess."""
    return tl.max((lengths != guess).to(tl.int32), axis=0) > 0


# Tiles of packed queries


@triton.jit
def _tokens_of(starts_ptr, seqs, tokens, n_seqs):
    """The first token of sequences, and how many they have: within all tokens, whatever `starts` says."""
    there = seqs < n_seqs
    begin = tl.load(starts_ptr + seqs, mask=there, other=0, cache_modifier=".cg")
    end = tl.load(starts_ptr + seqs + 1, mask=there, other=0, cache_modifier=".cg")
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    return begin, tl.minimum(tl.maximum(end, begin), tokens) - begin


@triton.jit
def plan_tiles(
    starts_ptr, lengths, n_seqs, tokens, per_seq, capacity, programs, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, seqs=None,
):  # fmt: skip
    """The tiles of sequences that begin at `starts` among all tokens: ROWS rows, each a token and one of GROUP heads.

    With SPLIT, tiles have as many splits as lets each have a program of its own; else `lengths` are not read.

    Returns:
        (ends, splits, stop): where the items of each sequence (a tile of one of `per_seq` KV heads) end among all, the
        splits of an item, and how many there are of all items. A warp keeps no more of each sequence: of 512 it has no
        registers for where they begin, so `tile_at` reads that again.
    """
    if seqs is None:
        seqs = tl.arange(0, BLOCK_B)
    _, counts = _tokens_of(starts_ptr, seqs, tokens, n_seqs)
    items = (counts * GROUP + (ROWS - 1)) // ROWS * per_seq
    stop = tl.sum(items, axis=0)
    splits = 1
    if SPLIT:
        _, _, blocks = count_blocks(lengths, 1, capacity, None, BLOCK_N)
        longest = tl.max(tl.where(items > 0, blocks, 1), axis=0)
        splits = tl.maximum(tl.minimum(programs // tl.maximum(stop, 1), longest), 1)
    return tl.cumsum(items, axis=0), splits, stop * splits


@triton.jit
def tile_at(
    at, plan, starts_ptr, lengths_ptr, n_seqs, tokens, per_seq, capacity, GROUP: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A split of a tile. A sequence's last tile, which sees the most keys, comes first.

    Returns:
        (seq, kv_head, token, head, n_new, n_keys, low, high, slot, first, count): its first token among all and its
        first head; its tokens, the last of which is at the last of `n_keys` keys, if causal; its blocks; where its
        partial result is stored; the first of the item's splits, and how many have blocks.
    """
    ends, splits, _stop = plan
    item = at // splits
    split = at - item * splits
    seq, first_item = sequence_at(ends, item)
    begin, n_q = _tokens_of(starts_ptr, seq, tokens, n_seqs)
    length = tl.load(lengths_ptr + seq, mask=seq < n_seqs, other=0, cache_modifier=".cg")
    n_keys = tl.minimum(tl.maximum(length, 0), capacity)
    rank = item - first_item
    kv_head = rank % per_seq
    row = ((n_q * GROUP - 1) // ROWS - rank // per_seq) * ROWS
    token = row // GROUP
    n_new = tl.minimum(n_q - token, (ROWS + (GROUP - 1)) // GROUP)
    if CAUSAL:
        n_keys = tl.maximum(n_keys - n_q + token + n_new, 0)
    n_blocks = tl.maximum((n_keys + (BLOCK_N - 1)) // BLOCK_N, 1)
    count = tl.minimum(splits, n_blocks)
    low = split * n_blocks // count
    high = tl.minimum((split + 1) * n_blocks // count, n_blocks)
    first = item * splits
    slot = partial_slot(split, first, 1, 0)
    return seq, kv_head, begin + token, kv_head * GROUP + row % GROUP, n_new, n_keys, low, high, slot, first, count


# Splits


@triton.jit
def query_rows(kv_head, tile, n_new, rows, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of rows of a KV head's tile: whether they are there, their tokens, their heads."""
    mask = rows < ROWS
    if GROUP % ROWS == 0:  # full tiles of one token each
        token = tile * ROWS // GROUP + rows * 0
        head = kv_head * GROUP + tile * ROWS % GROUP + rows
    else:
        row = tile * ROWS + rows
        mask &= row < n_new * GROUP
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
    return mask, token, head


@triton.jit
def exp2_difference(m, top):
    """2^(m - top) for m <= top; 0 where m is -inf, the maximum over no keys."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2(m - top))


@triton.jit
def store_partial(
    partial_ptr, slot, m, total, o, o_second, rows, mask, WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
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
def _load_partial_o(at, rows, cols, mask, WIDTH: tl.constexpr):
    """Some splits' rows of o, (splits, rows, cols). The load bypasses the L1, which may not hold other CTAs' stores."""
    pointers = at[:, None, None] + rows[None, :, None] * WIDTH + cols[None, None, :]
    return tl.load(pointers, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")


@triton.jit
def combine_splits(
    partial_ptr, tile, first, stride, second_slot, count, rows, mask, V0: tl.constexpr, V1: tl.constexpr,
    ROW_TILES: tl.constexpr, ROWS: tl.constexpr, COMBINE_SPLITS: tl.constexpr,
):  # fmt: skip
    """m, l and o (in two ranges of columns) of rows of an item's tile, combined over its splits in their order."""
    WIDTH: tl.constexpr = V0 + V1
    top = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    o = tl.zeros((rows.shape[0], V0), tl.float32)
    o_second = tl.zeros((rows.shape[0], V1 if V1 > 0 else 1), tl.float32)
    cols = tl.arange(0, V0)
    for start in tl.range(0, count, COMBINE_SPLITS, num_stages=1):
        split = start + tl.arange(0, COMBINE_SPLITS)
        there = (split < count)[:, None] & mask[None, :]
        slot = partial_slot(split, first, stride, second_slot) * ROW_TILES + tile
        at = partial_ptr + slot.to(tl.int64) * (ROWS * (WIDTH + 2))
        of_row = at[:, None] + ROWS * WIDTH + rows[None, :]
        m = tl.load(of_row, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(of_row + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        values = _load_partial_o(at, rows, cols, there, WIDTH)
        new = tl.maximum(top, tl.max(m, axis=0))
        alpha = exp2_difference(top, new)
        weight = exp2_difference(m, new[None, :])
        total = total * alpha + tl.sum(sums * weight, axis=0)
        o = o * alpha[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        if V1 > 0:
            values = _load_partial_o(at, rows, V0 + tl.arange(0, V1), there, WIDTH)
            o_second = o_second * alpha[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        top = new
    return top, total, o, o_second


@triton.jit
def _store_columns(out_ptr, o, row, mask, first: tl.constexpr, V: tl.constexpr, VALUE_DIM: tl.constexpr):
    cols = first + tl.arange(0, V)[None, :]
    out = out_ptr + row[:, None] * VALUE_DIM + cols
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (cols < VALUE_DIM))


@triton.jit
def write_output(
    out_ptr, lse_ptr, sinks_ptr, m, total, o, o_second, seq, token, head, mask, n_new, heads,
    VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr,
):  # fmt: skip
    """Normalize and store the results of query rows, each of a token and a head."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(m, sink)
        alpha = exp2_difference(m, new)
        total = total * alpha + exp2_difference(sink, new)
        o = o * alpha[:, None]
        o_second = o_second * alpha[:, None]
        m = new
    # A row that sees no key is 0, and its lse is -inf.
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    row = (seq.to(tl.int64) * n_new + token) * heads + head
    _store_columns(out_ptr, o * inverse, row, mask, 0, V0, VALUE_DIM)
    if V1 > 0:
        _store_columns(out_ptr, o_second * inverse, row, mask, V0, V1, VALUE_DIM)
    if HAS_LSE:
        lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(total)) * LN2)
        at = (seq.to(tl.int64) * heads + head) * n_new + token
        tl.store(lse_ptr + at, lse, mask=mask)


@triton.jit(do_not_specialize=["n_seqs", "n_new", "kv_heads", "capacity", "programs", "window"])
def combine_kernel(
    lengths_ptr, sinks_ptr, partial_ptr, out_ptr, lse_ptr,
    n_seqs, n_new, kv_heads, capacity, programs, window,
    VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, ROW_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, SLACK: tl.constexpr,
    COMBINE_SPLITS: tl.constexpr, PDL: tl.constexpr, COMBINE_ROWS: tl.constexpr,
):  # fmt: skip
    """Combine COMBINE_ROWS rows of an item's tile, if the item was split."""
    if not HAS_WINDOW:
        window = None
    PARTS: tl.constexpr = ROWS // COMBINE_ROWS  # programs of a tile
    item = tl.program_id(0) // (PARTS * ROW_TILES)
    tile = tl.program_id(0) // PARTS % ROW_TILES
    rows = tl.program_id(0) % PARTS * COMBINE_ROWS + tl.arange(0, COMBINE_ROWS)
    # The previous kernel let this one start after the lengths were final. Only its partial results must be waited for.
    if PDL:
        pdl_launch_dependents()
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    costs, aligned, splits, group, _, each, more = partition_work(
        lengths, n_seqs, n_new, kv_heads, capacity, programs, window, BLOCK_B, BLOCK_N, MIN_BLOCKS, SLACK
    )
    seq = item // kv_heads
    kv_head = item % kv_heads
    seqs = tl.arange(0, BLOCK_B)
    cost = tl.sum(tl.where(seqs == seq, costs, 0), axis=0)
    n_blocks = cost - ITEM_COST
    begin = tl.sum(tl.where(seqs < seq, costs, 0), axis=0) * (kv_heads // group) + kv_head // group * cost
    first, stride, second_slot, count = splits_of_item(
        item, kv_head % group, begin, n_blocks, aligned, splits, group, each, more
    )
    mask, token, head = query_rows(kv_head, tile, n_new, rows, GROUP, ROWS)
    if PDL:
        pdl_wait()
    if count > 1:
        m, total, o, o_second = combine_splits(
            partial_ptr, tile, first, stride, second_slot, count, rows, mask, V0, V1, ROW_TILES, ROWS, COMBINE_SPLITS
        )
        write_output(
            out_ptr, lse_ptr, sinks_ptr, m, total, o, o_second, seq, token, head, mask, n_new, kv_heads * GROUP,
            VALUE_DIM, HAS_SINKS, HAS_LSE, V0, V1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["n_seqs", "tokens", "kv_heads", "capacity", "programs"],
    do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr", "lse_ptr"],
)
def combine_tiles_kernel(
    starts_ptr, lengths_ptr, partial_ptr, out_ptr, lse_ptr,
    n_seqs, tokens, kv_heads, capacity, programs,
    VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, COMBINE_SPLITS: tl.constexpr, COMBINE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine COMBINE_ROWS rows of a tile of packed queries, if the tile was split."""
    PARTS: tl.constexpr = ROWS // COMBINE_ROWS  # programs of a tile
    if PDL:
        pdl_launch_dependents()
        pdl_wait()
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    plan = plan_tiles(
        starts_ptr, lengths, n_seqs, tokens, kv_heads, capacity, programs, GROUP, ROWS, BLOCK_B, BLOCK_N, True
    )
    splits, stop = plan[1], plan[2]
    at = tl.program_id(0) // PARTS * splits
    if (at < stop) & (splits > 1):
        _, _, token, head, n_new, _, _, _, _, first, count = tile_at(
            at, plan, starts_ptr, lengths_ptr, n_seqs, tokens, kv_heads, capacity, GROUP, ROWS, CAUSAL, BLOCK_N
        )
        rows = tl.program_id(0) % PARTS * COMBINE_ROWS + tl.arange(0, COMBINE_ROWS)
        mask = rows // GROUP < n_new
        if count > 1:
            m, total, o, o_second = combine_splits(
                partial_ptr, 0, first, 1, 0, count, rows, mask, WIDTH, 0, 1, ROWS, COMBINE_SPLITS
            )
            write_output(
                out_ptr, lse_ptr, None, m, total, o, o_second, tl.full((), 0, tl.int32), token + rows // GROUP,
                head + rows % GROUP, mask, tokens, kv_heads * GROUP, VALUE_DIM, False, True, WIDTH, 0,
            )  # fmt: skip
