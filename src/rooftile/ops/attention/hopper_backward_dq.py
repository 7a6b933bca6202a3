"""The backward of attention for sm_90: dq alone, a CTA for each block of 128 queries of a head (Gluon).

    s = q k^T    dp = dout v^T    ds = exp2(s * scale - lse) * (dp - delta)    dq += ds k

Two consumer warpgroups have 64 of the queries each. They accumulate dq in registers and walk over the blocks of keys
that their queries see; ds goes from registers to the tensor cores. A producer warp loads q and dout by TMA, and fills
two rings of pipeline stages, one of keys and one of values. Each sum is in one CTA, in a fixed order: the result is
bit-identical on every run.

    k_ready, v_ready[slot]  completed by the bytes that land; the consumers wait for it
    k_free, v_free[slot]    completed by one arrival of each consumer; the producer waits for it
    q_ready                 the queries and dout have landed

The kernel's one constant, T, is a `QueriesTiling`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.attention.hopper_backward_parts import (
    BARRIERS,
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


@dataclasses.dataclass(frozen=True)
class QueriesTiling(BackwardTiling):
    """All that the kernel of dq is compiled for but the dtypes. A program owns 128 queries.

    Args:
        keys: keys of a step.
        stages: blocks of keys, and of values, in the rings.
        deferred: dq += ds k is issued in the next step, after its s and dp.
    """

    keys: int
    stages: int
    deferred: bool
    rows: int = 128

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """Of a consumer's scores: 64 queries."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.keys, 16])

    @property
    def shared_memory(self) -> int:
        """An upper bound in bytes."""
        return 4 * (self.rows * self.dim + self.stages * self.keys * self.dim) + BARRIERS


@gluon.jit
def _keys(row, size, scoring, T: gl.constexpr):
    """The range [begin, end) of blocks of keys that some query of the tile at `row` sees."""
    n_q, n_k, _heads, _group = size
    _factor, _cap, left, right = scoring
    off = n_k - n_q
    begin = gl.to_tensor(0)
    end = n_k
    if T.has_left:
        begin = gl.maximum(row + off - left, 0) // T.keys
    if T.has_right:
        end = gl.maximum(gl.minimum(gl.minimum(row + T.rows, n_q) + off + right, n_k), 0)
    if T.packed:  # a slot without a block: nothing
        end = gl.where(row < n_q, end, 0)
    return begin, gl.maximum(gl.cdiv(end, gl.constexpr(T.keys)), begin)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, o_desc, work, memory, bars, size, scoring, T: gl.constexpr):
    """Copy the queries and dout, then keep the rings full."""
    q_tiles, o_tiles, k_ring, v_ring = memory
    k_ready, k_free, v_ready, v_free, q_ready = bars
    _n_q, _n_k, _heads, group = size
    row, head, entry = work
    begin, end = _keys(row, size, scoring, T)

    mbarrier.expect(q_ready, 4 * q_desc.block_type.nbytes)
    for w in gl.static_range(2):
        queries = rows_at(entry, 0, head, row + w * 64, T)
        load_tile(q_desc, queries, q_ready, q_tiles.index(w))
        load_tile(o_desc, queries, q_ready, o_tiles.index(w))
    slot = 0
    parity = 0
    for block in range(begin, end):
        keys = rows_at(entry, 1, head // group, block * T.keys, T)
        mbarrier.wait(k_free.index(slot), parity ^ 1)
        mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
        load_tile(k_desc, keys, k_ready.index(slot), k_ring.index(slot))
        mbarrier.wait(v_free.index(slot), parity ^ 1)
        mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
        load_tile(v_desc, keys, v_ready.index(slot), v_ring.index(slot))
        slot, parity = next_slot(slot, parity, T.stages)


@gluon.jit
def _row_stats(stats_ptr, row, entry, head, size, T: gl.constexpr):
    """lse and delta of this consumer's queries."""
    n_q, _n_k, _heads, _group = size
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, T.scores_layout))
    first, _blocks = stat_blocks(entry, head, size, gl.int64, T)
    block = first + row // T.stat_rows
    at = stats_ptr + block * (2 * T.stat_rows) + (rows - row // T.stat_rows * T.stat_rows)
    lse = gl.load(at, mask=rows < n_q, other=float("inf"))
    return lse, gl.load(at + T.stat_rows, mask=rows < n_q, other=0.0)


@gluon.jit
def _consume(dq_desc, stats_ptr, work, memory, bars, size, scoring, scale, mine: gl.constexpr, T: gl.constexpr):
    """Compute dq of 64 queries."""
    q_tiles, o_tiles, k_ring, v_ring = memory
    k_ready, k_free, v_ready, v_free, q_ready = bars
    n_q, n_k, _heads, _group = size
    first, head, entry = work
    row = first + mine * 64
    begin, end = _keys(first, size, scoring, T)
    lse, delta = _row_stats(stats_ptr, row, entry, head, size, T)
    q = q_tiles.index(mine)
    o = o_tiles.index(mine)

    dq = gl.full([64, T.dim], 0, gl.float32, T.acc_layout)
    zero = gl.full([64, T.keys], 0, gl.float32, T.scores_layout)
    slot = 0
    parity = 0
    before = 0
    mbarrier.wait(q_ready, 0)
    ds_16 = gl.full([64, T.keys], 0, k_ring.dtype, T.operand_layout)
    for block in range(begin, end):
        k = k_ring.index(slot)
        v = v_ring.index(slot)
        mbarrier.wait(k_ready.index(slot), parity)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot), parity)
        dp = warpgroup_mma(o, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if T.deferred:  # dq of the previous step; in the first step ds is zeros
            dq = warpgroup_mma(ds_16, k_ring.index(before), dq, is_async=True)
        s = warpgroup_mma_wait(gl.constexpr(1 + T.deferred), (s,))
        p, slope = probabilities(s, lse[:, None], block * T.keys, row + n_k - n_q, n_k, scoring, 1, T)
        dp = warpgroup_mma_wait(gl.constexpr(0 + T.deferred), (dp,))
        mbarrier.arrive(v_free.index(slot), count=1)
        ds = scores_gradient(p, slope, dp, delta[:, None], k.dtype, T)
        if T.deferred:
            dq = warpgroup_mma_wait(0, (dq,))
            if block > begin:
                mbarrier.arrive(k_free.index(before), count=1)
            ds_16 = gl.convert_layout(ds, T.operand_layout)
        else:
            dq = warpgroup_mma(gl.convert_layout(ds, T.operand_layout), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, (dq,))
            mbarrier.arrive(k_free.index(slot), count=1)
        before = slot
        slot, parity = next_slot(slot, parity, T.stages)
    if T.deferred:  # noqa: SIM102  # the one is known when it is compiled
        if end > begin:
            dq = warpgroup_mma_wait(0, (warpgroup_mma(ds_16, k_ring.index(before), dq, is_async=True),))
    write(dq * scale, q, dq_desc, rows_at(entry, 0, head, row, T))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["heads", "kv_heads", "n_q", "n_k", "batch_heads", "together", "left", "right", "sequences"],
    do_not_specialize_on_alignment=["starts_ptr"],
)
def queries_gradient(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    dq_desc,
    stats_ptr,
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
    """dq. batch_heads are batch x heads. With packed sequences n_q and n_k are those of all together."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared_layout)
    o_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, T.dim], T.shared_layout)
    k_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.keys, T.dim], T.shared_layout)
    v_ring = gl.allocate_shared_memory(DTYPE, [T.stages, T.keys, T.dim], T.shared_layout)
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
    fence_async_shared()  # makes the initialized barriers visible to TMA

    if T.packed:
        head, slot = rasterize(gl.program_id(0), together, batch_heads, n_q // T.rows + sequences)
        size = (n_q, n_k, heads, heads // kv_heads)
        block, entry, size = find_work(slot, starts_ptr, size, sequences, 0, T)
        if T.has_right:
            its_queries, _its_keys, _heads, _group = size
            block = gl.maximum(gl.cdiv(its_queries, gl.constexpr(T.rows)) - 1 - block, 0)
        work = (block * T.rows, head, entry)
    else:
        blocks = gl.cdiv(n_q, gl.constexpr(T.rows))
        batch_head, block = rasterize(gl.program_id(0), together, batch_heads, blocks)
        if T.has_right:  # the last queries see the most keys
            block = blocks - 1 - block
        work = (block * T.rows, batch_head % heads, batch_head // heads)
        size = (n_q, n_k, heads, heads // kv_heads)
    scoring = (factor, cap, left, right)
    bars = (k_ready, k_free, v_ready, v_free, q_ready)
    memory = (q_tiles, o_tiles, k_ring, v_ring)
    gl.warp_specialize(
        [
            (_consume, (dq_desc, stats_ptr, work, memory, bars, size, scoring, scale, 0, T)),
            (_consume, (dq_desc, stats_ptr, work, memory, bars, size, scoring, scale, 1, T)),
            (_produce, (q_desc, k_desc, v_desc, o_desc, work, memory, bars, size, scoring, T)),
        ],
        [4, 1],
        [240, 24],
    )


@functools.cache
def tiling(dim: int, masked: bool, s: Scoring, stages: int, factor: float = 0.0, packed: bool = False) -> QueriesTiling:
    """What the kernel of dq is compiled for, for that padded head_dim.

    Heads of 128 take 64 keys a step and `deferred`: 764 TF/s on an H200, counting the three GEMMs. With 128 keys the
    registers hold no second step: 724. Heads of 64 take 128 keys; with `deferred`, ptxas serializes their wgmma.
    """
    keys = 64 if dim == 128 else 128
    return QueriesTiling(dim, *s.flags, masked, ROWS[dim], factor, packed, keys, stages * (128 // keys), keys == 64)


@functools.cache
def _launcher(t: QueriesTiling, dtype: torch.dtype) -> KernelLauncher:
    return KernelLauncher(queries_gradient, {"T": t}, num_warps=4, maxnreg=REGISTERS)


def prepare_dq(t: QueriesTiling, x: Inputs, dout: Tensor, dq: Tensor) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `q, k, v, dout, dq, stats, starts`."""
    batch, heads, n_q, _ = x.q.shape
    kv_heads, n_k = x.k.shape[1:3]
    batch_heads, group = batch * heads, heads // kv_heads
    descriptors = by_place(
        queries_gradient,
        q_desc=describe_rows(x.q, 64, t.packed),
        k_desc=describe_rows(x.k, t.keys, t.packed),
        v_desc=describe_rows(x.v, t.keys, t.packed),
        o_desc=describe_rows(dout, 64, t.packed),
        dq_desc=describe_rows(dq, 64, t.packed),
    )
    blocks = block_slots(n_q, t.rows, x.sequences) if t.packed else library.cdiv(n_q, t.rows)
    programs = runtime.target(x.q.device).multiprocessors
    together = min(batch_heads, group * heads_together(batch_heads, x.longest_k * t.dim * 4, group * blocks, programs))
    return bind(
        _launcher(t, x.q.dtype),
        batch_heads * blocks,
        numbers=(heads, kv_heads, n_q, n_k, batch_heads, together, *scoring_numbers(x.scoring), x.sequences),
        descriptors=descriptors,
    )
