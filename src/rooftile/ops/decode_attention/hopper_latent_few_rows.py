"""The two warpgroups of the latent cache's kernel for sm_90, of 16 or 32 query rows (`hopper_latent`).

    score       s^T = k q^T of a block, p^T = softmax of s^T, and columns 0 to 255 of the output
    accumulate  columns 256 to 511 of the output

wgmma has at least 64 rows. So keys are the rows of k q^T, columns of the output are the rows of v^T p^T, and query rows
are the columns of both: no product is of padding. The GEMMs of a block of 64 keys read 136 KB of shared memory, which
takes 1100 clocks. Its copy from memory takes some 3800, and it is that which a program is bound by. So a slot is
filled while the other is computed.

A query's maximum is over the rows of s^T, which lie in four warps: it takes shuffles and shared memory. Its sum is
needed only at the end, and each thread keeps the sums of its keys. Both GEMMs read p^T from shared memory.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.decode_attention.hopper_latent_parts import HALF, SLOTS, receive, write
from rooftile.primitives.gluon import next_slot
from rooftile.primitives.warpgroup_softmax import INITIAL_MAX

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _start_scores(q_tiles, k_tiles, ready, slot, parity, T: gl.constexpr):
    """Issue k q^T of the left columns of keys and queries."""
    none = gl.full([T.keys, T.rows], 0, gl.float32, T.transposed)
    mbarrier.wait(ready.index(2 * slot), parity)
    q = q_tiles.index(0).permute((1, 0))
    return warpgroup_mma(k_tiles.index(2 * slot), q, none, use_acc=False, is_async=True)


@gluon.jit
def _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity):
    """The scores, (keys, rows), before `scale`."""
    mbarrier.wait(ready.index(2 * slot + 1), parity)
    s = warpgroup_mma(k_tiles.index(2 * slot + 1), q_tiles.index(1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(k_last.index(slot), q_last.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, (s,))


@gluon.jit
def _mask(s, block, n_keys, n_new, T: gl.constexpr):
    """The scores of a block, -inf where a query does not see the key."""
    keys = block * T.keys + gl.arange(0, T.keys, layout=gl.SliceLayout(1, T.transposed))
    end = gl.full([T.rows], n_keys, gl.int32, gl.SliceLayout(0, T.transposed))
    if T.causal:
        rows = gl.arange(0, T.rows, layout=gl.SliceLayout(0, T.transposed))
        end = gl.minimum(n_keys - n_new + rows // T.group + 1, end)
    return gl.where(keys[:, None] < end[None, :], s, float("-inf"))


@gluon.jit
def _softmax(s, row_max, sums, block, high, work, scale, p_tiles, stats, p_ready, slot, T: gl.constexpr):
    """Write p^T and alpha of a block; alpha, and the new row_max and sums."""
    n_keys, n_new = work
    if (block + 1) * T.keys > n_keys - (n_new - 1):
        s = _mask(s, block, n_keys, n_new, T)
    new_max = gl.maximum(row_max, gl.max(s, 0))
    alpha = gl.exp2((row_max - new_max) * scale)
    p = gl.exp2(s * scale - (new_max * scale)[None, :])
    sums = sums * alpha[None, :] + p
    p_tiles.index(slot).store(p.to(p_tiles.dtype))
    stats.index(slot).store(alpha)
    if block + 1 == high:
        stats.index(SLOTS + slot).store(gl.sum(sums, 0))
    fence_async_shared()
    mbarrier.arrive(p_ready.index(slot), count=1)
    return alpha, new_max, sums


@gluon.jit
def _issue_output(o, k_tile, p_tiles, p_ready, slot, parity):
    """Issue v^T p^T of a block, once all warps have written p^T."""
    mbarrier.wait(p_ready.index(slot), parity)
    return warpgroup_mma(k_tile.permute((1, 0)), p_tiles.index(slot), o, is_async=True)


@gluon.jit
def score(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """s^T and p^T of all blocks, and the left half of the output."""
    q_tiles, q_last, k_tiles, k_last, p_tiles, stats, messages = memory
    ready, free, p_ready, q_ready, q_free, work_ready, work_free = barriers
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
        o = gl.full([HALF, T.rows], 0, gl.float32, T.transposed)
        sums = gl.full([T.keys, T.rows], 0, gl.float32, T.transposed)
        row_max = gl.full([T.rows], INITIAL_MAX, gl.float32, gl.SliceLayout(0, T.transposed))
        _alpha, row_max, sums = _softmax(
            s, row_max, sums, low, high, keys, scale, p_tiles, stats, p_ready, slot, T
        )  # fmt: skip
        for block in range(low + 1, high):
            o = _issue_output(o, k_tiles.index(2 * slot), p_tiles, p_ready, slot, parity)
            before = slot
            slot, parity = next_slot(slot, parity, 2)
            s = _start_scores(q_tiles, k_tiles, ready, slot, parity, T)
            o = warpgroup_mma_wait(1, (o,))
            mbarrier.arrive(free.index(2 * before), count=1)
            s = _finish_scores(s, q_tiles, q_last, k_tiles, k_last, ready, slot, parity)
            if block + 1 == high:
                mbarrier.arrive(q_free.index(0), count=1)
            alpha, row_max, sums = _softmax(
                s, row_max, sums, block, high, keys, scale, p_tiles, stats, p_ready, slot, T
            )  # fmt: skip
            o = o * alpha[None, :]
        o = _issue_output(o, k_tiles.index(2 * slot), p_tiles, p_ready, slot, parity)
        o = warpgroup_mma_wait(0, (o,))
        mbarrier.arrive(free.index(2 * slot), count=1)
        slot, parity = next_slot(slot, parity, 2)
        _write(o, row_max * scale, gl.sum(sums, 0), outputs, size, seq, kv_head, keys[1], place, count, 0, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip


@gluon.jit
def accumulate(outputs, memory, barriers, size, scale, T: gl.constexpr):
    """The right half of the output."""
    _q_tiles, _q_last, k_tiles, _k_last, p_tiles, stats, messages = memory
    ready, free, p_ready, _q_ready, _q_free, work_ready, work_free = barriers
    slot = 0
    parity = 0
    box = 0
    box_parity = 0
    seq, kv_head, keys, low, high, place, count = receive(
        messages, work_ready, work_free, size[1], box, box_parity, T
    )  # fmt: skip
    while low < high:
        o = gl.full([HALF, T.rows], 0, gl.float32, T.transposed)
        row_sum = gl.full([T.rows], 0, gl.float32, gl.SliceLayout(0, T.transposed))
        for _ in range(low, high):
            mbarrier.wait(p_ready.index(slot), parity)
            alpha = stats.index(slot).load(gl.SliceLayout(0, T.transposed))
            row_sum = stats.index(SLOTS + slot).load(gl.SliceLayout(0, T.transposed))  # of the last block, the row's
            o = o * alpha[None, :]
            mbarrier.wait(ready.index(2 * slot + 1), parity)
            o = _issue_output(o, k_tiles.index(2 * slot + 1), p_tiles, p_ready, slot, parity)
            o = warpgroup_mma_wait(0, (o,))
            mbarrier.arrive(free.index(2 * slot + 1), count=1)
            slot, parity = next_slot(slot, parity, 2)
        _write(o, row_sum, row_sum, outputs, size, seq, kv_head, keys[1], place, count, 1, T)
        box, box_parity = next_slot(box, box_parity, 2)
        seq, kv_head, keys, low, high, place, count = receive(
            messages, work_ready, work_free, size[1], box, box_parity, T
        )  # fmt: skip


@gluon.jit
def _write(o, row_max, row_sum, outputs, size, seq, kv_head, n_new, place, count, half: gl.constexpr, T: gl.constexpr):
    """A half of the output, given as (columns, rows)."""
    o = o.permute((1, 0))
    layout: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    write(
        o, gl.convert_layout(row_max, layout), gl.convert_layout(row_sum, layout), outputs, size, seq, kv_head, n_new,
        0, place, count, half, T,
    )  # fmt: skip
