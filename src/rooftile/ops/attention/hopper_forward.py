"""The attention forward for sm_90 (Gluon): warp-specialized, with TMA loads and wgmma, persistent.

The algorithm is FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608): an online softmax over blocks of
keys, overlapped with the GEMMs.

Work: one CTA stays on each SM and walks over its tiles, each up to 192 queries of one head (short prompts: see below).
A producer warp loads the tile's queries by TMA, and fills a ring of pipeline stages with blocks of keys and values,
from the highest that the tile sees to the lowest. The highest may be ragged or cut by causality, so it is always
masked; the others only where it is needed (`_steps`). One to three consumer warpgroups compute 64 query rows each:

    s = q k^T of a block     issued together with o += p v of the previous block, so the tensor cores stay busy
    p = softmax of s         computed as soon as s is complete, while p v is still in flight

Registers of a consumer: s in float32, p in 16 bits as the first operand of p v, its rows of o, their maxima and sums.
Shared memory: q, the ring, and the output on its way to memory.

With `pingpong` each consumer issues its GEMMs after the one before it, so that the softmax of one overlaps the GEMMs of
another. With `overlap_tiles` the overlap continues across tiles: the first scores of the next tile are issued together
with the last p v of this one.

Limits: a score takes 4 D operations of the tensor cores and one exp2, of which an SM does 16 a clock. At D = 64 exp2
takes as long as the GEMMs, at 128 half as long. The tile is limited by registers (`can_implement`).

Barriers (slots and parities: `primitives.gluon`):

    ready[slot]       completed by the bytes that land; the consumers wait for it
    free[slot]        completed by one arrival of each consumer; the producer waits for it
    q_ready, q_free   the same for the queries
    pingpong[i]       completed by one arrival of the consumer before i, once it has issued its GEMMs

The order of blocks in the ring is k of the block that a tile visits first, then k of each next one followed by v of the
one before it, and v of the block that it visits last. With `overlap_tiles`, the next tile's first k comes before that
last v.

The sum of a fully masked row is 0 (`primitives.warpgroup_softmax`), and only `_write` treats such a row apart.

The kernel's one constant, T, is a `Tiling` (`hopper_tiling`). num_warps of a configuration counts the consumers' warps,
4 for each 64 queries of block_m; one more warp is the producer.

For short prompts, prologue and epilogue are much of the time. So each CTA has one tile (`Tiling.single`): less is
computed before the first loads, and no next tile is started at the end. It has one consumer, so that two CTAs fit on an
SM, or two, of which one sees few keys where the other sees many (`Tiling.paired`).

With causality or a window, tiles differ in length: `work_order` says which CTA takes which. The lengths of packed
sequences are known on the device alone, so a kernel before this one lists the tiles (`packed`). TMA treats the end of
each sequence as the end of a tensor: it loads zeros past the last token, whatever the next sequence has there, even
NaN, and stores nothing there (`primitives.gluon.describe_packed`). Keys and values in pages are loaded a block at a
time too: part of a page by one copy, or, where pages are smaller than blocks, each page of the block by copies of its
own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import Descriptor, KernelLauncher, bind
from rooftile.ops.attention import dequantize_pages, packed
from rooftile.ops.attention.hopper_scheduler import count_tiles, first_row, rows_at, size_of, tile_at
from rooftile.ops.attention.hopper_tiling import Tiling, by_place, swizzle_bytes, tiling
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, has_pairs, tiles_of
from rooftile.ops.attention.work_order import (
    MOST_TILES,
    divide_by_reciprocal,
    end_of,
    reciprocals,
    skips_of,
    work_order,
)
from rooftile.primitives.gluon import (
    describe,
    describe_packed,
    describe_pages,
    is_describable,
    load_tile,
    next_slot,
    packed_at,
    store_tile,
    view_as,
)
from rooftile.primitives.paging import page_step
from rooftile.primitives.scores import LN2, LOG2E
from rooftile.primitives.warpgroup_softmax import INITIAL_MAX, mask_scores, softmax_step

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

accepts = is_describable
_DTYPES = (torch.bfloat16, torch.float16)
# Registers of a thread at launch, by consumers. The producer counts as 4 warps, so there are 8, 12 or 16 warps; with 8,
# two CTAs fit on an SM. `warp_specialize` then moves most of the producer's registers to the consumers.
_REGISTERS = {1: 128, 2: 168, 3: 128}
_L2 = 32 << 20  # bytes of keys and values that stay in the L2 while they are in use
_NUMBERS = ["left", "right", "width", "wide", "narrow", "wide_rounds", "narrow_rounds", "stride_pages", "n_pages"]


@gluon.jit
def _capped(s, cap_factor, T: gl.constexpr):
    """Scores before `scale`: q·k, or its tanh, as 1 - 2 / (e^2x + 1); `cap_factor` includes 2 log2(e) (`prepare`)."""
    if T.capped:
        e = gl.exp2(s * cap_factor)
        return 1.0 - 2.0 / (e + 1.0)
    else:
        return s


@gluon.jit
def _mask(s, row, block, size, limits, T: gl.constexpr):
    """Mask the scores of the queries from `row` on with a block of keys."""
    _tiles, _heads, n_q, n_k = size
    left, right = limits
    keys = block * T.keys + gl.arange(0, T.keys, layout=gl.SliceLayout(0, T.scores_layout))
    position = (row + n_k - n_q) + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.scores_layout))
    end = gl.full([T.rows], n_k, gl.int32, gl.SliceLayout(1, T.scores_layout))
    if T.has_right:
        end = gl.minimum(position + right + 1, n_k)
    begin = position - left if T.has_left else None
    return mask_scores(s, keys, begin, end)


@gluon.jit
def _as_operand(p, dtype, T: gl.constexpr):
    """p as the first operand of p v, in registers."""
    return gl.convert_layout(p.to(dtype), T.p_layout)


@gluon.jit
def _fill(desc, table, seq, head, block, ring, slot, parity, T: gl.constexpr):
    """Start the load of a block of keys or values into a slot of the ring, (tiles, ready, free), once it is free."""
    tiles, ready, free = ring
    if T.page:  # before the wait, which hides the latency of reading the table
        page = _page_of(table, seq, block * T.keys, T)
    mbarrier.wait(free.index(slot), parity ^ 1)
    if T.page:
        _load_pages(desc, table, page, seq, head, block, ready, slot, T)
    else:
        mbarrier.expect(ready.index(slot), desc.block_type.nbytes)
        load_tile(desc, rows_at(seq, 1, head, block * T.keys, T), ready.index(slot), tiles.index(slot))
    return next_slot(slot, parity, T.stages)


@gluon.jit
def _page_of(table, seq, row, T: gl.constexpr):
    """The page of key `row`, or of the last key if `row` is past it; clamped to the pages that exist."""
    pages_ptr, stride, n_pages, _pieces = table
    _end_q, _n_q, index, n_k = seq
    number = gl.minimum(row, gl.maximum(n_k - 1, 0)) // T.page
    return gl.minimum(gl.maximum(gl.load(pages_ptr + index.to(gl.int64) * stride + number), 0), n_pages - 1)


@gluon.jit
def _load_pages(desc, table, page, seq, head, block, ready, slot, T: gl.constexpr):
    """Start the loads of a block whose first page is `page`. Tokens past the end of the sequence become zeros, whatever
    the page holds.

    The next page is looked up before the loads from this one, so that the table's latency is hidden.
    """
    _pages_ptr, _stride, _n_pages, pieces = table
    _end_q, _n_q, _index, n_k = seq
    PAGES: gl.constexpr = T.keys // T.piece_rows
    PARTS: gl.constexpr = T.dim // T.piece_cols
    mbarrier.expect(ready.index(slot), PAGES * PARTS * desc.block_type.nbytes)
    for j in range(PAGES):
        row = block * T.keys + j * T.piece_rows
        following = page if PAGES == 1 else _page_of(table, seq, row + T.piece_rows, T)
        begin = row // T.page * T.page
        n = gl.minimum(gl.maximum(n_k - begin, 0), T.page)
        for part in gl.static_range(PARTS):
            at = packed_at(page * T.step + n, n, head, row - begin, part * T.piece_cols)
            load_tile(desc, at, ready.index(slot), pieces.index((slot * PARTS + part) * PAGES + j))
        page = following


@gluon.jit
def _produce(q_desc, k_desc, v_desc, table, memory, size, limits, order, T: gl.constexpr):
    """The producer: load the queries of each tile, and keep the ring full."""
    q_ring, ring, _out_ring, _pingpong = memory
    q_tiles, q_ready, q_free = q_ring
    _tiles, heads, _n_q, _n_k = size
    if T.single:
        _all_heads, _all_heads_reciprocal, _heads_reciprocal, group_reciprocal, _unused = order
    else:
        heads_per_kv = heads // k_desc.shape[2 if T.packed else 1]
    slot = 0
    parity = 0
    buffer = 0
    q_parity = 0
    old_seq = (0, 0, 0, 0) if T.packed else 0
    old_head = 0
    old_block = 0
    count = count_tiles(size, T)
    for i in range(count):
        seq, head, row, begin, end = tile_at(i, size, limits, order, T)
        kv_head = divide_by_reciprocal(head, group_reciprocal) if T.single else head // heads_per_kv
        slot, parity = _fill(k_desc, table, seq, kv_head, end - 1, ring, slot, parity, T)
        if T.overlap_tiles:  # noqa: SIM102  # the one is known when it is compiled
            if i > 0:
                slot, parity = _fill(v_desc, table, old_seq, old_head, old_block, ring, slot, parity, T)
        mbarrier.wait(q_free.index(buffer), q_parity ^ 1)
        mbarrier.expect(q_ready.index(buffer), T.consumers * q_desc.block_type.nbytes)
        for j in gl.static_range(gl.constexpr(T.consumers)):
            to = q_tiles.index(buffer * T.consumers + j)
            load_tile(q_desc, rows_at(seq, 0, head, first_row(row, j, size, T), T), q_ready.index(buffer), to)
        buffer += 1
        q_parity = gl.where(buffer == T.q_buffers, q_parity ^ 1, q_parity)
        buffer = gl.where(buffer == T.q_buffers, 0, buffer)
        for j in range(begin + 1, end):
            block = begin + end - 1 - j
            slot, parity = _fill(k_desc, table, seq, kv_head, block, ring, slot, parity, T)
            slot, parity = _fill(v_desc, table, seq, kv_head, block + 1, ring, slot, parity, T)
        if T.overlap_tiles:
            old_seq = seq
            old_head = kv_head
            old_block = begin
        else:
            slot, parity = _fill(v_desc, table, seq, kv_head, begin, ring, slot, parity, T)
    if T.overlap_tiles:  # the consumers issue the last p v with the scores of one more block, which they drop
        slot, parity = _fill(k_desc, table, old_seq, old_head, old_block, ring, slot, parity, T)
        slot, parity = _fill(v_desc, table, old_seq, old_head, old_block, ring, slot, parity, T)


@gluon.jit
def _skip(ring, slot, parity, count, T: gl.constexpr):
    """Release `count` slots unread, each once it is filled. Otherwise this consumer could lap the ring, and free a slot
    that the other one still reads.
    """
    _tiles, ready, free = ring
    for _ in range(count):
        mbarrier.wait(ready.index(slot), parity)
        mbarrier.arrive(free.index(slot), count=1)
        slot, parity = next_slot(slot, parity, T.stages)
    return slot, parity


@gluon.jit
def _start_scores(q, ring, slot, T: gl.constexpr):
    """Issue s = q k^T, without the columns past `T.multiplied`, which are all zeros."""
    tiles, _ready, _free = ring
    keys = tiles.index(slot).permute((1, 0))
    s = gl.full([T.rows, T.keys], 0, gl.float32, T.scores_layout)
    BODY: gl.constexpr = T.multiplied[0]
    TAIL: gl.constexpr = T.multiplied[1]
    if TAIL == 0:
        return warpgroup_mma(q, keys, s, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(q.slice(0, BODY, dim=1), keys.slice(0, BODY), s, use_acc=False, is_async=True)
        return warpgroup_mma(q.slice(BODY, TAIL, dim=1), keys.slice(BODY, TAIL), s, is_async=True)


@gluon.jit
def _pingpong_wait(pingpong, turn, mine: gl.constexpr, T: gl.constexpr):
    """Wait until the consumer before this one has issued its GEMMs; the parity of the next turn."""
    if T.pingpong:
        mbarrier.wait(pingpong.index(mine), turn)
    return turn ^ 1


@gluon.jit
def _pingpong_arrive(pingpong, mine: gl.constexpr, T: gl.constexpr):
    """Give the turn to the next consumer."""
    if T.pingpong:
        mbarrier.arrive(pingpong.index((mine + 1) % T.consumers), count=1)


@gluon.jit
def _step(state, q, ring, pingpong, at, row, block, masked, size, scoring, mine: gl.constexpr, T: gl.constexpr):
    """One step of the mainloop: s and p of a block, while the tensor cores compute p v of the previous block.

    The keys have landed: the end of the previous step waited for them, behind the softmax, so that the next GEMM is
    issued without a wait. wgmma complete in the order of issue, so waiting until one is in flight waits for s alone.
    """
    o, p, row_max, row_sum = state
    slot, parity, turn = at
    scale, cap_factor, limits = scoring
    tiles, ready, free = ring
    turn = _pingpong_wait(pingpong, turn, mine, T)
    before = slot
    s = _start_scores(q, ring, slot, T)
    slot, parity = next_slot(slot, parity, T.stages)
    mbarrier.wait(ready.index(slot), parity)
    o = warpgroup_mma(p, tiles.index(slot), o, is_async=True)
    _pingpong_arrive(pingpong, mine, T)
    s = warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(free.index(before), count=1)
    s = _capped(s, cap_factor, T)
    if T.limited:  # noqa: SIM102  # the one is known when it is compiled
        if masked:
            s = _mask(s, row, block, size, limits, T)
    new_p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale)
    before = slot
    slot, parity = next_slot(slot, parity, T.stages)
    mbarrier.wait(ready.index(slot), parity)
    o = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(free.index(before), count=1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, T.acc_layout))[:, None]
    p = _as_operand(new_p, p.dtype, T)
    return (o, p, row_max, row_sum), (slot, parity, turn)


@gluon.jit
def _steps(state, q, ring, pingpong, at, row, begin, end, size, scoring, mine: gl.constexpr, T: gl.constexpr):
    """The mainloop: all blocks of a tile but its last, which is done already. Only blocks at an edge are masked.

    It is one loop with a branch. With two loops, for masked and for whole blocks, ptxas computed the descriptors of q
    before the first, and the second used them even where the first did not run.
    """
    _tiles, _heads, n_q, n_k = size
    _scale, _cap_factor, limits = scoring
    left, right = limits
    position = row + n_k - n_q  # of this consumer's first query
    mask_from = end - 1
    if T.has_right:
        mask_from = gl.minimum(position + right + 1, n_k) // T.keys
    mask_below = begin
    if T.has_left:
        mask_below = gl.cdiv(position + (T.rows - 1) - left, gl.constexpr(T.keys))
    for j in range(begin, end - 1):
        block = begin + end - 2 - j
        masked = (block >= mask_from) | (block < mask_below)
        state, at = _step(state, q, ring, pingpong, at, row, block, masked, size, scoring, mine, T)
    return state, at


@gluon.jit
def _write(o, row_max, row_sum, out, out_desc, lse_ptr, sinks_ptr, seq, head, row, size, scale, T: gl.constexpr):
    """The epilogue: normalize o, store it by TMA through the buffer `out`, and store the rows' log-sum-exp."""
    _tiles, heads, n_q, _n_k = size
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout, assert_trivial=True)
    row_max = row_max * scale
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        new_max = gl.maximum(row_max, sink)
        alpha = gl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + gl.exp2(sink - new_max)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, T.acc_layout))[:, None]
        row_max = new_max
    rows = row + gl.arange(0, T.rows, layout=row_max.type.layout)
    if T.packed:
        at = lse_ptr + head.to(gl.int64) * n_q
        end_q, n_q, _end_k, _n_k = seq
        at += end_q - n_q
    else:
        at = lse_ptr + (seq * heads + head).to(gl.int64) * n_q
    gl.store(at + rows, (row_max + gl.log2(row_sum)) * LN2, mask=rows < n_q)
    o = o * gl.convert_layout(gl.where(row_sum > 0, 1.0 / row_sum, 0.0), gl.SliceLayout(1, T.acc_layout))[:, None]
    tma.store_wait(0)  # the previous tile's store has read the buffer
    out.store(o.to(out_desc.dtype))
    fence_async_shared()  # makes it visible to TMA
    store_tile(out_desc, rows_at(seq, 0, head, row, T), out)


@gluon.jit
def _consume(out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, mine: gl.constexpr, T: gl.constexpr):
    """Consumer `mine`: 64 rows of every tile, from mine * rows on; with `paired`, consumer 1 has the partner block."""
    q_ring, ring, out_ring, pingpong = memory
    scale, cap_factor, limits = scoring
    if T.scale != 0:
        scale = gl.constexpr(T.scale)
        scoring = (scale, cap_factor, limits)
    tiles, ready, free = ring
    q_tiles, q_ready, q_free = q_ring
    out = out_ring.index(mine)
    initial_max = gl.full([T.rows], INITIAL_MAX, gl.float32, gl.SliceLayout(1, T.scores_layout))
    zeros = gl.full([T.rows, T.dim], 0, gl.float32, T.acc_layout)
    slot = 0
    parity = 0
    buffer = 0
    q_parity = 0
    turn = 0 if mine else 1  # the parity for which consumer 0's first wait passes
    count = count_tiles(size, T)
    seq, head, row, begin, end = tile_at(0, size, limits, order, T)
    row = first_row(row, mine, size, T)
    if T.paired and mine:
        longest = end
        _tiles, _heads, n_q, n_k = size
        _left, right = limits
        end = end_of(row, longest, n_q, n_k, right, T.rows, T.keys)
        before_scores, before_values = skips_of(longest, end)
        slot, parity = _skip(ring, slot, parity, before_scores, T)
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(ready.index(slot), parity)
    s = warpgroup_mma_wait(0, (_start_scores(q_tiles.index(mine), ring, slot, T),))
    mbarrier.arrive(free.index(slot), count=1)
    s = _mask(_capped(s, cap_factor, T), row, end - 1, size_of(seq, size, T), limits, T)
    p, _alpha, row_max, row_sum = softmax_step(s, initial_max, None, scale)
    p = _as_operand(p, out_desc.dtype, T)
    slot, parity = next_slot(slot, parity, T.stages)
    if T.paired and mine:
        slot, parity = _skip(ring, slot, parity, before_values, T)
    mbarrier.wait(ready.index(slot), parity)
    for i in range(count):
        last = i + 1 == count
        if T.single:
            new_seq, new_head, new_row, new_begin, new_end = seq, head, row, begin, end
        elif not T.packed:
            following = gl.minimum(i + 1, count - 1)
            new_seq, new_head, new_row, new_begin, new_end = tile_at(following, size, limits, order, T)
            new_row = first_row(new_row, mine, size, T)
        q = q_tiles.index(buffer * T.consumers + mine)
        state = (zeros, p, row_max, row_sum)
        own_size = size_of(seq, size, T)
        state, at = _steps(state, q, ring, pingpong, (slot, parity, turn), row, begin, end, own_size, scoring, mine, T)
        slot, parity, turn = at
        o, p, row_max, row_sum = state
        if T.packed:  # the tile is read again: the mainloop has no registers for what only the epilogue needs
            seq, head, row, begin, end = tile_at(i, size, limits, order, T)
            row = first_row(row, mine, size, T)
            following = gl.minimum(i + 1, count - 1)
            new_seq, new_head, new_row, new_begin, new_end = tile_at(following, size, limits, order, T)
            new_row = first_row(new_row, mine, size, T)
        new_size = size_of(new_seq, size, T)
        mbarrier.arrive(q_free.index(buffer), count=1)
        # The next tile's queries; at the end those of the last tile once more.
        next_buffer = gl.where(buffer + 1 == T.q_buffers, 0, buffer + 1)
        next_parity = gl.where(buffer + 1 == T.q_buffers, q_parity ^ 1, q_parity)
        buffer = gl.where(last, buffer, next_buffer)
        q_parity = gl.where(last, q_parity, next_parity)
        q = q_tiles.index(buffer * T.consumers + mine)
        if T.overlap_tiles:
            mbarrier.wait(q_ready.index(buffer), q_parity)
            turn = _pingpong_wait(pingpong, turn, mine, T)
            before = slot
            s = _start_scores(q, ring, slot, T)
            slot, parity = next_slot(slot, parity, T.stages)
            mbarrier.wait(ready.index(slot), parity)
            o = warpgroup_mma(p, tiles.index(slot), o, is_async=True)
            _pingpong_arrive(pingpong, mine, T)
            s = warpgroup_mma_wait(1, (s,))
            mbarrier.arrive(free.index(before), count=1)
            s = _mask(_capped(s, cap_factor, T), new_row, new_end - 1, new_size, limits, T)
            new_p, _alpha, new_max, new_sum = softmax_step(s, initial_max, None, scale)
            before = slot
            slot, parity = next_slot(slot, parity, T.stages)
            if not last:
                mbarrier.wait(ready.index(slot), parity)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(free.index(before), count=1)
            p = _as_operand(new_p, out_desc.dtype, T)
            _write(o, row_max, row_sum, out, out_desc, lse_ptr, sinks_ptr, seq, head, row, size, scale, T)
            row_max = new_max
            row_sum = new_sum
        else:
            o = warpgroup_mma_wait(0, (warpgroup_mma(p, tiles.index(slot), o, is_async=True),))
            mbarrier.arrive(free.index(slot), count=1)
            slot, parity = next_slot(slot, parity, T.stages)
            _write(o, row_max, row_sum, out, out_desc, lse_ptr, sinks_ptr, seq, head, row, size, scale, T)
            if not last:
                mbarrier.wait(q_ready.index(buffer), q_parity)
                mbarrier.wait(ready.index(slot), parity)
                s = warpgroup_mma_wait(0, (_start_scores(q, ring, slot, T),))
                mbarrier.arrive(free.index(slot), count=1)
                s = _mask(_capped(s, cap_factor, T), new_row, new_end - 1, new_size, limits, T)
                p, _alpha, row_max, row_sum = softmax_step(s, initial_max, None, scale)
                p = _as_operand(p, out_desc.dtype, T)
                slot, parity = next_slot(slot, parity, T.stages)
                mbarrier.wait(ready.index(slot), parity)
        seq, head, row, begin, end = new_seq, new_head, new_row, new_begin, new_end
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr", "tiles_ptr", "pages_ptr"]
)
def attend(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    sinks_ptr,
    tiles_ptr,
    pages_ptr,
    scale,
    cap_factor,
    left,
    right,
    width,
    wide,
    narrow,
    wide_rounds,
    narrow_rounds,
    stride_pages,
    n_pages,
    T: gl.constexpr,
):
    """out = softmax(scores of q and k) v, and the log-sum-exp of each row of scores."""
    pieces = gl.allocate_shared_memory(k_desc.dtype, T.pieces, T.shared_layout)
    RING: gl.constexpr = T.ring
    tiles = pieces if T.piece_rows == T.keys else view_as(pieces, RING, pieces)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, T.q_ring, T.shared_layout)
    out_ring = gl.allocate_shared_memory(out_desc.dtype, T.out_ring, T.shared_layout)
    ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [T.q_buffers, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [T.q_buffers, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=T.consumers)
    for i in gl.static_range(gl.constexpr(T.q_buffers)):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=T.consumers)
    # Only where it is used: Triton may reuse the memory of a barrier on which nothing waits, for arguments of the other
    # warps, and its initialization could overwrite them (see hopper_backward_dkdv).
    pingpong = ready  # a placeholder
    if T.pingpong:
        pingpong = gl.allocate_shared_memory(gl.int64, [T.consumers, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(gl.constexpr(T.consumers)):
            mbarrier.init(pingpong.index(i), count=1)
    fence_async_shared()  # makes the initialized barriers visible to TMA

    if T.packed:
        size = (gl.load(tiles_ptr), q_desc.shape[2], q_desc.shape[1] - 1, k_desc.shape[1] - 1)
    else:
        heads = q_desc.shape[1]
        n_q = q_desc.shape[2]
        count = q_desc.shape[0] * heads * gl.cdiv(n_q, gl.constexpr(T.tile_rows))
        size = (count, heads, n_q, k_desc.shape[2])
    memory = ((q_tiles, q_ready, q_free), (tiles, ready, free), out_ring, pingpong)
    table = (pages_ptr, stride_pages, n_pages, pieces) if T.page else 0
    limits = (left, right)
    scoring = (scale, cap_factor, limits)
    order = tiles_ptr if T.packed else (width, wide, narrow, wide_rounds, narrow_rounds)
    # The first function runs in the launched 4 warps. The lists have the warps and registers of the others.
    if T.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 0, T)),
                (_produce, (q_desc, k_desc, v_desc, table, memory, size, limits, order, T)),
            ],
            [1],
            [40],
        )
    elif T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 0, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 1, T)),
                (_produce, (q_desc, k_desc, v_desc, table, memory, size, limits, order, T)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 0, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 1, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, memory, size, scoring, order, 2, T)),
                (_produce, (q_desc, k_desc, v_desc, table, memory, size, limits, order, T)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where this kernel can run that problem in that configuration, or the reason why it can't."""
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if p.dtype not in _DTYPES:
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.mask or p.alibi:
        return "kernel 'hopper' takes no mask and no ALiBi"
    if p.narrow and (needed := dequantize_pages.nbytes(p)) > dequantize_pages.MOST_BYTES:
        return (
            f"kernel 'hopper' takes a cache in 8 bits or with scales in a copy of up to {dequantize_pages.MOST_BYTES} "
            f"bytes, not {needed}"
        )
    if p.head_dim != p.value_dim or p.head_dim % 8 or not 8 <= p.head_dim <= 256:
        return (
            f"kernel 'hopper' takes one head_dim for keys and values, a multiple of 8 up to 256, not {p.head_dim} and "
            f"{p.value_dim}"
        )
    if not p.aligned:
        return "kernel 'hopper' takes tensors whose base and strides are multiples of 16 bytes"
    # The factor multiplies scores, the -inf of masked ones and the first maximum, -1e30. It may not vanish, as 0 * -inf
    # is NaN, and its product with -1e30 must be finite.
    factor = p.scoring.softcap or p.scoring.scale
    if not (p.scoring.scale > 0 and 2.0**-100 < factor < 2.0**27):
        return f"kernel 'hopper' takes a scale above 0, and it or the softcap from 2^-100 to 2^27, not {p.scoring}"
    if min(p.batch, p.heads, p.n_q, p.n_k) < 1 or max(p.n_q, p.n_k) >= 2**30:
        return f"kernel 'hopper' takes from 1 to 2^30 - 1 queries and keys, not {p.n_q} and {p.n_k}"
    if p.packed:
        if p.tokens >= 2**29 or p.heads * (p.tokens // 64 + p.batch) >= 2**27:  # a list of 8 int32 a tile
            return f"kernel 'hopper' takes fewer than {p.tokens} tokens of {p.batch} sequences and {p.heads} heads"
    elif tiles_of(p, 64) >= 2**30:
        return f"kernel 'hopper' takes fewer tiles than {p.batch} x {p.heads} heads of {p.n_q} queries are"
    if c.num_warps not in (4, 8, 12) or c.block_m != 16 * c.num_warps:
        return f"block_m is {c.block_m}: kernel 'hopper' takes 64 queries for every 4 of 4, 8 or 12 warps"
    if c.num_warps == 4 and (p.packed or p.head_dim > 128 or tiles_of(p, 64) > MOST_TILES):
        return (
            f"num_warps is {c.num_warps}: kernel 'hopper' takes 4 for heads up to 128 and up to {MOST_TILES} tiles "
            "that are not packed"
        )
    if not 16 <= c.block_n <= 256:
        return f"block_n is {c.block_n}: kernel 'hopper' takes 16 to 256 keys"
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}: kernel 'hopper' takes a ring of 2 blocks or more"
    t = tiling(c, p.scoring.flags, p.head_dim, target.shared_memory, p.packed, has_pairs(p, target))
    if t.rows * (t.dim * 2 + t.keys * 3) // 256 > (130 if t.consumers == 3 else 180):
        return f"the tile is {c.block_m} x {c.block_n}: more than the registers of {c.num_warps} warps hold"
    if t.shared_memory > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: {t.shared_memory} bytes of tiles, expected at most {target.shared_memory}"
        )
    return None


def prepare(x: Inputs, out: Tensor, c: AttentionConfig, table: Tensor | None = None) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `q, k, v, out, lse, *x.tensors`.

    q, k, v and out are (batch, heads, tokens, dim) that TMA can describe, and lse (batch, heads, tokens) contiguous.

    With a table, k and v are (pages, heads, page, dim), starts_k are the lengths, and the table is a last argument.
    """
    target, is_packed = runtime.target(x.q.device), x.starts_q is not None
    batch, heads, n_q, head_dim = x.q.shape
    pages, kv_heads, n_k = x.k.shape[:3]
    t = tiling(c, x.scoring.flags, head_dim, target.shared_memory, is_packed, has_pairs(x.problem, target))
    factor, cap, left, right = x.scoring.numbers
    scale, cap_factor = (cap, 2 * LOG2E.value * factor) if t.capped else (factor, 0.0)
    t = dataclasses.replace(t, scale=x.scoring.default_factor(head_dim))
    stride = 0
    if table is not None:
        t = dataclasses.replace(t, page=n_k, step=page_step(x.k))
        stride, n_k = table.stride(0), x.longest_k
    heads_in_l2 = max(1, _L2 // (2 * n_k * t.dim * x.k.element_size()))
    list_tiles = None
    blocks = library.cdiv(n_q, t.tile_rows)
    if is_packed:
        in_l2 = heads_in_l2 * (heads // kv_heads)
        numbers = (n_q, n_k, t.tile_rows, t.keys, left, right, target.multiprocessors, in_l2)
        tiles = packed.TileList(heads, x.sequences, *numbers, counted=table is not None)
        programs, order = tiles.programs, (0,) * 5
        list_tiles = packed.prepare_tiles(tiles)
    elif t.single:
        programs = batch * heads * blocks
        order = reciprocals(batch, heads, kv_heads)
    else:
        programs = min(target.multiprocessors, batch * heads * blocks)
        order = work_order(batch * heads, blocks, programs, heads_in_l2)
    start = bind(
        _launcher(t, x.q.dtype, None if x.sinks is None else x.sinks.dtype),
        programs,
        numbers=(scale, cap_factor, left, right, *order, stride, pages),
        descriptors=_descriptors(x, out, t),
    )

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, slopes: None, *rest: Any) -> None:
        sinks, starts_q, starts_k = rest[:3]
        tiles = None if list_tiles is None else list_tiles(starts_q, starts_k)
        start(q, k, v, out, lse, sinks, tiles, None if table is None else rest[3])

    return run


def _descriptors(x: Inputs, out: Tensor, t: Tiling) -> dict[int, Descriptor]:
    """Those of q, k, v and out."""
    rows, keys = (t.rows, t.dim), (t.piece_rows, t.piece_cols)
    describe_rows = describe_packed if t.packed else _describe_batch
    describe_keys = describe_pages if t.page else describe_rows
    rank = 5 if t.packed else 4
    of_rows, of_keys = (gl.NVMMASharedLayout(swizzle_bytes(cols), 16, rank=rank) for _, cols in (rows, keys))
    return by_place(
        attend,
        q_desc=describe_rows(x.q, rows, of_rows),
        k_desc=describe_keys(x.k, keys, of_keys),
        v_desc=describe_keys(x.v, keys, of_keys),
        out_desc=describe_rows(out, rows, of_rows),
    )


def _describe_batch(t: Tensor, block: tuple[int, int], layout: Any) -> Descriptor:
    return describe(t, (1, 1, *block), layout)


@functools.cache
def _launcher(t: Tiling, dtype: torch.dtype, sinks: torch.dtype | None) -> KernelLauncher:
    return KernelLauncher(attend, {"T": t}, num_warps=4, maxnreg=_REGISTERS[t.consumers])
