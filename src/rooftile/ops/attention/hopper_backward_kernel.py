"""The backward of attention for sm_90: dk and dv, a program for each block of 128 keys, and with them dq or not.

    s^T = k q^T      p = exp2(s * scale - lse)        dv += p^T dout
    dp^T = v dout^T  ds = p * (dp - delta)            dk += ds^T q       dq += ds k

Two consumers, warpgroups with 64 of the keys each, keep dk and dv in their registers and walk over the blocks of
queries that see their keys. Scores are made transposed, so that p^T and ds^T come out of the tensor cores in the
registers that the next products take them from. A producer, a single warp, has the tensor memory accelerator fill two
rings, one of q with the rows' lse and delta, one of dout.

    q_ready, o_ready[slot]  completed by the bytes that land; the consumers wait for it
    q_free, o_free[slot]    completed by one arrival of each consumer; the producer waits for it
    kv_ready                the keys and values have landed
    ds_ready[slot]          with dq: completed by one arrival of each consumer, once its half of ds is in shared memory
    all_done                with dq: both consumers have made their last of it

dq, a sum over the keys, needs ds of both consumers: they hand it to each other through shared memory, either makes one
tile of 64 x 64 of the step's dq, and adds it to a float32 sum in memory, in the order in which programs come to it. So
its last bits are not the same every time; who needs that has dq made by `hopper_backward_dq_kernel.py`, which costs two
products more.

lse, times log2(e), is +inf for rows that see no key and rows that are not there, so that p is 0 in them.

The kernel's one constant, T, is a `KeysTiling` (hopper_backward_tiling.py).
"""

from __future__ import annotations

from rooftile.ops.attention.hopper_backward_parts import (
    place,
    probabilities,
    scores_gradient,
    write,
)
from rooftile.primitives.gluon import load_tile, next_slot, view_as

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _queries(block, size, T: gl.constexpr):
    """The blocks of queries, from the first to one past the last, that see a key of the block."""
    n_q, n_k, _heads, _group = size
    low = gl.to_tensor(0)
    high = gl.cdiv(n_q, gl.constexpr(T.rows))
    off = n_k - n_q
    if T.right >= 0:
        low = gl.maximum(block * T.keys - T.right - off, 0) // T.rows
    if T.left >= 0:
        last = gl.minimum(block * T.keys + T.keys, n_k) + T.left - off
        high = gl.minimum(high, gl.cdiv(gl.maximum(last, 0), gl.constexpr(T.rows)))
    return low, gl.maximum(high, low)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, o_desc, stats_desc, work, memory, bars, size, T: gl.constexpr):
    """Bring the keys and values, then keep the rings full."""
    k_tiles, v_tiles, q_ring, o_ring, stats, _ds_ring = memory
    q_ready, q_free, o_ready, o_free, _ds_ready, kv_ready, _all_done = bars
    n_q, _n_k, heads, group = size
    block, head, entry = work
    low, high = _queries(block, size, T)
    stat_blocks = gl.cdiv(n_q, gl.constexpr(T.stat_rows))

    mbarrier.expect(kv_ready, 4 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        at = block * T.keys + w * 64
        load_tile(k_desc, [entry, head, at, 0], kv_ready, k_tiles.index(w))
        load_tile(v_desc, [entry, head, at, 0], kv_ready, v_tiles.index(w))
    slot = 0
    parity = 0
    for g in range(group):
        q_head = head * group + g
        stat = (entry * heads + q_head) * stat_blocks * (2 * T.stat_rows)
        for m in range(low, high):
            row = m * T.rows
            at = stat + row + row // T.stat_rows * T.stat_rows
            bar = q_ready.index(slot)
            mbarrier.wait(q_free.index(slot), parity ^ 1)
            mbarrier.expect(bar, q_desc.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
            load_tile(q_desc, [entry, q_head, row, 0], bar, q_ring.index(slot))
            load_tile(stats_desc, [at], bar, stats.index(2 * slot))
            load_tile(stats_desc, [at + T.stat_rows], bar, stats.index(2 * slot + 1))
            bar = o_ready.index(slot)
            mbarrier.wait(o_free.index(slot), parity ^ 1)
            mbarrier.expect(bar, o_desc.block_type.nbytes)
            load_tile(o_desc, [entry, q_head, row, 0], bar, o_ring.index(slot))
            slot, parity = next_slot(slot, parity, T.stages)


@gluon.jit
def _start_scores(k, v, q, o, slot, parity, bars, T: gl.constexpr):
    """Start the products s^T and dp^T of a step."""
    zero = gl.full([64, T.rows], 0, gl.float32, T.s)
    mbarrier.wait(bars[0].index(slot), parity)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(bars[2].index(slot), parity)
    dp = warpgroup_mma(v, o.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, T: gl.constexpr):
    """ds^T of a step whose products are still under way; p^T as an operand; dv's product is started if T.early."""
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, T.s)
    n_q, n_k, _heads, _group = size
    lse = stats.index(2 * slot).load(OF_QUERY)
    AFTER: gl.constexpr = 1 if T.deferred else 0  # products that were started after that of dp
    s = warpgroup_mma_wait(1 + AFTER, (s,))
    p, slope = probabilities(s, lse[None, :], key, m * T.rows + n_k - n_q, n_k, 0, T)
    p_16 = gl.convert_layout(p.to(o.dtype), T.operand)
    if T.early:
        dv = warpgroup_mma(p_16, o, dv, is_async=True)
        dp = warpgroup_mma_wait(1 + AFTER, (dp,))
    else:
        dp = warpgroup_mma_wait(AFTER, (dp,))
    delta = stats.index(2 * slot + 1).load(OF_QUERY)
    return scores_gradient(p, slope, dp, delta[None, :], o.dtype, T), p_16, dv


@gluon.jit
def _multiply_dq(k_parts, ds_parts, buffer, mine: gl.constexpr, T: gl.constexpr):
    """Start this consumer's tile of dq = ds k: two products, one with either consumer's keys."""
    C: gl.constexpr = mine // (T.dim // 64)  # which rows of the step
    E: gl.constexpr = mine % (T.dim // 64)  # which columns
    dq = gl.full([64, 64], 0, gl.float32, T.dq)
    for j in gl.static_range(2):
        ds = ds_parts.index((buffer * 2 + j) * (T.rows // 64) + C)
        k = k_parts.index(j * (T.dim // 64) + E)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=j > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(dq_ptr, tile, dq):
    """Add a tile to dq's sum in memory: in an order in which a thread's registers make 16 bytes at a time, and those of
    a warp lie together."""
    z = dq.reshape([4, 2, 8, 8, 4, 2]).permute(0, 3, 2, 4, 1, 5).reshape([4096])
    at = dq_ptr + tile.to(gl.int64) * 4096 + gl.arange(0, 4096, layout=z.type.layout)
    gl.atomic_add(at, z, sem="relaxed", scope="gpu")


@gluon.jit
def _advance(m, tile, low, high, row_blocks):
    """The next step's block of queries, and where its head's blocks begin among all heads'."""
    m += 1
    around = m == high
    return gl.where(around, low, m), gl.where(around, tile + row_blocks, tile)


@gluon.jit
def _consume(dk_desc, dv_desc, dq_ptr, work, memory, bars, size, mine: gl.constexpr, T: gl.constexpr):
    """Make dk and dv of 64 keys, and a tile of dq at every step."""
    k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring = memory
    _q_ready, q_free, _o_ready, o_free, ds_ready, kv_ready, all_done = bars
    n_q, _n_k, heads, group = size
    block, head, entry = work
    low, high = _queries(block, size, T)
    row_blocks = gl.cdiv(n_q, gl.constexpr(T.rows))
    key = block * T.keys + mine * 64
    k = k_tiles.index(mine)
    v = v_tiles.index(mine)

    dk = gl.full([64, T.dim], 0, gl.float32, T.acc)
    dv = gl.full([64, T.dim], 0, gl.float32, T.acc)
    slot = 0
    parity = 0
    m = low
    tile = (entry * heads + head * group) * row_blocks
    steps = group * (high - low)
    mbarrier.wait(kv_ready, 0)
    if T.with_dq:
        PARTS: gl.constexpr = T.dim // 64
        k_parts = view_as(k_tiles, gl.constexpr([2 * PARTS, 64, 64]), k_tiles)
        DS_PARTS: gl.constexpr = T.buffers * 2 * (T.rows // 64)
        ds_parts = view_as(ds_ring, gl.constexpr([DS_PARTS, 64, 64]), ds_ring)
        buffer = 0
        buffer_parity = 0
        for _ in range(steps):
            q = q_ring.index(slot)
            o = o_ring.index(slot)
            s, dp = _start_scores(k, v, q, o, slot, parity, bars, T)
            ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, T)
            ds_ring.index(buffer * 2 + mine).store(ds)
            ds_16 = gl.convert_layout(ds, T.operand)
            fence_async_shared()
            if not T.early:
                dv = warpgroup_mma(p_16, o, dv, is_async=True)
            mbarrier.arrive(ds_ready.index(buffer), count=1)
            mbarrier.wait(ds_ready.index(buffer), buffer_parity)
            dq = _multiply_dq(k_parts, ds_parts, buffer, mine, T)
            dv = warpgroup_mma_wait(2, (dv,))
            mbarrier.arrive(o_free.index(slot), count=1)
            dk = warpgroup_mma(ds_16, q, dk, is_async=True)
            dq = warpgroup_mma_wait(1, (dq,))
            _add_dq(dq_ptr, (tile + m) * 2 + mine, dq)
            dk = warpgroup_mma_wait(0, (dk,))
            mbarrier.arrive(q_free.index(slot), count=1)
            m, tile = _advance(m, tile, low, high, row_blocks)
            slot, parity = next_slot(slot, parity, T.stages)
            buffer, buffer_parity = next_slot(buffer, buffer_parity, T.buffers)
        mbarrier.arrive(all_done, count=1)
    else:
        before = 0
        ds_16 = gl.full([64, T.rows], 0, q_ring.dtype, T.operand)
        for i in range(steps):
            q = q_ring.index(slot)
            o = o_ring.index(slot)
            s, dp = _start_scores(k, v, q, o, slot, parity, bars, T)
            if T.deferred:  # at first of zeros
                dk = warpgroup_mma(ds_16, q_ring.index(before), dk, is_async=True)
            ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, T)
            if not T.early:
                dv = warpgroup_mma(p_16, o, dv, is_async=True)
            if T.deferred:
                dk = warpgroup_mma_wait(1, (dk,))
                if i > 0:
                    mbarrier.arrive(q_free.index(before), count=1)
                ds_16 = gl.convert_layout(ds, T.operand)
                dv = warpgroup_mma_wait(0, (dv,))
                mbarrier.arrive(o_free.index(slot), count=1)
            else:
                dk = warpgroup_mma(gl.convert_layout(ds, T.operand), q, dk, is_async=True)
                dv = warpgroup_mma_wait(1, (dv,))
                mbarrier.arrive(o_free.index(slot), count=1)
                dk = warpgroup_mma_wait(0, (dk,))
                mbarrier.arrive(q_free.index(slot), count=1)
            before = slot
            m, tile = _advance(m, tile, low, high, row_blocks)
            slot, parity = next_slot(slot, parity, T.stages)
        if T.deferred:  # noqa: SIM102  # the one is known when it is compiled
            if steps > 0:
                dk = warpgroup_mma_wait(0, (warpgroup_mma(ds_16, q_ring.index(before), dk, is_async=True),))

    write(dv, v, dv_desc, entry, head, key)
    if T.with_dq:
        mbarrier.wait(all_done, 0)  # the other consumer has read these keys too
    write(dk * T.scale, k, dk_desc, entry, head, key)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_q", "n_k", "lanes", "together"])
def keys_gradients(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    stats_desc,
    dk_desc,
    dv_desc,
    dq_ptr,
    heads,
    kv_heads,
    n_q,
    n_k,
    lanes,
    together,
    T: gl.constexpr,
):
    """dk and dv; and dq / scale added to a float32 sum, whose tiles `_add_dq` orders. lanes are batch x kv_heads."""
    DTYPE: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    q_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared)
    o_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared)
    ds_ring = q_ring
    if T.with_dq:
        ds_ring = gl.allocate_shared_memory(DTYPE, [T.buffers * 2, 64, T.rows], T.shared)
    stats = gl.allocate_shared_memory(gl.float32, [T.stages * 2, T.rows], stats_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    o_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    o_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(o_ready.index(i), count=1)
        mbarrier.init(o_free.index(i), count=2)
    mbarrier.init(kv_ready, count=1)
    # Only where they are used: Triton's allocator gives the place of a barrier that nobody waits for away, here to what
    # it hands to the other warps, and the barrier's initialisation may land after what is written there next.
    ds_ready = q_ready  # these two are never read
    all_done = kv_ready
    if T.with_dq:
        ds_ready = gl.allocate_shared_memory(gl.int64, [T.buffers, 1], mbarrier.MBarrierLayout())
        all_done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(gl.constexpr(T.buffers)):
            mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(all_done, count=2)
    fence_async_shared()  # the copies see them initialised too

    # The first block, which with causal is the longest, comes first.
    block, lane = place(gl.program_id(0), together, gl.cdiv(n_k, gl.constexpr(T.keys)), lanes)
    work = (block, lane % kv_heads, lane // kv_heads)
    size = (n_q, n_k, heads, heads // kv_heads)
    bars = (q_ready, q_free, o_ready, o_free, ds_ready, kv_ready, all_done)
    memory = (k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring)
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, dq_ptr, work, memory, bars, size, 0, T)),
            (_consume, (dk_desc, dv_desc, dq_ptr, work, memory, bars, size, 1, T)),
            (_produce, (q_desc, k_desc, v_desc, o_desc, stats_desc, work, memory, bars, size, T)),
        ],
        [4, 1],
        [240, 24],
    )
