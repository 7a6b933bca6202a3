"""The two warpgroups of the latent cache's kernel for sm_90, of 64 query rows (`hopper_latent`).

    score       s = q k^T of a block, p = softmax of s, and columns 0 to 255 of the output
    accumulate  columns 256 to 511 of the output

The GEMMs of a block of 64 keys take 2176 clocks: with so many rows the kernel is bound by the tensor cores, not by
memory. The rows' outputs, 64 x 512, fill the registers of two warpgroups, and the queries and two blocks of keys fill
shared memory. So scores cannot be computed a block ahead, and what matters is that the copies of a block have the time
of a whole block to land.

The next block's q k^T is issued right behind a block's p v. During the softmax the tensor cores have nothing to do but
the rest of the second warpgroup's p v. (FlashMLA gives each warpgroup the scores of every other block. Then the softmax
of one overlaps GEMMs of the other, but copies have half the time.)

`score` writes a block's p over the last 64 columns of its keys, which only q k^T reads, once all of its warps have read
them. So p is in the same slot as the values that `accumulate` multiplies it by.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.decode_attention.hopper_latent_parts import HALF, KEYS, SLOTS, receive, write
from rooftile.primitives.gluon import next_slot
from rooftile.primitives.warpgroup_softmax import INITIAL_MAX, mask_scores, softmax_step

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))  # a block of scores
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))  # a half of the output
_P = gl.constexpr(gl.DotOperandLayout(0, _ACC.value, 2))  # p of a block as the first operand of p v, in registers


@gluon.jit
def _start_scores(q_tiles, k_tiles, ready, slot, parity, T: gl.constexpr):
    """Issue q k^T of the left columns of queries and keys."""
    none = gl.full([T.rows, T.keys], 0, gl.float32, _SCORES)
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
    keys = block * T.keys + gl.arange(0, T.keys, layout=gl.SliceLayout(0, _SCORES))
    end = gl.full([T.rows], n_keys, gl.int32, gl.SliceLayout(1, _SCORES))
    if T.causal:
        rows = tile * T.rows + gl.arange(0, T.rows, layout=gl.SliceLayout(1, _SCORES))
        end = gl.minimum(n_keys - n_new + rows // T.group + 1, end)
    return mask_scores(s, keys, None, end)


@gluon.jit
def _softmax(s, row_max, row_sum, block, high, work, scale, p_tiles, stats, p_ready, slot, tile, T: gl.constexpr):
    """p of a block as an operand, here and for `accumulate`; alpha; the new row_max and row_sum."""
    n_keys, n_new = work
    if (block + 1) * T.keys > n_keys - (n_new - 1):
        s = _mask(s, block, n_keys, n_new, tile, T)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale)
    p = p.to(p_tiles.dtype)
    gl.thread_barrier()  # the keys that p replaces: all warps have read them
    p_tiles.index(slot).store(p)
    stats.index(slot).store(alpha)
    if block + 1 == high:
        stats.index(SLOTS + slot).store(gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout, assert_trivial=True))
    fence_async_shared()
    mbarrier.arrive(p_ready.index(slot), count=1)
    return gl.convert_layout(p, _P), alpha, row_max, row_sum


@gluon.jit
def score(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """s and p of all blocks, and the left half of the output."""
    q_tiles, q_last, k_tiles, k_last, p_tiles, stats, messages = memory
    ready, free, p_ready, q_ready, q_free, work_ready, work_free = barriers
    tile = gl.program_id(0) % T.row_tiles
    slot = 0
    parity = 0
    q_parity = 0
    box = 0
    box_parity = 0
    seq, kv_head, keys, low, high, place, count = receive(
        messages, work_ready, work_free, size[1], box, box_parity, T
    )  # fmt: skip
    while low < high:
        mbarrier.wait(q_ready.index(0), q_parity)
        q_parity ^= 1
        s = _start_scores(q_tiles, k_tiles, ready, slot, parity, T)
        s = _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity)
        if low + 1 == high:
            mbarrier.arrive(q_free.index(0), count=1)
        o = gl.full([T.rows, HALF], 0, gl.float32, _ACC)
        row_max = gl.full([T.rows], INITIAL_MAX, gl.float32, gl.SliceLayout(1, _SCORES))
        p, _alpha, row_max, row_sum = _softmax(
            s, row_max, None, low, high, keys, scale, p_tiles, stats, p_ready, slot, tile, T
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
                s, row_max, row_sum, block, high, keys, scale, p_tiles, stats, p_ready, slot, tile, T
            )  # fmt: skip
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, _ACC), assert_trivial=True)[:, None]
        o = warpgroup_mma_wait(0, (warpgroup_mma(p, k_tiles.index(2 * slot), o, is_async=True),))
        mbarrier.arrive(free.index(2 * slot), count=1)
        slot, parity = next_slot(slot, parity, 2)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, _ACC), assert_trivial=True)
        row_max = gl.convert_layout(row_max * scale, gl.SliceLayout(1, _ACC), assert_trivial=True)
        write(o, row_max, row_sum, outputs, size, seq, kv_head, keys[1], tile, place, count, 0, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip


@gluon.jit
def accumulate(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """The right half of the output."""
    _q_tiles, _q_last, k_tiles, _k_last, p_tiles, stats, messages = memory
    ready, free, p_ready, _q_ready, _q_free, work_ready, work_free = barriers
    tile = gl.program_id(0) % T.row_tiles
    slot = 0
    parity = 0
    box = 0
    box_parity = 0
    seq, kv_head, keys, low, high, place, count = receive(
        messages, work_ready, work_free, size[1], box, box_parity, T
    )  # fmt: skip
    while low < high:
        o = gl.full([T.rows, HALF], 0, gl.float32, _ACC)
        row_sum = gl.full([T.rows], 0, gl.float32, gl.SliceLayout(1, _ACC))
        for _ in range(low, high):
            mbarrier.wait(p_ready.index(slot), parity)
            alpha = stats.index(slot).load(gl.SliceLayout(1, _ACC))
            row_sum = stats.index(SLOTS + slot).load(gl.SliceLayout(1, _ACC))  # of the last block, the row's
            o = o * alpha[:, None]
            mbarrier.wait(ready.index(2 * slot + 1), parity)
            o = warpgroup_mma(p_tiles.index(slot), k_tiles.index(2 * slot + 1), o, is_async=True)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(free.index(2 * slot + 1), count=1)
            slot, parity = next_slot(slot, parity, 2)
        write(o, row_sum, row_sum, outputs, size, seq, kv_head, keys[1], tile, place, count, 1, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip
