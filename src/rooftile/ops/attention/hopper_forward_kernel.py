"""Attention for sm_90: a warp that copies, warpgroups that multiply and take the softmax of each other's shadow.

One program stays on each multiprocessor and walks over its tiles, each some queries of one head. Its producer, a single
warp, has the tensor memory accelerator bring the queries, and fill a ring of slots with blocks of keys and values, from
the last that the tile sees to the first. Its consumers, of four warps and 64 queries each, keep the scores, the softmax
weights and their rows of the output in registers:

    s = q k.T of a block      started, and with it o += weights v of the block before: the tensor cores have both
    weights = softmax of s    as soon as s is there, while they are still at the second

and with `turns` one consumer starts its products when another has started its own, so that the softmax of one falls
into the products of the other. With `joined` that goes on from tile to tile.

    ready[slot]       completed by the bytes that land; the consumers wait for it
    free[slot]        completed by one arrival of each consumer; the producer waits for it
    q_ready, q_free   the same for the queries
    order[i]          completed by one arrival of the consumer before i, once it has started its products

All walk the ring with a slot and a parity that flips at every turn: k of a tile's first block, then always k of the
next block and v of the last. A consumer waits for the parity it is at; the producer for the opposite one, which a fresh
barrier counts as completed.

A row's maximum is of scores before `scale`; its sum is kept in four parts, as its threads have it, until the end. The
lowest maximum is finite, so that a row that sees no key needs no care until it is written.

The kernel's one constant, T, is a `Tiling` (hopper_forward_tiling.py).
"""

from __future__ import annotations

from rooftile.ops.attention.hopper_forward_rows import as_operand, capped, hidden, weigh
from rooftile.ops.attention.hopper_forward_work import count_tiles, place
from rooftile.primitives.gluon import load_tile, next_slot, store_tile

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LOWEST = gl.constexpr(-1e30)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _fill(desc, batch, head, block, ring, slot, parity, T: gl.constexpr):
    """Bring a block of keys or values into the ring."""
    tiles, ready, free = ring
    mbarrier.wait(free.index(slot), parity ^ 1)
    mbarrier.expect(ready.index(slot), desc.block_type.nbytes)
    load_tile(desc, [batch, head, block * T.keys, 0], ready.index(slot), tiles.index(slot))
    return next_slot(slot, parity, T.stages)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, table_ptr, memory, size, T: gl.constexpr):
    """Keep the ring full."""
    q_ring, ring, _out_ring, _order = memory
    q_tiles, q_ready, q_free = q_ring
    heads_per_kv = size[1] // k_desc.shape[1]
    slot = 0
    parity = 0
    buffer = 0
    q_parity = 0
    old_batch = 0
    old_head = 0
    old_block = 0
    count = count_tiles(table_ptr, size, T)
    for i in range(count):
        batch, head, row, begin, end = place(i, table_ptr, size, T)
        kv_head = head // heads_per_kv
        slot, parity = _fill(k_desc, batch, kv_head, end - 1, ring, slot, parity, T)
        if T.joined:  # noqa: SIM102  # the one is known when it is compiled
            if i > 0:
                slot, parity = _fill(v_desc, old_batch, old_head, old_block, ring, slot, parity, T)
        mbarrier.wait(q_free.index(buffer), q_parity ^ 1)
        mbarrier.expect(q_ready.index(buffer), T.consumers * q_desc.block_type.nbytes)
        for j in gl.static_range(gl.constexpr(T.consumers)):
            to = q_tiles.index(buffer * T.consumers + j)
            load_tile(q_desc, [batch, head, row + j * T.rows, 0], q_ready.index(buffer), to)
        buffer += 1
        q_parity = gl.where(buffer == T.q_buffers, q_parity ^ 1, q_parity)
        buffer = gl.where(buffer == T.q_buffers, 0, buffer)
        for j in range(begin + 1, end):
            block = begin + end - 1 - j
            slot, parity = _fill(k_desc, batch, kv_head, block, ring, slot, parity, T)
            slot, parity = _fill(v_desc, batch, kv_head, block + 1, ring, slot, parity, T)
        if T.joined:
            old_batch = batch
            old_head = kv_head
            old_block = begin
        else:
            slot, parity = _fill(v_desc, batch, kv_head, begin, ring, slot, parity, T)
    if T.joined:  # the last tile's last products start with scores that nobody needs
        slot, parity = _fill(k_desc, old_batch, old_head, old_block, ring, slot, parity, T)
        slot, parity = _fill(v_desc, old_batch, old_head, old_block, ring, slot, parity, T)


@gluon.jit
def _start_scores(q, ring, slot, T: gl.constexpr):
    none = gl.full([T.rows, T.keys], 0, gl.float32, T.scores)
    return warpgroup_mma(q, ring[0].index(slot).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _await_turn(order, turn, mine: gl.constexpr, T: gl.constexpr):
    if T.turns:
        mbarrier.wait(order.index(mine), turn)
    return turn ^ 1


@gluon.jit
def _pass_turn(order, mine: gl.constexpr, T: gl.constexpr):
    if T.turns:
        mbarrier.arrive(order.index((mine + 1) % T.consumers), count=1)


@gluon.jit
def _step(state, q, ring, order, at, row, block, hides, size, mine: gl.constexpr, T: gl.constexpr):
    """The scores and weights of a block, and meanwhile the product of the last block's weights and values."""
    o, w, total, peak = state
    slot, parity, turn = at
    turn = _await_turn(order, turn, mine, T)
    before = slot
    s = _start_scores(q, ring, slot, T)
    slot, parity = next_slot(slot, parity, T.stages)
    mbarrier.wait(ring[1].index(slot), parity)
    o = warpgroup_mma(w, ring[0].index(slot), o, is_async=True)
    _pass_turn(order, mine, T)
    s = warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(ring[2].index(before), count=1)
    s = capped(s, T)
    if T.limited:  # noqa: SIM102  # the one is known when it is compiled
        if hides:
            s = hidden(s, row, block, size, T)
    weights, sums, peak, factor = weigh(s, peak, T)
    total = total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None] + sums
    before = slot
    slot, parity = next_slot(slot, parity, T.stages)
    mbarrier.wait(ring[1].index(slot), parity)
    o = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(ring[2].index(before), count=1)
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, T.acc))[:, None]
    w = as_operand(weights, w.dtype, T)
    return (o, w, total, peak), (slot, parity, turn)


@gluon.jit
def _steps(state, q, ring, order, at, row, begin, end, size, mine: gl.constexpr, T: gl.constexpr):
    """All blocks of a tile but the last one that it sees, which was first. Masked are only those that need it.

    One loop, with a branch in it: of two loops over the same q, ptxas has been seen to compute q's descriptors before
    the first, and to use them in the second where the first was not run at all.
    """
    n_q, n_k = size[2], size[3]
    p = row + n_k - n_q  # of this consumer's first query
    unhidden = end - 1
    if T.right >= 0:
        unhidden = gl.minimum(p + T.right + 1, n_k) // T.keys
    first = begin
    if T.left >= 0:
        first = gl.cdiv(p + (T.rows - 1) - T.left, gl.constexpr(T.keys))
    for j in range(begin, end - 1):
        block = begin + end - 2 - j
        hides = (block >= unhidden) | (block < first)
        state, at = _step(state, q, ring, order, at, row, block, hides, size, mine, T)
    return state, at


@gluon.jit
def _write(o, total, peak, out, out_desc, lse_ptr, sinks_ptr, batch, head, row, size, T: gl.constexpr):
    """A tile's rows of the output, from the buffer `out`, and their log-sum-exp."""
    heads, n_q = size[1], size[2]
    total = gl.convert_layout(gl.sum(total, 1), peak.type.layout, assert_trivial=True)
    peak = peak * T.scale
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head) * _LOG2E
        higher = gl.maximum(peak, sink)
        factor = gl.exp2(peak - higher)
        total = total * factor + gl.exp2(sink - higher)
        o = o * gl.convert_layout(factor, gl.SliceLayout(1, T.acc))[:, None]
        peak = higher
    if lse_ptr is not None:
        rows = row + gl.arange(0, T.rows, layout=peak.type.layout)
        at = lse_ptr + (batch * heads + head).to(gl.int64) * n_q
        gl.store(at + rows, (peak + gl.log2(total)) * _LN2, mask=rows < n_q)
    o = o * gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), gl.SliceLayout(1, T.acc))[:, None]
    tma.store_wait(0)
    out.store(o.to(out_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, [batch, head, row, 0], out)


@gluon.jit
def _consume(out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, mine: gl.constexpr, T: gl.constexpr):
    """The rows of every tile from mine * rows on."""
    q_ring, ring, out_ring, order = memory
    q_tiles, q_ready, q_free = q_ring
    out = out_ring.index(mine)
    lowest = gl.full([T.rows], _LOWEST, gl.float32, gl.SliceLayout(1, T.scores))
    zeros = gl.full([T.rows, T.dim], 0, gl.float32, T.acc)
    slot = 0
    parity = 0
    buffer = 0
    q_parity = 0
    turn = 0 if mine else 1  # the first finds the door open
    count = count_tiles(table_ptr, size, T)
    batch, head, row, begin, end = place(0, table_ptr, size, T)
    row += mine * T.rows
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(ring[1].index(0), 0)
    s = warpgroup_mma_wait(0, (_start_scores(q_tiles.index(mine), ring, 0, T),))
    mbarrier.arrive(ring[2].index(0), count=1)
    s = hidden(capped(s, T), row, end - 1, size, T)
    weights, total, peak, _factor = weigh(s, lowest, T)
    w = as_operand(weights, out_desc.dtype, T)
    slot, parity = next_slot(slot, parity, T.stages)
    mbarrier.wait(ring[1].index(slot), parity)
    for i in range(count):
        last = i + 1 == count
        new_batch, new_head, new_row, new_begin, new_end = place(gl.minimum(i + 1, count - 1), table_ptr, size, T)
        new_row += mine * T.rows
        q = q_tiles.index(buffer * T.consumers + mine)
        state = (zeros, w, total, peak)
        state, at = _steps(state, q, ring, order, (slot, parity, turn), row, begin, end, size, mine, T)
        slot, parity, turn = at
        o, w, total, peak = state
        mbarrier.arrive(q_free.index(buffer), count=1)
        # The next tile's queries; at the end those of the last tile once more.
        next_buffer = gl.where(buffer + 1 == T.q_buffers, 0, buffer + 1)
        next_parity = gl.where(buffer + 1 == T.q_buffers, q_parity ^ 1, q_parity)
        buffer = gl.where(last, buffer, next_buffer)
        q_parity = gl.where(last, q_parity, next_parity)
        q = q_tiles.index(buffer * T.consumers + mine)
        if T.joined:
            mbarrier.wait(q_ready.index(buffer), q_parity)
            turn = _await_turn(order, turn, mine, T)
            before = slot
            s = _start_scores(q, ring, slot, T)
            slot, parity = next_slot(slot, parity, T.stages)
            mbarrier.wait(ring[1].index(slot), parity)
            o = warpgroup_mma(w, ring[0].index(slot), o, is_async=True)
            _pass_turn(order, mine, T)
            s = warpgroup_mma_wait(1, (s,))
            mbarrier.arrive(ring[2].index(before), count=1)
            s = hidden(capped(s, T), new_row, new_end - 1, size, T)
            weights, new_total, new_peak, _factor = weigh(s, lowest, T)
            before = slot
            slot, parity = next_slot(slot, parity, T.stages)
            if not last:
                mbarrier.wait(ring[1].index(slot), parity)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(ring[2].index(before), count=1)
            w = as_operand(weights, out_desc.dtype, T)
            _write(o, total, peak, out, out_desc, lse_ptr, sinks_ptr, batch, head, row, size, T)
            total = new_total
            peak = new_peak
        else:
            o = warpgroup_mma_wait(0, (warpgroup_mma(w, ring[0].index(slot), o, is_async=True),))
            mbarrier.arrive(ring[2].index(slot), count=1)
            slot, parity = next_slot(slot, parity, T.stages)
            _write(o, total, peak, out, out_desc, lse_ptr, sinks_ptr, batch, head, row, size, T)
            if not last:
                mbarrier.wait(q_ready.index(buffer), q_parity)
                mbarrier.wait(ring[1].index(slot), parity)
                s = warpgroup_mma_wait(0, (_start_scores(q, ring, slot, T),))
                mbarrier.arrive(ring[2].index(slot), count=1)
                s = hidden(capped(s, T), new_row, new_end - 1, size, T)
                weights, total, peak, _factor = weigh(s, lowest, T)
                w = as_operand(weights, out_desc.dtype, T)
                slot, parity = next_slot(slot, parity, T.stages)
                mbarrier.wait(ring[1].index(slot), parity)
        batch, head, row, begin, end = new_batch, new_head, new_row, new_begin, new_end
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr"])
def attend(q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, table_ptr, T: gl.constexpr):
    """out = softmax(scores of q and k) v, and the log-sum-exp of each row of scores."""
    tiles = gl.allocate_shared_memory(k_desc.dtype, T.ring, T.shared)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, T.q_ring, T.shared)
    out_ring = gl.allocate_shared_memory(out_desc.dtype, T.out_ring, T.shared)
    ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [T.q_buffers, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [T.q_buffers, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [T.consumers, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=T.consumers)
    for i in gl.static_range(gl.constexpr(T.q_buffers)):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=T.consumers)
    for i in gl.static_range(gl.constexpr(T.consumers)):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()  # the copies see them initialised too

    heads = q_desc.shape[1]
    n_q = q_desc.shape[2]
    count = q_desc.shape[0] * heads * gl.cdiv(n_q, gl.constexpr(T.tile_rows))
    size = (count, heads, n_q, k_desc.shape[2])
    memory = ((q_tiles, q_ready, q_free), (tiles, ready, free), out_ring, order)
    if T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, 0, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, 1, T)),
                (_produce, (q_desc, k_desc, v_desc, table_ptr, memory, size, T)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, 0, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, 1, T)),
                (_consume, (out_desc, lse_ptr, sinks_ptr, table_ptr, memory, size, 2, T)),
                (_produce, (q_desc, k_desc, v_desc, table_ptr, memory, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
