"""The backward of attention for sm_90: dq alone, a program for each block of 128 queries.

    s = q k^T    dp = dout v^T    ds = exp2(s * scale - lse) * (dp - delta)    dq += ds k

Two consumers, warpgroups with 64 of the queries each, keep dq in their registers and walk over the blocks of keys that
their queries see; ds goes from the registers that it is made in to the tensor cores. A producer, a single warp, has the
tensor memory accelerator bring q and dout, and fill two rings, one of keys, one of values.

    k_ready, v_ready[slot]  completed by the bytes that land; the consumers wait for it
    k_free, v_free[slot]    completed by one arrival of each consumer; the producer waits for it
    q_ready                 the queries and dout have landed

The kernel's one constant, T, is a `QueriesTiling` (hopper_backward_tiling.py).
"""

from __future__ import annotations

from rooftile.ops.attention.hopper_backward_parts import (
    place,
    probabilities,
    scores_gradient,
    write,
)
from rooftile.primitives.gluon import load_tile, next_slot

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
def _keys(row, size, T: gl.constexpr):
    """The blocks of keys, from the first to one past the last, that some query from `row` on sees."""
    n_q, n_k, _heads, _group = size
    off = n_k - n_q
    begin = gl.to_tensor(0)
    end = n_k
    if T.left >= 0:
        begin = gl.maximum(row + off - T.left, 0) // T.keys
    if T.right >= 0:
        end = gl.maximum(gl.minimum(gl.minimum(row + T.rows, n_q) + off + T.right, n_k), 0)
    return begin, gl.maximum(gl.cdiv(end, gl.constexpr(T.keys)), begin)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, o_desc, work, memory, bars, size, T: gl.constexpr):
    """Bring the queries and dout, then keep the rings full."""
    q_tiles, o_tiles, k_ring, v_ring = memory
    k_ready, k_free, v_ready, v_free, q_ready = bars
    _n_q, _n_k, _heads, group = size
    row, head, entry = work
    begin, end = _keys(row, size, T)

    mbarrier.expect(q_ready, 4 * q_desc.block_type.nbytes)
    for w in gl.static_range(2):
        load_tile(q_desc, [entry, head, row + w * 64, 0], q_ready, q_tiles.index(w))
        load_tile(o_desc, [entry, head, row + w * 64, 0], q_ready, o_tiles.index(w))
    slot = 0
    parity = 0
    for block in range(begin, end):
        mbarrier.wait(k_free.index(slot), parity ^ 1)
        mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
        load_tile(k_desc, [entry, head // group, block * T.keys, 0], k_ready.index(slot), k_ring.index(slot))
        mbarrier.wait(v_free.index(slot), parity ^ 1)
        mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
        load_tile(v_desc, [entry, head // group, block * T.keys, 0], v_ready.index(slot), v_ring.index(slot))
        slot, parity = next_slot(slot, parity, T.stages)


@gluon.jit
def _row_stats(stats_ptr, row, entry, head, size, T: gl.constexpr):
    """lse and delta of this consumer's queries."""
    n_q, _n_k, heads, _group = size
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, T.s))
    block = (entry * heads + head).to(gl.int64) * gl.cdiv(n_q, gl.constexpr(T.stat_rows)) + row // T.stat_rows
    at = stats_ptr + block * (2 * T.stat_rows) + (rows - row // T.stat_rows * T.stat_rows)
    lse = gl.load(at, mask=rows < n_q, other=float("inf"))
    return lse, gl.load(at + T.stat_rows, mask=rows < n_q, other=0.0)


@gluon.jit
def _consume(dq_desc, stats_ptr, work, memory, bars, size, mine: gl.constexpr, T: gl.constexpr):
    """Make dq of 64 queries."""
    q_tiles, o_tiles, k_ring, v_ring = memory
    k_ready, k_free, v_ready, v_free, q_ready = bars
    n_q, n_k, _heads, _group = size
    first, head, entry = work
    row = first + mine * 64
    begin, end = _keys(first, size, T)
    lse, delta = _row_stats(stats_ptr, row, entry, head, size, T)
    q = q_tiles.index(mine)
    o = o_tiles.index(mine)

    dq = gl.full([64, T.dim], 0, gl.float32, T.acc)
    zero = gl.full([64, T.keys], 0, gl.float32, T.s)
    slot = 0
    parity = 0
    before = 0
    mbarrier.wait(q_ready, 0)
    ds_16 = gl.full([64, T.keys], 0, k_ring.dtype, T.operand)
    for block in range(begin, end):
        k = k_ring.index(slot)
        v = v_ring.index(slot)
        mbarrier.wait(k_ready.index(slot), parity)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot), parity)
        dp = warpgroup_mma(o, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if T.deferred:  # at first of zeros
            dq = warpgroup_mma(ds_16, k_ring.index(before), dq, is_async=True)
        s = warpgroup_mma_wait(gl.constexpr(1 + T.deferred), (s,))
        p, slope = probabilities(s, lse[:, None], block * T.keys, row + n_k - n_q, n_k, 1, T)
        dp = warpgroup_mma_wait(gl.constexpr(0 + T.deferred), (dp,))
        mbarrier.arrive(v_free.index(slot), count=1)
        ds = scores_gradient(p, slope, dp, delta[:, None], k.dtype, T)
        if T.deferred:
            dq = warpgroup_mma_wait(0, (dq,))
            if block > begin:
                mbarrier.arrive(k_free.index(before), count=1)
            ds_16 = gl.convert_layout(ds, T.operand)
        else:
            dq = warpgroup_mma(gl.convert_layout(ds, T.operand), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, (dq,))
            mbarrier.arrive(k_free.index(slot), count=1)
        before = slot
        slot, parity = next_slot(slot, parity, T.stages)
    if T.deferred:  # noqa: SIM102  # the one is known when it is compiled
        if end > begin:
            dq = warpgroup_mma_wait(0, (warpgroup_mma(ds_16, k_ring.index(before), dq, is_async=True),))
    write(dq * T.scale, q, dq_desc, entry, head, row)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "kv_heads", "n_q", "n_k", "lanes", "together"])
def queries_gradient(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    dq_desc,
    stats_ptr,
    heads,
    kv_heads,
    n_q,
    n_k,
    lanes,
    together,
    T: gl.constexpr,
):
    """dq. lanes are batch x heads."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    o_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    k_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.keys, T.dim], T.shared)
    v_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.keys, T.dim], T.shared)
    k_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(q_ready, count=1)
    fence_async_shared()  # the copies see them initialised too

    blocks = gl.cdiv(n_q, gl.constexpr(T.rows))
    block, lane = place(gl.program_id(0), together, blocks, lanes)
    if T.right >= 0:  # the last queries see the most keys
        block = blocks - 1 - block
    work = (block * T.rows, lane % heads, lane // heads)
    size = (n_q, n_k, heads, heads // kv_heads)
    bars = (k_ready, k_free, v_ready, v_free, q_ready)
    memory = (q_tiles, o_tiles, k_ring, v_ring)
    gl.warp_specialize(
        [
            (_consume, (dq_desc, stats_ptr, work, memory, bars, size, 0, T)),
            (_consume, (dq_desc, stats_ptr, work, memory, bars, size, 1, T)),
            (_produce, (q_desc, k_desc, v_desc, o_desc, work, memory, bars, size, T)),
        ],
        [4, 1],
        [240, 24],
    )
