"""The backward of attention for sm_90: dk and dv, in tiles of 128 keys, and optionally dq (Gluon).

    s^T = k q^T      p = exp2(s * scale - lse)        dv += p^T dout
    dp^T = v dout^T  ds = p * (dp - delta)            dk += ds^T q       dq += ds k

A tile is 128 keys of one KV head, and its mainloop walks over the blocks of queries that see them, of all query heads
that share the KV head (GQA). Two consumer warpgroups have 64 of the keys each, and accumulate dk and dv in registers.
Scores are computed transposed, so that p^T and ds^T are already in the registers from which the next wgmma reads its
first operand. A producer warp loads by TMA: the keys and values of a tile, and two rings of pipeline stages, one of q
with the rows' lse and delta, one of dout.

The kernel is persistent, with dynamic scheduling: a CTA takes its first tile by its number, and each later one from a
counter in memory, so that no SM waits at the end for another whose tiles were longer. The producer takes the next tile,
and loads its first queries, while the consumers still compute. It describes each tile to them in shared memory, in
one of two buffers, which it writes alternately.

Registers limit the tile: at a head_dim of 128, dk and dv alone take 128 of the 240 that a consumer's thread has. How
far steps can overlap depends on the rest (`early` and `deferred` of `KeysTiling`).

    tile_ready, tile_free[i]  the producer has described a tile; each consumer no longer reads the description
    q_ready, o_ready[slot]    completed by the bytes that land; the consumers wait for it
    q_free[slot]              of both rings: completed by one arrival of each consumer; the producer waits for it
    k_ready, v_ready          the keys, the values of the tile have landed
    k_free, v_free            completed by one arrival of each consumer, after its last dot with them
    ds_ready[slot]            with dq: completed by one arrival of each consumer, with its half of ds in shared memory
    ds_free[slot]             with dq: completed by one arrival of each consumer, once it has read both halves

dq is a sum over the keys, and needs ds of both consumers. They exchange ds through shared memory. Each computes one
tile of 64 x 64 of a step's dq, and TMA adds it atomically to a float32 sum in memory, in the order in which CTAs reach
it. So its last bits differ between runs. For deterministic gradients, `hopper_backward_dq.py` computes dq, at the cost
of two more GEMMs.

The dq that a step computes is that of the previous step. So neither consumer waits for the other's ds of the same step:
they may be half a step apart, and one keeps the tensor cores busy while the other computes probabilities. s of the next
step is issued at the end of a step, behind its other GEMMs.

wgmma complete in the order in which they are issued: waiting until n are in flight waits for all but the last n.

lse, times log2(e), is +inf for rows that see no key and rows that don't exist, so that p is 0 in them.

The kernel's one constant, T, is a `KeysTiling`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime
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
from rooftile.ops.attention.hopper_tiling import by_place
from rooftile.ops.attention.parts import rasterize
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

_OUT = 2 * 64 * 128  # elements of 16 bits of both consumers' tiles that TMA stores or adds


@dataclasses.dataclass(frozen=True)
class KeysTiling(BackwardTiling):
    """All that the kernel of dk and dv is compiled for but the dtypes. A program owns 128 keys.

    Args:
        rows: queries of a step; with_dq 64 for a dim of 128 and 128 for 64, so that its dq is two tiles of 64 x 64.
        stages: blocks of queries in the rings.
        with_dq: dq is computed too, and added to its sum in memory.
        early: dv += p^T dout is issued before ds is computed.
        deferred: dk += ds^T q is issued in the next step, after its s and dp; not with_dq.
    """

    rows: int
    stages: int
    with_dq: bool
    early: bool = False
    deferred: bool = False
    keys: int = 128

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """Of a consumer's scores, transposed: 64 keys."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def dq_layout(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])

    @property
    def shared_memory(self) -> int:
        """An upper bound in bytes."""
        elements = 2 * self.keys * self.dim + 2 * self.stages * self.rows * self.dim + _OUT
        if self.with_dq:
            elements += self.stages * self.keys * self.rows
        return 2 * elements + 8 * self.stages * self.rows + BARRIERS


@gluon.jit
def _queries(block, size, scoring, T: gl.constexpr):
    """The range [low, high) of blocks of queries that see a key of the block."""
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
    return low, gl.maximum(high, low)


@gluon.jit
def _write_tile_info(tile_infos, turn, of_tiles, values):
    """Tell the consumers about a tile, or without values that there is no further one.

    The values are the first key; low and high of `_queries`; the first block of the rows' lse and delta; the KV head;
    the batch entry, or of a packed sequence the end of its keys; and how many queries and keys there are.
    """
    tile_ready, tile_free = of_tiles
    field = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [1], [0]))
    info = gl.full([8], -1, gl.int32, field.type.layout)
    for i in gl.static_range(len(values)):
        info = gl.where(field == i, values[i], info)
    mbarrier.wait(tile_free.index(turn % 2), (turn // 2 & 1) ^ 1)
    tile_infos.index(turn % 2).store(info)
    mbarrier.arrive(tile_ready.index(turn % 2), count=1)


@gluon.jit
def _read_tile_info(tile_infos, turn):
    """What `_write_tile_info` wrote; the first is below 0 if there is no tile."""
    info = tile_infos.index(turn % 2).load(gl.BlockedLayout([8], [32], [4], [0]))
    field = gl.arange(0, 8, layout=info.type.layout)
    values = ()
    for i in gl.static_range(8):
        values += (gl.sum(gl.where(field == i, info, 0), 0),)  # type: ignore[assignment]
    return values


@gluon.jit
def _load_keys(k_desc, v_desc, entry, head, block, turn, memory, bars, T: gl.constexpr):
    """Load the values and keys of a tile, each as soon as no wgmma reads those of the previous tile."""
    k_tiles, v_tiles, _q_ring, _o_ring, _stats, _ds_ring, _out, _tile_infos = memory
    k_ready, k_free, v_ready, v_free = bars
    mbarrier.wait(v_free, turn & 1 ^ 1)
    mbarrier.expect(v_ready, 2 * v_desc.block_type.nbytes)
    for w in gl.static_range(2):
        load_tile(v_desc, rows_at(entry, 1, head, block * T.keys + w * 64, T), v_ready, v_tiles.index(w))
    mbarrier.wait(k_free, turn & 1 ^ 1)
    mbarrier.expect(k_ready, 2 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        load_tile(k_desc, rows_at(entry, 1, head, block * T.keys + w * 64, T), k_ready, k_tiles.index(w))


@gluon.jit
def _produce(descs, counter, starts_ptr, order, memory, bars, size, scoring, T: gl.constexpr):
    """Take tiles, and keep the rings full."""
    q_desc, k_desc, v_desc, o_desc, stats_desc = descs
    _k_tiles, _v_tiles, q_ring, o_ring, stats, _ds_ring, _out, tile_infos = memory
    of_tiles, of_keys, q_ready, q_free, o_ready, _ds_ready, _ds_free = bars
    batch_heads, together, sequences = order
    _n_q, n_k, heads, group = size
    kv_heads = heads // group
    blocks = gl.cdiv(n_k, gl.constexpr(T.keys))
    if T.packed:
        blocks = n_k // T.keys + sequences
    slot = 0
    parity = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < batch_heads * blocks:
        # The first block of keys, which with causality most queries see, comes first.
        batch_head, block = rasterize(tile, together, batch_heads, blocks)
        if T.packed:
            head = batch_head
            block, entry, its_size = find_work(block, starts_ptr, size, sequences, 1, T)
            _of_queries, of_its_keys, _first, _blocks = entry
            end, _its_keys = of_its_keys
        else:
            head = batch_head % kv_heads
            entry = batch_head // kv_heads
            end = entry
            its_size = size
        its_queries, its_keys, _heads, _group = its_size
        if its_keys > 0:  # some slots of packed sequences have no block
            low, high = _queries(block, its_size, scoring, T)
            first, _blocks = stat_blocks(entry, head * group, size, gl.int32, T)
            numbers = (block * T.keys, low, high, first, head, end, its_queries, its_keys)
            _write_tile_info(tile_infos, turn, of_tiles, numbers)
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
                    mbarrier.expect(bar, o_desc.block_type.nbytes)
                    load_tile(o_desc, rows_at(entry, 0, q_head, row, T), bar, o_ring.index(slot))
                    slot, parity = next_slot(slot, parity, T.stages)
                    if (g == 0) & (m == low):  # after the first queries, whose slots are free sooner
                        _load_keys(k_desc, v_desc, entry, head, block, turn, memory, of_keys, T)
            if low == high:
                _load_keys(k_desc, v_desc, entry, head, block, turn, memory, of_keys, T)
            turn += 1
        tile = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    _write_tile_info(tile_infos, turn, of_tiles, ())


@gluon.jit
def _start_s(k, q, slot, parity, there, ready, T: gl.constexpr):
    """Issue s^T = k q^T of a step. Where there is none (not `there`), q is stale and the result is not used."""
    zero = gl.full([64, T.rows], 0, gl.float32, T.scores_layout)
    mbarrier.wait(ready.index(slot), parity, pred=there)
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(v, o, slot, parity, ready, T: gl.constexpr):
    """Issue dp^T = v dout^T of a step."""
    zero = gl.full([64, T.rows], 0, gl.float32, T.scores_layout)
    mbarrier.wait(ready.index(slot), parity)
    return warpgroup_mma(v, o.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scores_gradient(s, dp, dv, o, stats, slot, p_first, key, n_k, scoring, T: gl.constexpr):
    """ds^T of a step, p^T as an operand, and dv, whose wgmma is issued here if T.early.

    dp is still in flight when this is called, and so is s unless T.with_dq.
    """
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, T.scores_layout)
    lse = stats.index(2 * slot).load(OF_QUERY)
    AFTER: gl.constexpr = 1 if T.deferred else 0  # wgmma issued after dp: that of dk
    if not T.with_dq:
        s = warpgroup_mma_wait(1 + AFTER, (s,))
    p, slope = probabilities(s, lse[None, :], key, p_first, n_k, scoring, 0, T)
    p_16 = gl.convert_layout(p.to(o.dtype), T.operand_layout)
    if T.early:
        dv = warpgroup_mma(p_16, o, dv, is_async=True)
        dp = warpgroup_mma_wait(1 + AFTER, (dp,))
    else:
        dp = warpgroup_mma_wait(AFTER, (dp,))
    delta = stats.index(2 * slot + 1).load(OF_QUERY)
    return scores_gradient(p, slope, dp, delta[None, :], o.dtype, T), p_16, dv


@gluon.jit
def _multiply_dq(k_parts, ds_parts, buffer, zero, mine: gl.constexpr, T: gl.constexpr):
    """Issue this consumer's 64 x 64 tile of dq = ds k: two wgmma, one over each consumer's keys.

    `zero` is `_opaque_zero`'s.
    """
    C: gl.constexpr = mine // (T.dim // 64)  # which rows of the step
    E: gl.constexpr = mine % (T.dim // 64)  # which columns
    dq = gl.full([64, 64], 0, gl.float32, T.dq_layout)
    for j in gl.static_range(2):
        ds = ds_parts.index((buffer * 2 + j) * (T.rows // 64) + C)
        k = k_parts.index(j * (T.dim // 64) + E + zero)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=j > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(sums, memory, tile, dq):
    """Start the TMA reduction that adds a tile to dq's sum in memory.

    The sum keeps the order of the accumulator's registers: a thread's four values of eight columns are 16 adjacent
    bytes, and a warp's are 512, so the stores to shared memory are vectors without bank conflicts. `row_sums` puts them
    in order.
    """
    z = dq.reshape([4, 2, 8, 8, 4, 2]).permute(0, 3, 2, 4, 1, 5)
    memory = view_as(memory, gl.constexpr([16, 256]), sums)
    tma.store_wait(0)  # the previous tile has been read
    memory.store(z.reshape([16, 256]))
    fence_async_shared()  # makes it visible to TMA
    add_tile(sums, [tile * 16, 0], memory)


@gluon.jit
def _advance(m, tile, low, high, row_blocks):
    """The next step's block of queries, and where the blocks of its query head begin among those of all heads."""
    m += 1
    around = m == high
    return gl.where(around, low, m), gl.where(around, tile + row_blocks, tile)


@gluon.jit
def _opaque_zero():
    """A 0 that the compiler can't see through. An address that depends on it is computed in each step, rather than
    hoisted out of the loop and kept in registers."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _slot_before(slot, parity, STAGES: gl.constexpr):
    """The slot before this one, and its parity."""
    wraps = slot == 0
    return gl.where(wraps, STAGES - 1, slot - 1), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def _consume(dk_desc, dv_desc, sums, order, memory, bars, size, scoring, scale, mine: gl.constexpr, T: gl.constexpr):
    """Compute dk and dv of 64 keys of each tile, and a tile of dq at every step."""
    k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring, out, tile_infos = memory
    of_tiles, of_keys, q_ready, q_free, o_ready, ds_ready, ds_free = bars
    tile_ready, tile_free = of_tiles
    k_ready, k_free, v_ready, v_free = of_keys
    n_q, n_k, _heads, group = size
    row_blocks = gl.cdiv(n_q, gl.constexpr(T.stat_rows))  # of a head
    if T.packed:
        _batch_heads, _together, sequences = order
        row_blocks = n_q // T.stat_rows + sequences
    dq_tile = out.index(mine)
    if T.with_dq:
        PARTS: gl.constexpr = T.dim // 64
        k_parts = view_as(k_tiles, gl.constexpr([2 * PARTS, 64, 64]), k_tiles)
        DS_PARTS: gl.constexpr = T.stages * 2 * (T.rows // 64)
        ds_parts = view_as(ds_ring, gl.constexpr([DS_PARTS, 64, 64]), ds_ring)

    slot = 0
    parity = 0
    turn = 0
    mbarrier.wait(tile_ready.index(0), 0)
    key, low, high, tile, _head, _end, its_queries, its_keys = _read_tile_info(tile_infos, 0)
    while key >= 0:
        key += mine * 64
        if T.packed:
            n_q = its_queries
            n_k = its_keys
        steps = group * (high - low)
        m = low
        dk = gl.full([64, T.dim], 0, gl.float32, T.acc_layout)
        dv = gl.full([64, T.dim], 0, gl.float32, T.acc_layout)
        k = k_tiles.index(mine)
        v = v_tiles.index(mine)
        mbarrier.wait(k_ready, turn & 1)
        if T.with_dq:
            tile_before = tile
            s = warpgroup_mma_wait(0, (_start_s(k, q_ring.index(slot), slot, parity, steps > 0, q_ready, T),))
            mbarrier.wait(v_ready, turn & 1)
            for i in range(steps):
                q = q_ring.index(slot)
                o = o_ring.index(slot)
                zero = _opaque_zero()
                k = k_tiles.index(mine + zero)
                v = v_tiles.index(mine + zero)
                dp = _start_dp(v, o, slot, parity, o_ready, T)
                ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m * T.rows + n_k - n_q, key, n_k, scoring, T)
                mbarrier.wait(ds_free.index(slot), parity ^ 1)
                ds_ring.index(slot * 2 + mine).store(ds)
                ds_16 = gl.convert_layout(ds, T.operand_layout)
                fence_async_shared()  # makes ds visible to wgmma, of both consumers
                after, parity_after = next_slot(slot, parity, T.stages)
                mbarrier.arrive(ds_ready.index(slot), count=1)

                before, parity_before = _slot_before(slot, parity, T.stages)
                mbarrier.wait(ds_ready.index(before), parity_before, pred=i > 0)
                dq = _multiply_dq(k_parts, ds_parts, before, zero, mine, T)  # in the first step stale, and not added
                if not T.early:
                    dv = warpgroup_mma(p_16, o, dv, is_async=True)
                dk = warpgroup_mma(ds_16, q, dk, is_async=True)
                dq = warpgroup_mma_wait(1 if T.early else 2, (dq,))
                if i > 0:
                    mbarrier.arrive(ds_free.index(before), count=1)
                    _add_dq(sums, dq_tile, tile_before * 2 + mine, dq)
                dv = warpgroup_mma_wait(1, (dv,))
                s = _start_s(k, q_ring.index(after), after, parity_after, i + 1 < steps, q_ready, T)
                dv, dk = warpgroup_mma_wait(1, (dv, dk))
                mbarrier.arrive(q_free.index(slot), count=1)
                s = warpgroup_mma_wait(0, (s,))  # if it were in flight across steps, ptxas would serialize all wgmma
                tile_before = tile + m
                m, tile = _advance(m, tile, low, high, row_blocks)
                slot = after
                parity = parity_after
            mbarrier.arrive(v_free, count=1)
            if steps > 0:
                before, parity_before = _slot_before(slot, parity, T.stages)
                mbarrier.wait(ds_ready.index(before), parity_before)
                dq = warpgroup_mma_wait(0, (_multiply_dq(k_parts, ds_parts, before, _opaque_zero(), mine, T),))
                mbarrier.arrive(ds_free.index(before), count=1)
                _add_dq(sums, dq_tile, tile_before * 2 + mine, dq)
        else:
            mbarrier.wait(v_ready, turn & 1)
            before = slot + 0  # not `slot`, which Triton would not see change in the loop
            ds_16 = gl.full([64, T.rows], 0, q_ring.dtype, T.operand_layout)
            for i in range(steps):
                q = q_ring.index(slot)
                o = o_ring.index(slot)
                s = _start_s(k, q, slot, parity, True, q_ready, T)
                dp = _start_dp(v, o, slot, parity, o_ready, T)
                if T.deferred:  # dk of the previous step; in the first step ds is zeros
                    dk = warpgroup_mma(ds_16, q_ring.index(before), dk, is_async=True)
                ds, p_16, dv = _scores_gradient(s, dp, dv, o, stats, slot, m * T.rows + n_k - n_q, key, n_k, scoring, T)
                if not T.early:
                    dv = warpgroup_mma(p_16, o, dv, is_async=True)
                if T.deferred:
                    dk = warpgroup_mma_wait(1, (dk,))
                    if i > 0:
                        mbarrier.arrive(q_free.index(before), count=1)
                    ds_16 = gl.convert_layout(ds, T.operand_layout)
                    dv = warpgroup_mma_wait(0, (dv,))
                else:
                    dk = warpgroup_mma(gl.convert_layout(ds, T.operand_layout), q, dk, is_async=True)
                    dv, dk = warpgroup_mma_wait(0, (dv, dk))
                    mbarrier.arrive(q_free.index(slot), count=1)
                before = slot
                m, tile = _advance(m, tile, low, high, row_blocks)
                slot, parity = next_slot(slot, parity, T.stages)
            mbarrier.arrive(v_free, count=1)
            if T.deferred:  # noqa: SIM102  # the one is known when it is compiled
                if steps > 0:
                    dk = warpgroup_mma_wait(0, (warpgroup_mma(ds_16, q_ring.index(before), dk, is_async=True),))
                    mbarrier.arrive(q_free.index(before), count=1)
        mbarrier.arrive(k_free, count=1)

        # Read again: only what the steps need is kept in registers during them.
        key, _low, _high, _tile, head, end, _its_queries, its_keys = _read_tile_info(tile_infos, turn)
        entry = end
        if T.packed:
            entry = (end, its_keys), (end, its_keys)  # `rows_at` reads the second, that of the keys
        at = rows_at(entry, 1, head, key + mine * 64, T)
        # Nor are the addresses of these stores.
        rows = view_as(out.index(mine + _opaque_zero()), gl.constexpr([64, T.dim]), k_tiles)
        write(dv, rows, dv_desc, at)
        write(dk * scale, rows, dk_desc, at)
        mbarrier.arrive(tile_free.index(turn % 2), count=1)
        turn += 1
        mbarrier.wait(tile_ready.index(turn % 2), turn // 2 & 1)
        key, low, high, tile, _head, _end, its_queries, its_keys = _read_tile_info(tile_infos, turn)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["heads", "kv_heads", "n_q", "n_k", "batch_heads", "together", "left", "right", "sequences"],
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
    counter,
    starts_ptr,
    heads,
    kv_heads,
    n_q,
    n_k,
    batch_heads,
    together,
    scale,
    factor,
    cap,
    left,
    right,
    sequences,
    T: gl.constexpr,
):
    """dk and dv; and dq / scale added to a float32 sum, whose tiles `_add_dq` orders. `counter` is 0 before.

    batch_heads are batch x kv_heads. With packed sequences n_q and n_k are those of all together.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared_layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared_layout)
    q_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared_layout)
    o_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.rows, T.dim], T.shared_layout)
    ds_ring = q_ring
    if T.with_dq:
        ds_ring = gl.allocate_shared_memory(DTYPE, [T.stages * 2, 64, T.rows], T.shared_layout)
    out = gl.allocate_shared_memory(DTYPE, [2, 64, 128], T.shared_layout)  # a consumer's tile of dq, dv or dk
    stats = gl.allocate_shared_memory(gl.float32, [T.stages * 2, T.rows], stats_desc.layout)
    tile_infos = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    o_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_free.index(i), count=2)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(k_free, count=2)
    mbarrier.init(v_ready, count=1)
    mbarrier.init(v_free, count=2)
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(o_ready.index(i), count=1)
    # Only where they are used: Triton's allocator reuses the memory of a barrier on which nothing waits, here for the
    # captured arguments of the other warps, and the barrier's initialization may overwrite them.
    ds_ready = q_ready  # placeholders
    ds_free = q_free
    if T.with_dq:
        ds_ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
        ds_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(gl.constexpr(T.stages)):
            mbarrier.init(ds_ready.index(i), count=2)
            mbarrier.init(ds_free.index(i), count=2)
    fence_async_shared()  # makes the initialized barriers visible to TMA

    order = (batch_heads, together, sequences)
    size = (n_q, n_k, heads, heads // kv_heads)
    scoring = (factor, cap, left, right)
    of_keys = (k_ready, k_free, v_ready, v_free)
    bars = ((tile_ready, tile_free), of_keys, q_ready, q_free, o_ready, ds_ready, ds_free)
    memory = (k_tiles, v_tiles, q_ring, o_ring, stats, ds_ring, out, tile_infos)
    descs = (q_desc, k_desc, v_desc, o_desc, stats_desc)
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, sums, order, memory, bars, size, scoring, scale, 0, T)),
            (_consume, (dk_desc, dv_desc, sums, order, memory, bars, size, scoring, scale, 1, T)),
            (_produce, (descs, counter, starts_ptr, order, memory, bars, size, scoring, T)),
        ],
        [4, 1],
        [240, 24],
    )


@functools.cache
def tiling(
    dim: int, masked: bool, s: Scoring, stages: int, with_dq: bool, factor: float = 0.0, packed: bool = False
) -> KeysTiling:
    """What the kernel of dk and dv is compiled for, for that padded head_dim.

    Heads of 128 have the registers for `early`, and without dq for `deferred` too; a soft cap takes them. Heads of 64
    are fastest with steps of 128 queries and without `deferred`. There `early` is faster only with a mask: on an H200
    with 16 x 32 heads of 1024, 553 us with it and 567 without for causal, but 800 and 778 for full attention.
    """
    loose = dim == 128 and not s.softcap
    if with_dq:
        early = not s.softcap and (dim == 128 or masked)
        return KeysTiling(dim, *s.flags, masked, ROWS[dim], factor, packed, ROWS[dim], stages, True, early)
    return KeysTiling(dim, *s.flags, masked, ROWS[dim], factor, packed, ROWS[dim], stages + 1, False, loose, loose)


@functools.cache
def _launcher(t: KeysTiling, dtype: torch.dtype) -> KernelLauncher:
    return KernelLauncher(keys_gradients, {"T": t}, newest_assembler=True, num_warps=4, maxnreg=REGISTERS)


def prepare_dkdv(t: KeysTiling, x: Inputs, dout: Tensor, stats: Tensor, dk: Tensor, dv: Tensor) -> Callable[..., None]:
    """The launch for tensors like these.

    To be called with `q, k, v, dout, stats, dk, dv, sums, counter, starts`; the counter is an int32 that is 0.
    """
    batch, heads, n_q, _ = x.q.shape
    kv_heads, n_k = x.k.shape[1:3]
    batch_heads = batch * kv_heads
    walked = heads // kv_heads * x.longest_q * t.dim * (4 + (4 if t.with_dq else 0))
    descriptors = {
        "q_desc": describe_rows(x.q, t.rows, t.packed),
        "k_desc": describe_rows(x.k, 64, t.packed),
        "v_desc": describe_rows(x.v, 64, t.packed),
        "o_desc": describe_rows(dout, t.rows, t.packed),
        "stats_desc": describe(stats, (t.rows,), gl.NVMMASharedLayout(0, 32, 1)),
        "dk_desc": describe_rows(dk, 64, t.packed),
        "dv_desc": describe_rows(dv, 64, t.packed),
    }
    if t.with_dq:  # the sum has as many rows as stats, which has two numbers a row
        shape = (stats.numel() // 2 * t.dim // 256, 256)
        descriptors["sums"] = Descriptor(shape, (256, 1), (16, 256), gl.NVMMASharedLayout(0, 32, 2))
    blocks = block_slots(n_k, KEYS, x.sequences) if t.packed else library.cdiv(n_k, KEYS)
    programs = min(runtime.target(x.q.device).multiprocessors, batch_heads * blocks)
    together = heads_together(batch_heads, walked, blocks, programs)
    return bind(
        _launcher(t, x.q.dtype),
        programs,
        numbers=(heads, kv_heads, n_q, n_k, batch_heads, together, *scoring_numbers(x.scoring), x.sequences),
        descriptors=by_place(keys_gradients, **descriptors),
    )
