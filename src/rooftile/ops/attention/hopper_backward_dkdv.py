"""The backward of attention for sm_90: dk and dv, a program for each block of 128 keys, and optionally dq (Gluon).

    s^T = k q^T      p = exp2(s * scale - lse)        dv += p^T dout
    dp^T = v dout^T  ds = p * (dp - delta)            dk += ds^T q       dq += ds k

Two consumers, warpgroups with 64 of the keys each, keep dk and dv in their registers and walk over the blocks of
queries that see their keys. Scores are computed transposed, so that p^T and ds^T come out of the tensor cores in the
registers from which the next dots read them. A producer, a single warp, fills two rings by TMA: one of q with the rows'
lse and delta, one of dout.

    q_ready, o_ready[slot]  completed by the bytes that land; the consumers wait for it
    q_free, o_free[slot]    completed by one arrival of each consumer; the producer waits for it
    kv_ready                the keys and values have landed
    ds_ready[slot]          with dq: completed by one arrival of each consumer, once its half of ds is in shared memory
    ds_free[slot]           with dq, apart: completed by one arrival of each consumer, once it has read both halves
    all_done                with dq: both consumers have computed their last tile of it

dq is a sum over the keys, and needs ds of both consumers. They exchange ds through shared memory. Each computes one
tile of 64 x 64 of a step's dq, and adds it to a float32 sum in memory, in the order in which programs reach it. So its
last bits differ between runs. For deterministic gradients, `hopper_backward_dq.py` computes dq, at the cost of two more
dots.

With dense tensors and no soft cap, the tile is that of the step before. So neither consumer waits for the other's ds of
the same step: they may be half a step apart, and one keeps the tensor cores busy while the other computes
probabilities. s of the next step is started at the end of a step, behind its other dots. TMA adds the tile, by way of
shared memory, and q_free stands for dout too. Elsewhere consumers meet in every step, and add by atomics.

lse, times log2(e), is +inf for rows that see no key and rows that don't exist, so that p is 0 in them.

The kernel's one constant, T, is a `KeysTiling`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library
from rooftile.launching import Descriptor, KernelLauncher, bind
from rooftile.ops.attention.hopper_backward_parts import (
    BARRIERS,
    KEYS,
    REGISTERS,
    ROWS,
    BackwardTiling,
    describe_rows,
    find_work,
    heads_together,
    probabilities,
    rows_at,
    scores_gradient,
    scoring_numbers,
    stat_blocks,
    write,
)
from rooftile.ops.attention.parts import place
from rooftile.ops.attention.problem import Inputs, Scoring
from rooftile.ops.attention.slots import block_slots
from rooftile.primitives.gluon import add_tile, describe, load_tile, next_slot, view_as

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@dataclasses.dataclass(frozen=True)
class KeysTiling(BackwardTiling):
    """All that the kernel of dk and dv is compiled for but the dtypes. A program owns 128 keys.

    Args:
        rows: queries of a step; with_dq 64 for a dim of 128 and 128 for 64, so that its dq is two tiles of 64 x 64.
        stages: blocks of queries in the rings.
        with_dq: dq is computed too, and added to its sum in memory.
        early: the dot of dv is started before ds is computed.
        deferred: the dot of dk is started after those of the next step's scores; not with_dq.
    """

    rows: int
    stages: int
    with_dq: bool
    early: bool = False
    deferred: bool = False
    keys: int = 128

    @property
    def apart(self) -> bool:
        return self.with_dq and not self.packed and not self.capped

    @property
    def buffers(self) -> int:
        """Steps whose ds is in shared memory."""
        return self.stages if self.apart else 2

    @property
    def s(self) -> gl.NVMMADistributedLayout:
        """Scores of a consumer, transposed: 64 keys."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def dq(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])

    @property
    def shared_memory(self) -> int:
        """An upper bound in bytes."""
        elements = 2 * self.keys * self.dim + 2 * self.stages * self.rows * self.dim
        if self.with_dq:
            elements += self.buffers * self.keys * self.rows
        if self.apart:  # a tile of dq of each consumer, in float32
            elements += 2 * 2 * 4096
        return 2 * elements + 8 * self.stages * self.rows + BARRIERS


@gluon.jit
def _queries(block, size, scoring, T: gl.constexpr):
    """The blocks of queries, from the first to one past the last, that see a key of the block."""
    n_q, n_k, _heads, _group = size
    _factor, _cap, left, right = scoring
    low = gl.to_tensor(0)
    high = gl.cdiv(n_q, gl.constexpr(T.rows))
    off = n_k - n_q
    if T.has_right:
        low = gl.maximum(block * T.keys - right - off, 0) // T.rows
    if T.has_left:
        last = gl.minimum(block * T.keys + T.keys, n_k) + left - off
        high = gl.minimum(high, gl.cdiv(gl.maximum(last, 0), gl.constexpr(T.rows)))
    if T.packed:  # a slot that no block has
        high = gl.where(block * T.keys < n_k, high, low)
    return low, gl.maximum(high, low)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, o_desc, stats_desc, work, memory, bars, size, scoring, T: gl.constexpr):
    """Copy the keys and values, then keep the rings full."""
    k_tiles, v_tiles, q_ring, o_ring, stats, _ds_ring, _dq_tiles = memory
    q_ready, q_free, o_ready, o_free, _ds_ready, kv_ready, _all_done, _ds_free = bars
    _n_q, _n_k, _heads, group = size
    block, head, entry = work
    low, high = _queries(block, size, scoring, T)

    mbarrier.expect(kv_ready, 4 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        keys = rows_at(entry, 1, head, block * T.keys + w * 64, T)
        load_tile(k_desc, keys, kv_ready, k_tiles.index(w))
        load_tile(v_desc, keys, kv_ready, v_tiles.index(w))
    slot = 0
    parity = 0
    for g in range(group):
        q_head = head * group + g
        first, _blocks = stat_blocks(entry, q_head, size, gl.int32, T)
        stat = first * (2 * T.stat_rows)
        for m in range(low, high):
            row = m * T.rows
            at = stat + row + row // T.stat_rows * T.stat_rows
            bar = q_ready.index(slot)
            mbarrier.wait(q_free.index(slot), parity ^ 1)
            mbarrier.expect(bar, q_desc.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
            load_tile(q_desc, rows_at(entry, 0, q_head, row, T), bar, q_ring.index(slot))
            load_tile(stats_desc, [at], bar, stats.index(2 * slot))
            load_tile(stats_desc, [at + T.stat_rows], bar, stats.index(2 * slot + 1))
            bar = o_ready.index(slot)
            if not T.apart:
                mbarrier.wait(o_free.index(slot), parity ^ 1)
            mbarrier.expect(bar, o_desc.block_type.nbytes)
            load_tile(o_desc, rows_at(entry, 0, q_head, row, T), bar, o_ring.index(slot))
            slot, parity = next_slot(slot, parity, T.stages)


@gluon.jit
def _start_s(k, q, slot, parity, there, bars, T: gl.constexpr):
    """Start the dot s^T of a step; of whatever q is if there is no such step."""
    zero = gl.full([64, T.rows], 0, gl.float32, T.s)
    mbarrier.wait(bars[0].index(slot), parity, pred=there)
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(v, o, slot, parity, bars, T: gl.constexpr):
    """Start the dot dp^T of a step."""
    zero = gl.full([64, T.rows], 0, gl.float32, T.s)
    mbarrier.wait(bars[2].index(slot), parity)
    return warpgroup_mma(v, o.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, scoring, T: gl.constexpr):
    """ds^T of a step; p^T as an operand. dp is not complete, and s neither unless T.apart. dv is started if T.early."""
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, T.s)
    n_q, n_k, _heads, _group = size
    lse = stats.index(2 * slot).load(OF_QUERY)
    AFTER: gl.constexpr = 1 if T.deferred else 0  # dots that were started after that of dp
    if not T.apart:
        s = warpgroup_mma_wait(1 + AFTER, (s,))
    p, slope = probabilities(s, lse[None, :], key, m * T.rows + n_k - n_q, n_k, scoring, 0, T)
    p_16 = gl.convert_layout(p.to(o.dtype), T.operand)
    if T.early:
        dv = warpgroup_mma(p_16, o, dv, is_async=True)
        dp = warpgroup_mma_wait(1 + AFTER, (dp,))
    else:
        dp = warpgroup_mma_wait(AFTER, (dp,))
    delta = stats.index(2 * slot + 1).load(OF_QUERY)
    return scores_gradient(p, slope, dp, delta[None, :], o.dtype, T), p_16, dv


@gluon.jit
def _multiply_dq(k_parts, ds_parts, buffer, zero, mine: gl.constexpr, T: gl.constexpr):
    """Start this consumer's tile of dq = ds k: two dots, one with each consumer's keys. `zero` is 0."""
    C: gl.constexpr = mine // (T.dim // 64)  # which rows of the step
    E: gl.constexpr = mine % (T.dim // 64)  # which columns
    dq = gl.full([64, 64], 0, gl.float32, T.dq)
    for j in gl.static_range(2):
        ds = ds_parts.index((buffer * 2 + j) * (T.rows // 64) + C)
        k = k_parts.index(j * (T.dim // 64) + E + zero)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=j > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(sums, memory, tile, dq, T: gl.constexpr):
    """Add a tile to dq's sum in memory, in an order in which a thread's registers are adjacent in units of 16 bytes,
    and those of a warp too. If T.apart, by TMA, and it is only started."""
    z = dq.reshape([4, 2, 8, 8, 4, 2]).permute(0, 3, 2, 4, 1, 5)
    if T.apart:
        tma.store_wait(0)  # the tile before has been read
        memory.store(z.reshape([16, 256]))
        fence_async_shared()
        add_tile(sums, [tile * 16, 0], memory)
    else:
        z = z.reshape([4096])
        at = sums + tile.to(gl.int64) * 4096 + gl.arange(0, 4096, layout=z.type.layout)
        gl.atomic_add(at, z, sem="relaxed", scope="gpu")


@gluon.jit
def _advance(m, tile, low, high, row_blocks):
    """The next step's block of queries, and where its head's blocks begin among all heads'."""
    m += 1
    around = m == high
    return gl.where(around, low, m), gl.where(around, tile + row_blocks, tile)


@gluon.jit
def _hidden_zero():
    """0, unknown to the compiler. What depends on it is computed in each step, not kept in registers."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _slot_before(slot, parity, STAGES: gl.constexpr):
    """The slot before this one, and its parity."""
    wraps = slot == 0
    return gl.where(wraps, STAGES - 1, slot - 1), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def _consume(dk_desc, dv_desc, sums, work, memory, bars, size, scoring, scale, mine: gl.constexpr, T: gl.constexpr):
    """Compute dk and dv of 64 keys, and a tile of dq at every step."""
    k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring, dq_tiles = memory
    _q_ready, q_free, _o_ready, o_free, ds_ready, kv_ready, all_done, ds_free = bars
    _n_q, _n_k, _heads, group = size
    block, head, entry = work
    low, high = _queries(block, size, scoring, T)
    key = block * T.keys + mine * 64
    k = k_tiles.index(mine)
    v = v_tiles.index(mine)

    dk = gl.full([64, T.dim], 0, gl.float32, T.acc)
    dv = gl.full([64, T.dim], 0, gl.float32, T.acc)
    slot = 0
    parity = 0
    m = low
    tile, row_blocks = stat_blocks(entry, head * group, size, gl.int32, T)
    steps = group * (high - low)
    mbarrier.wait(kv_ready, 0)
    if T.with_dq:
        PARTS: gl.constexpr = T.dim // 64
        k_parts = view_as(k_tiles, gl.constexpr([2 * PARTS, 64, 64]), k_tiles)
        DS_PARTS: gl.constexpr = T.buffers * 2 * (T.rows // 64)
        ds_parts = view_as(ds_ring, gl.constexpr([DS_PARTS, 64, 64]), ds_ring)
    if T.apart:
        dq_tile = dq_tiles.index(mine)
        tile_before = tile
        s = warpgroup_mma_wait(0, (_start_s(k, q_ring.index(0), 0, 0, steps > 0, bars, T),))
        for i in range(steps):
            q = q_ring.index(slot)
            o = o_ring.index(slot)
            zero = _hidden_zero()
            k = k_tiles.index(mine + zero)
            v = v_tiles.index(mine + zero)
            dp = _start_dp(v, o, slot, parity, bars, T)
            ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, scoring, T)
            mbarrier.wait(ds_free.index(slot), parity ^ 1)
            ds_ring.index(slot * 2 + mine).store(ds)
            ds_16 = gl.convert_layout(ds, T.operand)
            fence_async_shared()
            after, parity_after = next_slot(slot, parity, T.stages)
            mbarrier.arrive(ds_ready.index(slot), count=1)

            before, parity_before = _slot_before(slot, parity, T.stages)
            mbarrier.wait(ds_ready.index(before), parity_before, pred=i > 0)
            dq = _multiply_dq(k_parts, ds_parts, before, zero, mine, T)  # in the first step of nothing, and not added
            if not T.early:
                dv = warpgroup_mma(p_16, o, dv, is_async=True)
            dk = warpgroup_mma(ds_16, q, dk, is_async=True)
            dq = warpgroup_mma_wait(1 if T.early else 2, (dq,))
            if i > 0:
                mbarrier.arrive(ds_free.index(before), count=1)
                _add_dq(sums, dq_tile, tile_before * 2 + mine, dq, T)
            dv = warpgroup_mma_wait(1, (dv,))
            s = _start_s(k, q_ring.index(after), after, parity_after, i + 1 < steps, bars, T)
            dv, dk = warpgroup_mma_wait(1, (dv, dk))
            mbarrier.arrive(q_free.index(slot), count=1)
            s = warpgroup_mma_wait(0, (s,))  # in flight into the next step, ptxas would serialise all dots
            tile_before = tile + m
            m, tile = _advance(m, tile, low, high, row_blocks)
            slot = after
            parity = parity_after
        if steps > 0:
            before, parity_before = _slot_before(slot, parity, T.stages)
            mbarrier.wait(ds_ready.index(before), parity_before)
            dq = warpgroup_mma_wait(0, (_multiply_dq(k_parts, ds_parts, before, 0, mine, T),))
            _add_dq(sums, dq_tile, tile_before * 2 + mine, dq, T)
        mbarrier.arrive(all_done, count=1)
    elif T.with_dq:
        buffer = 0
        buffer_parity = 0
        for _ in range(steps):
            q = q_ring.index(slot)
            o = o_ring.index(slot)
            s = _start_s(k, q, slot, parity, True, bars, T)
            dp = _start_dp(v, o, slot, parity, bars, T)
            ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, scoring, T)
            ds_ring.index(buffer * 2 + mine).store(ds)
            ds_16 = gl.convert_layout(ds, T.operand)
            fence_async_shared()
            if not T.early:
                dv = warpgroup_mma(p_16, o, dv, is_async=True)
            mbarrier.arrive(ds_ready.index(buffer), count=1)
            mbarrier.wait(ds_ready.index(buffer), buffer_parity)
            dq = _multiply_dq(k_parts, ds_parts, buffer, 0, mine, T)
            dv = warpgroup_mma_wait(2, (dv,))
            mbarrier.arrive(o_free.index(slot), count=1)
            dk = warpgroup_mma(ds_16, q, dk, is_async=True)
            dq = warpgroup_mma_wait(1, (dq,))
            _add_dq(sums, dq_tiles, (tile + m) * 2 + mine, dq, T)
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
            s = _start_s(k, q, slot, parity, True, bars, T)
            dp = _start_dp(v, o, slot, parity, bars, T)
            if T.deferred:  # of zeros in the first step
                dk = warpgroup_mma(ds_16, q_ring.index(before), dk, is_async=True)
            ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m, key, size, scoring, T)
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

    write(dv, v, dv_desc, rows_at(entry, 1, head, key, T))
    if T.with_dq:
        mbarrier.wait(all_done, 0)  # the other consumer no longer reads these keys
    write(dk * scale, k, dk_desc, rows_at(entry, 1, head, key, T))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["heads", "kv_heads", "n_q", "n_k", "lanes", "together", "left", "right", "sequences"],
    do_not_specialize_on_alignment=["starts_ptr"],
)
def keys_gradients(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    stats_desc,
    dk_desc,
    dv_desc,
    sums,
    starts_ptr,
    heads,
    kv_heads,
    n_q,
    n_k,
    lanes,
    together,
    scale,
    factor,
    cap,
    left,
    right,
    sequences,
    T: gl.constexpr,
):
    """dk and dv; and dq / scale added to a float32 sum, whose tiles `_add_dq` orders.

    lanes are batch x kv_heads. With packed sequences n_q and n_k are those of all together.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared)
    q_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared)
    o_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared)
    ds_ring = q_ring
    if T.with_dq:
        ds_ring = gl.allocate_shared_memory(DTYPE, [T.buffers * 2, 64, T.rows], T.shared)
    dq_tiles = q_ring
    if T.apart:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sums.layout)
    stats = gl.allocate_shared_memory(gl.float32, [T.stages * 2, T.rows], stats_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    o_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    o_free = q_free
    if not T.apart:
        o_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(o_ready.index(i), count=1)
        if not T.apart:
            mbarrier.init(o_free.index(i), count=2)
    mbarrier.init(kv_ready, count=1)
    # Only where they are used: Triton's allocator reuses the memory of a barrier on which nothing waits, here for the
    # captured arguments of the other warps, and the barrier's initialisation may land after those.
    ds_ready = q_ready  # placeholders
    all_done = kv_ready
    if T.with_dq:
        ds_ready = gl.allocate_shared_memory(gl.int64, [T.buffers, 1], mbarrier.MBarrierLayout())
        all_done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(gl.constexpr(T.buffers)):
            mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(all_done, count=2)
    ds_free = ds_ready
    if T.apart:
        ds_free = gl.allocate_shared_memory(gl.int64, [T.buffers, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(gl.constexpr(T.buffers)):
            mbarrier.init(ds_free.index(i), count=2)
    fence_async_shared()  # makes the initialised barriers visible to TMA

    # The first block, which with causal is the longest, comes first.
    if T.packed:
        head, slot = place(gl.program_id(0), together, lanes, n_k // T.keys + sequences)
        size = (n_q, n_k, heads, heads // kv_heads)
        block, entry, size = find_work(slot, starts_ptr, size, sequences, 1, T)
        work = (block, head, entry)
    else:
        lane, block = place(gl.program_id(0), together, lanes, gl.cdiv(n_k, gl.constexpr(T.keys)))
        work = (block, lane % kv_heads, lane // kv_heads)
        size = (n_q, n_k, heads, heads // kv_heads)
    scoring = (factor, cap, left, right)
    bars = (q_ready, q_free, o_ready, o_free, ds_ready, kv_ready, all_done, ds_free)
    memory = (k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring, dq_tiles)
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, sums, work, memory, bars, size, scoring, scale, 0, T)),
            (_consume, (dk_desc, dv_desc, sums, work, memory, bars, size, scoring, scale, 1, T)),
            (_produce, (q_desc, k_desc, v_desc, o_desc, stats_desc, work, memory, bars, size, scoring, T)),
        ],
        [4, 1],
        [240, 24],
    )


@functools.cache
def tiling(
    dim: int, masked: bool, s: Scoring, stages: int, with_dq: bool, factor: float = 0.0, packed: bool = False
) -> KeysTiling:
    """What the kernel of dk and dv is compiled for, for that padded head_dim.

    With dq, dv is started early where that was faster: of packed sequences, for causal heads of 64 alone; of dense
    ones, for heads of 128. Without dq, heads of 128 have room for both an early and a deferred dot. Heads of 64 are the
    fastest with steps of 128 queries and neither. A soft cap takes the registers of either.
    """
    loose = dim == 128 and not s.softcap
    if with_dq:
        early = dim == 64 and s.right >= 0 and not s.softcap if packed else loose
        return KeysTiling(dim, *s.flags, masked, ROWS[dim], factor, packed, ROWS[dim], stages, True, early)
    return KeysTiling(dim, *s.flags, masked, ROWS[dim], factor, packed, ROWS[dim], stages + 1, False, loose, loose)


@functools.cache
def _launcher(t: KeysTiling, dtype: torch.dtype) -> KernelLauncher:
    return KernelLauncher(
        keys_gradients, {"T": t}, newest_assembler=t.packed or t.apart, num_warps=4, maxnreg=REGISTERS
    )


def prepare_dkdv(t: KeysTiling, x: Inputs, dout: Tensor, stats: Tensor, dk: Tensor, dv: Tensor) -> Callable[..., None]:
    """The launch for tensors like these.

    To be called with `q, k, v, dout, stats, dk, dv, sums, starts`.
    """
    batch, heads, n_q, _ = x.q.shape
    kv_heads, n_k = x.k.shape[1:3]
    lanes = batch * kv_heads
    walked = heads // kv_heads * x.longest_q * t.dim * (4 + (4 if t.with_dq else 0))
    rows = (t.rows, 64, 64, t.rows, 0, 64, 64)
    tensors = (x.q, x.k, x.v, dout, stats, dk, dv)
    descriptors = {
        i: describe_rows(tensor, n, t.packed) if n else describe(tensor, (t.rows,), gl.NVMMASharedLayout(0, 32, 1))
        for i, (tensor, n) in enumerate(zip(tensors, rows, strict=True))
    }
    if t.apart:  # the rows' statistics are two numbers each
        shape = (stats.numel() // 2 * t.dim // 256, 256)
        descriptors[7] = Descriptor(shape, (256, 1), (16, 256), gl.NVMMASharedLayout(0, 32, 2))
    sizes = (heads, kv_heads, n_q, n_k, lanes, heads_together(lanes, walked))
    blocks = block_slots(n_k, KEYS, x.sequences) if t.packed else library.cdiv(n_k, KEYS)
    return bind(
        _launcher(t, x.q.dtype),
        lanes * blocks,
        numbers=(*sizes, *scoring_numbers(x.scoring), x.sequences),
        descriptors=descriptors,
    )
