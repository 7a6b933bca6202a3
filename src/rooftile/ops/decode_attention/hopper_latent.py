"""decode_attention over a latent cache for sm_90, of 64 and more query rows (Gluon).

A program has 64 query rows of a KV head. With so many the kernel is bound by the tensor cores, not by memory: the GEMMs
of a block of 64 keys take 2176 clocks. The rows' outputs, 64 x 512, fill the registers of two warpgroups, and the
queries and two blocks of keys fill shared memory. So scores cannot be computed a block ahead, and what matters is that
the copies of a block have the time of a whole block to land:

    _score       the first warpgroup: s = q k^T of a block, p = softmax of s, and columns 0 to 255 of the output
    _accumulate  the second one: columns 256 to 511 of the output
    _produce     a single warp: plans the work, and copies queries and blocks by TMA, a page or a part of one at a time

The next block's q k^T is issued right behind a block's p v. During the softmax the tensor cores have nothing to do but
the rest of the second warpgroup's p v. (FlashMLA gives each warpgroup the scores of every other block. Then the softmax
of one overlaps GEMMs of the other, but copies have half the time.)

A slot of shared memory has one block of keys: columns 0 to 255, 256 to 511, and 512 to 575, which only q k^T reads.
`_score` writes the block's p over these last ones, once all of its warps have read them, so that it is in the same slot
as the values that `_accumulate` multiplies it by.

    ready[2 slot + half]    completed by the bytes that land: the left half, or the right half and the last columns
    free[2 slot + half]     completed by one arrival of the warpgroup that has these columns of the output
    p_ready[slot]           completed by `_score`, when p and its rows' alpha and sums are in shared memory
    q_ready, q_free         as ready and free, for the queries of a piece of work, which `_score` alone reads
    work_ready, work_free   the same for messages, in which `_produce` tells the others their next piece of work

`free` of the right half implies that p, alpha and the sums were read. Work is partitioned as for
`decode_kernel` (`schedule`), and partial results are stored as there.

Of packed queries (`attention_paged`), a tile of 64 rows is a piece of work, or a split of it. It is as a sequence of
the tile's tokens, which has the keys that the last of them sees. Programs take tiles from a queue, a counter in memory.

A fully masked row needs no special case until it is written (`primitives.warpgroup_softmax`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.decode_attention.choose import Shape
from rooftile.ops.decode_attention.schedule import load_lengths, plan_tiles, plan_work, tile_at, work_at
from rooftile.primitives import pdl
from rooftile.primitives.gluon import (
    describe,
    describe_pages,
    is_describable,
    load_tile,
    next_slot,
    packed_at,
    view_as,
)
from rooftile.primitives.paging import page_step
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.scores import LN2
from rooftile.primitives.warpgroup_softmax import INITIAL_MAX, mask_scores, softmax_step

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64  # query rows of a program
KEYS = 64  # keys of a block
COLUMNS = 512  # of the output
_HALF = gl.constexpr(COLUMNS // 2)  # columns of the output that a warpgroup has
_PART = gl.constexpr(64)  # columns of a copy: a swizzle is so wide
_PARTS = gl.constexpr(4)  # copies of a half
_SLOTS = gl.constexpr(2)
_FIELDS = gl.constexpr(8)  # of a message
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SEQUENCES = 512  # which one warp plans
_REGISTERS = 168  # what a kernel of 12 warps is compiled for; the two warpgroups take what the producer leaves


@dataclasses.dataclass(frozen=True)
class Form:
    """All that the kernel is compiled for but the dtypes: its one constant.

    Args:
        group: query heads of a KV head.
        row_tiles: tiles of 64 of their query rows, each with programs of its own.
        page: tokens of a page; 0 for a contiguous cache.
        value_dim: columns of the output, 257 to 512: each warpgroup has some.
        causal: a token sees no later keys.
        block_b: sequences, rounded up to a power of two.
        min_blocks, slack: see `DecodeConfig`.
        pdl: launched while the previous kernel still runs.
        packed: queries are packed, any number of each sequence (`attention_paged`).
        split: of packed queries, tiles may be split where they are few.
    """

    group: int
    row_tiles: int
    page: int
    value_dim: int
    causal: bool
    block_b: int
    min_blocks: int
    slack: int
    pdl: bool
    packed: bool = False
    split: bool = False
    rows: int = ROWS
    keys: int = KEYS

    @property
    def piece_rows(self) -> int:
        """Keys that one copy takes: those of a block, or of a page, if that is less."""
        return self.page if 0 < self.page < self.keys else self.keys

    @property
    def pieces(self) -> int:
        """Copies of so many keys in a block."""
        return self.keys // self.piece_rows

    @property
    def q_box(self) -> tuple[int, int, int, int]:
        """What a copy of queries takes: some tokens of all heads of a KV head, or some heads of one token."""
        heads = min(self.group, self.rows)
        return 1, self.rows // heads, heads, _PART.value

    @property
    def shared(self) -> gl.NVMMASharedLayout:
        """A tile in shared memory."""
        return gl.NVMMASharedLayout(128, 16, rank=2)

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """A block of scores in registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.keys, 16])

    @property
    def acc(self) -> gl.NVMMADistributedLayout:
        """A warpgroup's half of the output."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF.value, 16])

    @property
    def operand(self) -> gl.DotOperandLayout:
        """p of a block as the first operand of p v, in registers."""
        return gl.DotOperandLayout(0, self.acc, 2)


# The producer


@gluon.jit
def _send(fields, messages, work_ready, work_free, box, parity):
    """Tell the two warpgroups a piece of work."""
    mbarrier.wait(work_free.index(box), parity ^ 1)
    for i in gl.static_range(len(fields)):
        number = gl.full([1], fields[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        messages.index(box * _FIELDS + i).store(number)
    mbarrier.arrive(work_ready.index(box), count=1)
    return next_slot(box, parity, 2)


@gluon.jit
def _page_of(table, seq, row, n_keys, T: gl.constexpr):
    """The page of the key at that row; past the last key its last page. Of a contiguous cache, the sequence's entry."""
    pages_ptr, stride, n_pages, _step = table
    if pages_ptr is None:
        return seq
    else:
        at = pages_ptr + seq.to(gl.int64) * stride
        if T.page:
            at += gl.minimum(row, gl.maximum(n_keys - 1, 0)) // T.page
        return gl.minimum(gl.maximum(gl.load(at), 0), n_pages - 1)


@gluon.jit
def _place_of(table, page, row, n_keys, T: gl.constexpr):
    """Where TMA finds keys: the end of those of the sequence in that page, how many they are, and the row in it."""
    begin = 0
    n = n_keys
    if T.page:
        begin = row // T.page * T.page
        n = gl.minimum(gl.maximum(n_keys - begin, 0), T.page)
    return page * table[3] + n, n, row - begin


@gluon.jit
def _copy_columns(
    desc, table, seq, head, row, n_keys, page, pieces, first, ready, col, PARTS: gl.constexpr, T: gl.constexpr
):
    """Start the copies of 64 * PARTS columns of a block of keys, from `col` on, whose first page is given.

    Keys past the last one are zeros, whatever the page holds.
    """
    for j in gl.static_range(gl.constexpr(T.pieces)):
        if j > 0:
            page = _page_of(table, seq, row + j * T.piece_rows, n_keys, T)
        end, n, key = _place_of(table, page, row + j * T.piece_rows, n_keys, T)
        for part in gl.static_range(PARTS):
            at = packed_at(end, n, head, key, col + part * _PART)
            load_tile(desc, at, ready, pieces.index(first + part * T.pieces + j))


@gluon.jit
def _copy_queries(desc, seq, kv_head, tile, pieces, last, ready, T: gl.constexpr):
    """Start the copies of the queries of a tile; those past the last token are zeros, if they are not packed.

    Of packed ones `seq` and `kv_head` are the tile's first token and head.
    """
    row = tile * T.rows
    mbarrier.expect(ready, (2 * _PARTS + 1) * desc.block_type.nbytes)
    for part in gl.static_range(2 * _PARTS + 1):
        if T.packed:
            at = (0, seq, kv_head, part * _PART)
        else:
            at = (seq, row // T.group, kv_head * T.group + row % T.group, part * _PART)
        load_tile(desc, at, ready, last if part == 2 * _PARTS else pieces.index(part))


@gluon.jit
def _produce(q_desc, k_desc, lengths_ptr, queues, table, memory, barriers, size, T: gl.constexpr):
    """Plan this program's work, tell it to the others, and keep the slots full."""
    q_pieces, q_last, k_pieces, last_pieces, messages = memory
    ready, free, _p_ready, q_ready, q_free, work_ready, work_free = barriers
    n_seqs, n_new, kv_heads, capacity, programs = size
    PER_HALF: gl.constexpr = _PARTS * T.pieces
    program = gl.program_id(0) // T.row_tiles
    tile = gl.program_id(0) % T.row_tiles
    seqs = gl.arange(0, T.block_b, layout=gl.BlockedLayout([1], [32], [1], [0]))
    lengths = load_lengths(lengths_ptr, n_seqs, T.block_b, seqs)
    starts_ptr, counter_ptr = queues
    if T.packed:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        plan = plan_tiles(
            starts_ptr, lengths, n_seqs, n_new, kv_heads, capacity, programs, T.group, T.rows, T.block_b, T.keys,
            T.split, seqs,
        )  # fmt: skip
        at = program
        stop = plan[2]
    else:
        partition, at, stop = plan_work(
            lengths, program, n_seqs, n_new, kv_heads, capacity, programs, None, T.block_b, T.keys, T.min_blocks,
            T.slack, seqs,
        )  # fmt: skip
    slot = 0
    parity = 0
    q_parity = 0
    box = 0
    box_parity = 0
    while at < stop:
        if T.packed:
            # Whoever is free takes what is left. This number is needed only at the end of this tile.
            taken = gl.atomic_add(counter_ptr + lane, (lane == 0).to(gl.int32), mask=lane == 0, sem="relaxed")
            seq, kv_head, q_seq, q_head, q_count, n_keys, low, high, place, _first, count = tile_at(
                at, plan, starts_ptr, lengths_ptr, n_seqs, n_new, kv_heads, capacity, T.group, T.rows, T.causal, T.keys
            )
            work = (q_seq, q_head, n_keys, low, high, place, count, q_count)
        else:
            seq, kv_head, n_keys, _first, low, high, at, place, _program, _stride, _second, count = work_at(
                at, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, None, T.block_b, T.keys,
                seqs,
            )  # fmt: skip
            q_seq = seq
            q_head = kv_head
            work = (seq, kv_head, n_keys, low, high, place, count)  # type: ignore[assignment]
        if low < high:  # else this split of a short sequence is empty
            box, box_parity = _send(work, messages, work_ready, work_free, box, box_parity)
            for block in range(low, high):
                row = block * T.keys
                # Before the wait, which hides the latency of reading the table.
                page = _page_of(table, seq, row, n_keys, T)
                left = 2 * slot
                mbarrier.wait(free.index(left), parity ^ 1)
                mbarrier.expect(ready.index(left), PER_HALF * k_desc.block_type.nbytes)
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, k_pieces, left * PER_HALF, ready.index(left), 0,
                    _PARTS, T,
                )  # fmt: skip
                mbarrier.wait(free.index(left + 1), parity ^ 1)
                mbarrier.expect(ready.index(left + 1), (PER_HALF + T.pieces) * k_desc.block_type.nbytes)
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, k_pieces, (left + 1) * PER_HALF,
                    ready.index(left + 1), _HALF, _PARTS, T,
                )  # fmt: skip
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, last_pieces, slot * T.pieces, ready.index(left + 1),
                    2 * _HALF, 1, T,
                )  # fmt: skip
                slot, parity = next_slot(slot, parity, 2)
                if block == low:  # after the first block, whose slot is free before the queries are
                    mbarrier.wait(q_free.index(0), q_parity ^ 1)
                    _copy_queries(q_desc, q_seq, q_head, tile, q_pieces, q_last, q_ready.index(0), T)
                    q_parity ^= 1
        if T.packed:
            before = gl.max(gl.where(lane == 0, taken, 0), 0)
            at = programs + before
            if before + 1 == stop:  # the last number of all that are taken
                gl.store(counter_ptr + lane, 0, mask=lane == 0)
    _send((0, 0, 0, 0, 0, 0, 0), messages, work_ready, work_free, box, box_parity)


# The warpgroups


@gluon.jit
def _field(messages, i):
    return gl.max(messages.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _receive(messages, work_ready, work_free, n_new, box, parity, T: gl.constexpr):
    """The next piece of work: sequence, KV head, its keys and tokens, first block, end of blocks, where a partial
    result goes, and how many the item has. The last one has no blocks.

    A tile of packed queries is like a sequence of its tokens. Its first token and head are in place of sequence and KV
    head.
    """
    mbarrier.wait(work_ready.index(box), parity)
    at = box * _FIELDS
    seq, kv_head, n_keys = _field(messages, at), _field(messages, at + 1), _field(messages, at + 2)
    low, high = _field(messages, at + 3), _field(messages, at + 4)
    place, count = _field(messages, at + 5), _field(messages, at + 6)
    if T.packed:
        n_new = _field(messages, at + 7)
    mbarrier.arrive(work_free.index(box), count=1)
    return seq, kv_head, (n_keys, n_new), low, high, place, count


@gluon.jit
def _start_scores(q_tiles, k_tiles, ready, slot, parity, T: gl.constexpr):
    """Issue q k^T of the left columns of queries and keys."""
    none = gl.full([T.rows, T.keys], 0, gl.float32, T.scores)
    mbarrier.wait(ready.index(2 * slot), parity)
    k = k_tiles.index(2 * slot).permute((1, 0))
    return warpgroup_mma(q_tiles.index(0), k, none, use_acc=False, is_async=True)


@gluon.jit
def _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity):
    """The scores, before `scale`."""
    mbarrier.wait(ready.index(2 * slot + 1), parity)
    s = warpgroup_mma(q_tiles.index(1), k_tiles.index(2 * slot + 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_last, k_last.index(slot).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, (s,))


@gluon.jit
def _mask(s, block, n_keys, n_new, tile, T: gl.constexpr):
    """Mask the scores of the tile's queries with a block of keys."""
    keys = block * T.keys + gl.arange(0, T.keys, layout=gl.SliceLayout(0, T.scores))
    end = gl.full([T.rows], n_keys, gl.int32, gl.SliceLayout(1, T.scores))
    if T.causal:
        rows = tile * T.rows + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.scores))
        end = gl.minimum(n_keys - n_new + rows // T.group + 1, end)
    return mask_scores(s, keys, None, end)


@gluon.jit
def _softmax(s, row_max, row_sum, block, high, work, scale, k_last, stats, p_ready, slot, tile, T: gl.constexpr):
    """p of a block as an operand, here and for `_accumulate`; alpha; the new row_max and row_sum."""
    n_keys, n_new = work
    if (block + 1) * T.keys > n_keys - (n_new - 1):
        s = _mask(s, block, n_keys, n_new, tile, T)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale)
    p = p.to(k_last.dtype)
    gl.thread_barrier()  # the keys that p replaces: all warps have read them
    k_last.index(slot).store(p)
    stats.index(slot).store(alpha)
    if block + 1 == high:
        stats.index(_SLOTS + slot).store(
            gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout, assert_trivial=True)
        )
    fence_async_shared()
    mbarrier.arrive(p_ready.index(slot), count=1)
    return gl.convert_layout(p, T.operand), alpha, row_max, row_sum


@gluon.jit
def _score(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """s and p of all blocks, and the left half of the output."""
    q_tiles, q_last, k_tiles, k_last, stats, messages = memory
    ready, free, p_ready, q_ready, q_free, work_ready, work_free = barriers
    tile = gl.program_id(0) % T.row_tiles
    slot = 0
    parity = 0
    q_parity = 0
    box = 0
    box_parity = 0
    seq, kv_head, keys, low, high, place, count = _receive(
        messages, work_ready, work_free, size[1], box, box_parity, T
    )  # fmt: skip
    while low < high:
        mbarrier.wait(q_ready.index(0), q_parity)
        q_parity ^= 1
        s = _start_scores(q_tiles, k_tiles, ready, slot, parity, T)
        s = _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity)
        if low + 1 == high:
            mbarrier.arrive(q_free.index(0), count=1)
        o = gl.full([T.rows, _HALF], 0, gl.float32, T.acc)
        row_max = gl.full([T.rows], INITIAL_MAX, gl.float32, gl.SliceLayout(1, T.scores))
        p, _alpha, row_max, row_sum = _softmax(
            s, row_max, None, low, high, keys, scale, k_last, stats, p_ready, slot, tile, T
        )  # fmt: skip
        for block in range(low + 1, high):
            o = warpgroup_mma(p, k_tiles.index(2 * slot), o, is_async=True)
            before = slot
            slot, parity = next_slot(slot, parity, 2)
            s = _start_scores(q_tiles, k_tiles, ready, slot, parity, T)
            o = warpgroup_mma_wait(1, (o,))
            mbarrier.arrive(free.index(2 * before), count=1)
            s = _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity)
            if block + 1 == high:
                mbarrier.arrive(q_free.index(0), count=1)
            p, alpha, row_max, row_sum = _softmax(
                s, row_max, row_sum, block, high, keys, scale, k_last, stats, p_ready, slot, tile, T
            )  # fmt: skip
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, T.acc), assert_trivial=True)[:, None]
        o = warpgroup_mma_wait(0, (warpgroup_mma(p, k_tiles.index(2 * slot), o, is_async=True),))
        mbarrier.arrive(free.index(2 * slot), count=1)
        slot, parity = next_slot(slot, parity, 2)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, T.acc), assert_trivial=True)
        row_max = gl.convert_layout(row_max * scale, gl.SliceLayout(1, T.acc), assert_trivial=True)
        _write(o, row_max, row_sum, outputs, size, seq, kv_head, keys[1], tile, place, count, 0, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = _receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip


@gluon.jit
def _accumulate(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """The right half of the output."""
    _q_tiles, _q_last, k_tiles, k_last, stats, messages = memory
    ready, free, p_ready, _q_ready, _q_free, work_ready, work_free = barriers
    tile = gl.program_id(0) % T.row_tiles
    slot = 0
    parity = 0
    box = 0
    box_parity = 0
    seq, kv_head, keys, low, high, place, count = _receive(
        messages, work_ready, work_free, size[1], box, box_parity, T
    )  # fmt: skip
    while low < high:
        o = gl.full([T.rows, _HALF], 0, gl.float32, T.acc)
        row_sum = gl.full([T.rows], 0, gl.float32, gl.SliceLayout(1, T.acc))
        for _ in range(low, high):
            mbarrier.wait(p_ready.index(slot), parity)
            alpha = stats.index(slot).load(gl.SliceLayout(1, T.acc))
            row_sum = stats.index(_SLOTS + slot).load(gl.SliceLayout(1, T.acc))  # of the last block, the row's
            o = o * alpha[:, None]
            mbarrier.wait(ready.index(2 * slot + 1), parity)
            o = warpgroup_mma(k_last.index(slot), k_tiles.index(2 * slot + 1), o, is_async=True)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(free.index(2 * slot + 1), count=1)
            slot, parity = next_slot(slot, parity, 2)
        _write(o, row_sum, row_sum, outputs, size, seq, kv_head, keys[1], tile, place, count, 1, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = _receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip


@gluon.jit
def _write(
    o, row_max, row_sum, outputs, size, seq, kv_head, n_new, tile, place, count, half: gl.constexpr, T: gl.constexpr
):
    """A half of the rows' output, or of their partial result; the left half with what there is one of a row."""
    out_ptr, lse_ptr, partial_ptr = outputs
    kv_heads = size[2]
    WIDTH: gl.constexpr = 2 * _HALF
    rows = gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.acc))
    cols = half * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(0, T.acc))
    index = tile * T.rows + rows
    token = index // T.group
    head = kv_head + index % T.group if T.packed else kv_head * T.group + index % T.group
    heads = kv_heads * T.group
    there = token < n_new
    if partial_ptr is None or count == 1:
        inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
        row = seq.to(gl.int64) + token if T.packed else seq.to(gl.int64) * n_new + token
        at = out_ptr + row * heads * T.value_dim + head * T.value_dim
        mask = there[:, None] & (cols < T.value_dim)[None, :]
        gl.store(at[:, None] + cols[None, :], (o * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None and half == 0:
            lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN2)
            if T.packed:
                of_lse = head.to(gl.int64) * size[1] + row
            else:
                of_lse = (seq.to(gl.int64) * heads + head) * n_new + token
            gl.store(lse_ptr + of_lse, lse, mask=there)
    else:
        partial = partial_ptr + (place * T.row_tiles + tile).to(gl.int64) * (T.rows * (WIDTH + 2))
        gl.store(partial + (rows * WIDTH)[:, None] + cols[None, :], o, mask=there[:, None])
        if half == 0:
            partial += T.rows * WIDTH
            gl.store(partial + rows, row_max, mask=there)
            gl.store(partial + T.rows + rows, row_sum, mask=there)


_NUMBERS = ["n_seqs", "n_new", "kv_heads", "capacity", "n_pages", "step", "programs", "scale"]


@gluon.jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=["lengths_ptr", "pages_ptr", "lse_ptr", "starts_ptr", "counter_ptr"],
)
def attend_latent(
    q_desc,
    k_desc,
    out_ptr,
    lengths_ptr,
    pages_ptr,
    lse_ptr,
    partial_ptr,
    starts_ptr,
    counter_ptr,
    stride_pb,
    n_seqs,
    n_new,
    kv_heads,
    capacity,
    n_pages,
    step,
    programs,
    scale,
    T: gl.constexpr,
):
    """out = softmax(scores of q and k) k[:, :value_dim], with the lse of each row of scores, or partial results.

    Packed queries begin at `starts` for each sequence, and `n_new` are all of them.
    """
    SHARED: gl.constexpr = T.shared
    q_pieces = gl.allocate_shared_memory(q_desc.dtype, [2 * _PARTS, T.rows, _PART], SHARED)
    q_last = gl.allocate_shared_memory(q_desc.dtype, [T.rows, _PART], SHARED)
    k_pieces = gl.allocate_shared_memory(k_desc.dtype, [2 * _SLOTS * _PARTS * T.pieces, T.piece_rows, _PART], SHARED)
    last_pieces = gl.allocate_shared_memory(k_desc.dtype, [_SLOTS * T.pieces, T.piece_rows, _PART], SHARED)
    Q_TILES: gl.constexpr = [2, T.rows, _HALF.value]
    K_TILES: gl.constexpr = [2 * _SLOTS.value, T.keys, _HALF.value]
    K_LAST: gl.constexpr = [_SLOTS.value, T.keys, _PART.value]
    q_tiles = view_as(q_pieces, Q_TILES, q_pieces)
    k_tiles = view_as(k_pieces, K_TILES, k_pieces)
    k_last = last_pieces if T.pieces == 1 else view_as(last_pieces, K_LAST, last_pieces)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = gl.allocate_shared_memory(gl.float32, [2 * _SLOTS, T.rows], FLAT)
    messages = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2 * _SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * _SLOTS, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    work_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    work_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * _SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(work_ready.index(i), count=1)
        mbarrier.init(work_free.index(i), count=2)
    mbarrier.init(q_ready.index(0), count=1)
    mbarrier.init(q_free.index(0), count=1)
    fence_async_shared()  # makes the initialised barriers visible to TMA
    if T.pdl:
        pdl_wait()
        pdl_launch_dependents()  # perhaps combine_kernel, which reads the lengths at once

    barriers = (ready, free, p_ready, q_ready, q_free, work_ready, work_free)
    outputs = (out_ptr, lse_ptr, partial_ptr)
    memory = (q_tiles, q_last, k_tiles, k_last, stats, messages)
    to_fill = (q_pieces, q_last, k_pieces, last_pieces, messages)
    size = (n_seqs, n_new, kv_heads, capacity, programs)
    table = (pages_ptr, stride_pb, n_pages, step)
    gl.warp_specialize(
        [
            (_score, (outputs, memory, barriers, size, scale, T)),
            (_accumulate, (outputs, memory, barriers, size, scale, T)),
            (_produce, (q_desc, k_desc, lengths_ptr, (starts_ptr, counter_ptr), table, to_fill, barriers, size, T)),
        ],
        [4, 1],
        [224, 56],
    )


def can_implement(
    q: Tensor, k: Tensor, s: Shape, scale: float, options: tuple[str, ...], target: runtime.Target
) -> str | None:
    """None where this kernel can run such a call, or the reason why it can't.

    Args:
        q: (batch, tokens, heads, dim), with a last stride of 1.
        k: (pages or sequences, heads, tokens, dim), with a last stride of 1.
        scale: of the scores.
        options: the names of those that the kernel does not have.
    """
    aligned = is_describable(q) and is_describable(k) and page_step(k) > 0
    return can_run((q.dtype, k.dtype), aligned, s, scale, options, target)


def can_run(
    dtypes: tuple[torch.dtype, torch.dtype], aligned: bool, s: Shape, scale: float, options: tuple[str, ...],
    target: runtime.Target,
) -> str | None:  # fmt: skip
    """As `can_implement`, for the dtypes of q and k, and whether both can be described to TMA.

    Packed queries are `s.n_new` tokens, of `s.batch` sequences.
    """
    group = s.heads // s.kv_heads
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if dtypes[0] not in _DTYPES or dtypes[1] != dtypes[0]:
        return f"kernel 'hopper' takes float16 and bfloat16, not {dtypes[0]} and a cache of {dtypes[1]}"
    if not (s.values_in_keys and 512 < s.head_dim <= 576 and 256 < s.value_dim <= 512):
        return (
            "kernel 'hopper' takes a latent cache of 513 to 576 elements, of which 257 to 512 are values, not "
            f"{s.head_dim} and {s.value_dim}"
        )
    if options:
        return f"kernel 'hopper' takes no {' and no '.join(options)}"
    if 2 * group * s.n_new <= ROWS or (group % ROWS and ROWS % group):
        return (
            f"kernel 'hopper' takes over {ROWS // 2} query rows of a KV head, whose heads are a multiple or a divisor "
            f"of {ROWS}, not {group} heads and {s.n_new} tokens"
        )
    if not aligned:
        return "kernel 'hopper' takes a q and a cache whose base and strides are multiples of 16 bytes, no stride 0"
    # Scores, -inf and the lowest maximum (-1e30) are multiplied by it: the results may be neither 0 nor over float32.
    if not 2.0**-100 < scale < 2.0**27:
        return f"kernel 'hopper' takes a scale from 2^-100 to 2^27, not {scale}"
    if not 1 < s.capacity < 1 << 30 or s.batch > _MOST_SEQUENCES:
        return (
            f"kernel 'hopper' takes 2 to 2^30 - 1 keys of up to {_MOST_SEQUENCES} sequences, not {s.capacity} of "
            f"{s.batch}"
        )
    return None


def launcher(**form: Any) -> KernelLauncher:
    """The kernel of a `Form` of those arguments."""
    t = Form(**form)
    return KernelLauncher(attend_latent, {"T": t}, num_warps=4, maxnreg=_REGISTERS, **pdl.options(t.pdl))


def bind_to(
    launcher: KernelLauncher, q: Tensor, k: Tensor, s: Shape, page_table: Tensor | None, programs: int, scale: float
) -> Callable[..., None]:
    """The launch for tensors as in `can_implement`, to be called with the kernel's. `scale` is times log2(e).

    Packed queries are those of one sequence, and `s.n_new` of `s.batch` sequences.
    """
    form = launcher.constants["T"]
    of_rows, of_keys = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (4, 5))
    return bind(
        launcher,
        programs * form.row_tiles,
        strides=(0 if page_table is None else page_table.stride(0),),
        numbers=(s.batch, s.n_new, s.kv_heads, s.capacity, s.n_pages, page_step(k), programs, scale),
        descriptors={
            0: describe(q, form.q_box, of_rows),
            1: describe_pages(k, (form.piece_rows, _PART.value), of_keys),
        },
    )


def prepare(
    launcher: KernelLauncher, q: Tensor, k: Tensor, s: Shape, page_table: Tensor | None, programs: int, scale: float
) -> Callable[..., None]:
    """As `bind_to`, to be called as the launch of `decode_kernel` is."""
    start = bind_to(launcher, q, k, s, page_table, programs, scale)

    def run(q: Tensor, k: Tensor, v: None, lengths: Tensor, page_table: Tensor | None, *rest: Any) -> None:
        *_, out, lse, partial, _counters = rest
        start(q, k, out, lengths, page_table, lse, partial, None, None)

    return run
