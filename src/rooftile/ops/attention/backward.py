"""The portable backward: one kernel for dk and dv, which walks the queries, and one for dq, which walks the keys.

With s the scores (scaled, capped, biased), p = exp(s - lse) and ds = p * (dout·v - delta):

    dv = pᵀ @ dout,   dk = scale * dsᵀ @ q,   dq = scale * ds @ k

A program owns a block of keys of one KV head, or of queries of one head, and sums in registers in a fixed order: no
atomics, so a second run gives the same bits. Both kernels compute p again from q, k and the log-sum-exp. The dk and dv
kernel has its scores transposed, keys by queries: pᵀ and dsᵀ then leave the tensor cores as they enter the next dot.

Bytes: q, k, v, out, dout and the log-sum-exp are read; dq, dk and dv are written; delta (`row_sums`), a float32 a row,
is written and read. Seven dots for each pair of a query and a key, where the forward has two: both kernels compute the
scores and dp, so that neither waits for the other. Only the gradients that are asked for are computed.

A head's dimension is held in one or two blocks, powers of two: 80 as 64 + 16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.attention import row_sums
from rooftile.ops.attention.parts import (
    end_key,
    first_key,
    has_unit_rows,
    is_seen,
    load_rows,
    place,
    sequence_range,
    store_rows,
)
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem
from rooftile.primitives.scores import LOG2E, capped_scores, split_dim

import triton  # isort: skip
import triton.language as tl  # isort: skip

_SMEM_OPERANDS = ("sm_90", "sm_100")  # their tensor cores read operands from shared memory, with a buffer a stage


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """All that a kernel is compiled for but dtypes and strides: its one constant, T.

    Attributes:
        rows, cols: queries and keys of a tile.
        head_dim, head_parts, value_dim, value_parts: a dimension and its blocks, as `split_dim` gives them.
        capped, has_left, has_right: see `Scoring.flags`.
        shared: query heads share KV heads; how many is an argument.
        alibi: dimensions of the slopes: 0 for none, 1 by head, 2 by sequence and head.
        even: the sequence is a whole number of steps.
        wanted: which gradients: "dq", "dk", "dv" or "dkdv".
    """

    rows: int
    cols: int
    stages: int
    head_dim: int
    head_parts: tuple[int, int]
    value_dim: int
    value_parts: tuple[int, int]
    shared: bool
    capped: bool
    has_left: bool
    has_right: bool
    mask: str
    alibi: int
    packed: bool
    even: bool
    wanted: str

    @property
    def limited(self) -> bool:
        return self.has_left or self.has_right


@triton.jit
def _load(ptr, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr):
    """Both parts of rows (R, 1); without a second part, the first one twice."""
    a = load_rows(ptr, rows, inside, stride, N, 0, A, MASKED)
    b = a
    if B > 0:
        b = load_rows(ptr, rows, inside, stride, N, A, B, MASKED)
    return a, b


@triton.jit
def _zeros(R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Two accumulators; without a second part, the second one is a column that is not used."""
    return tl.zeros((R, A), tl.float32), tl.zeros((R, B if B > 0 else 1), tl.float32)


@triton.jit
def _store(ptr, a, b, rows, inside, stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Store both parts to rows (R, 1)."""
    store_rows(ptr, a, rows, inside, stride, N, 0, A)
    if B > 0:
        store_rows(ptr, b, rows, inside, stride, N, A, B)


@triton.jit
def _dot(a, b, x, y, acc, B: tl.constexpr):
    """acc + (a, b) @ (x, y)ᵀ, summed over both parts."""
    acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    if B > 0:
        acc = tl.dot(b, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def _add_dots(a, b, left, x, y, B: tl.constexpr):
    """(a, b) + left @ (x, y)."""
    left = left.to(x.dtype)
    a = tl.dot(left, x, a, input_precision="ieee")
    if B > 0:
        b = tl.dot(left, y, b, input_precision="ieee")
    return a, b


@triton.jit
def _load_lse(lse_ptr, row, n_q):
    """lse times log2(e); +inf, which makes p 0, for rows that see nothing (-inf) or don't exist."""
    lse = tl.load(lse_ptr + row, mask=row < n_q, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def _probabilities(
    products,
    lse,
    rows,
    cols,
    offset,
    n_q,
    n_k,
    mask_ptr,
    stride_mq,
    stride_mk,
    slope,
    scoring,
    MASKED: tl.constexpr,
    T: tl.constexpr,
):
    """p of q·k, and the scores before biases; rows and cols broadcast to the tile, transposed or not."""
    factor, cap, left, right = scoring
    scores = capped_scores(products, factor, cap, T.capped)
    biased = scores
    if T.alibi:
        biased -= tl.abs(rows + offset - cols).to(tl.float32) * slope
    if T.mask != "":
        there = (rows < n_q) & (cols < n_k)
        at = mask_ptr + rows.to(tl.int64) * stride_mq + cols.to(tl.int64) * stride_mk
        mask = tl.load(at, mask=there, other=0.0)
    if T.mask == "float":
        biased += mask.to(tl.float32) * LOG2E
    p = tl.exp2(biased - lse)
    if MASKED:
        visible = is_seen(rows + offset, cols, n_k, left, right, T.has_left, T.has_right)
        if T.mask == "bool":
            visible &= mask != 0
        p = tl.where(visible, p, 0.0)
    return p, scores


@triton.jit
def _uncapped_gradient(ds, scores, cap, CAPPED: tl.constexpr):
    """The gradient of q·k, but for `scale`: ds is that of the scores, `scores` as `capped_scores` gave them."""
    if CAPPED:
        t = scores * (1.0 / cap)
        return ds * (1.0 - t * t)
    else:
        return ds


@triton.jit
def _walk_queries(
    dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, cols, walk, group,
    n_q, n_k, total_q, scoring, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk,
    MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the queries of some steps to dk and dv: from `begin` on, with `skip` steps left out after `before` steps.

    One loop goes over the steps of all query heads: loops in a loop would take registers that the sums need.
    """
    begin, steps, before, skip = walk
    k_a, k_b = k
    v_a, v_b = v
    row = tl.arange(0, T.rows)
    none, _ = _zeros(T.cols, T.rows, 0)
    for i in tl.range(0, steps * group if T.shared else steps, num_stages=T.stages):
        q_at = q_ptr
        dout_at = dout_ptr
        lse_at = lse_ptr
        delta_at = delta_ptr
        mask_at = mask_ptr
        slope = 0.0
        if T.shared:
            head = (i // steps).to(tl.int64)
            i = i % steps
            q_at += head * stride_qh
            dout_at += head * stride_gh
            lse_at += head * total_q
            delta_at += head * total_q
            if T.mask != "":
                mask_at += head * stride_mh
        if T.alibi:
            slope = tl.load(slopes_ptr + head if T.shared else slopes_ptr).to(tl.float32) * LOG2E

        first = (begin + i + tl.where(i < before, 0, skip)) * T.rows
        rows = first + row
        at = first.to(tl.int64)
        inside = rows[:, None] < n_q
        q_a, q_b = _load(
            q_at + at * stride_qt, row[:, None], inside, stride_qt,
            T.head_dim, T.head_parts[0], T.head_parts[1], not T.even,
        )  # fmt: skip
        lse = _load_lse(lse_at, rows, n_q)
        products = _dot(k_a, k_b, q_a, q_b, none, T.head_parts[1])
        p, scores = _probabilities(
            products, lse[None, :], rows[None, :], cols, n_k - n_q, n_q, n_k, mask_at, stride_mq, stride_mk, slope,
            scoring, MASKED, T,
        )  # fmt: skip
        dout_a, dout_b = _load(
            dout_at + at * stride_gt, row[:, None], inside, stride_gt,
            T.value_dim, T.value_parts[0], T.value_parts[1], not T.even,
        )  # fmt: skip
        if T.wanted != "dk":
            dv_a, dv_b = _add_dots(dv_a, dv_b, p, dout_a, dout_b, T.value_parts[1])
        if T.wanted != "dv":
            delta = tl.load(delta_at + rows, mask=rows < n_q, other=0.0)
            dp = _dot(v_a, v_b, dout_a, dout_b, none - delta[None, :], T.value_parts[1])  # less delta
            ds = _uncapped_gradient(p * dp, scores, scoring[1], T.capped)
            dk_a, dk_b = _add_dots(dk_a, dk_b, ds, q_a, q_b, T.head_parts[1])
    return dk_a, dk_b, dv_a, dv_b


@triton.jit(do_not_specialize=["n_q", "n_k", "kv_heads", "group", "n_lanes", "n_blocks", "together", "left", "right"])
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    mask_ptr,
    slopes_ptr,
    starts_q_ptr,
    starts_k_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    stride_dvb,
    stride_dvh,
    stride_dvt,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    n_q,
    n_k,
    kv_heads,
    group,
    n_lanes,
    n_blocks,
    together,
    scale,
    factor,
    cap,
    left,
    right,
    T: tl.constexpr,
):
    """dk and dv of one block of keys. n_q and n_k are those of the tensors: of all packed sequences together."""
    scoring = (factor, cap, left, right)
    lane, block = place(tl.program_id(0), together, n_lanes, n_blocks)
    kv_head = (lane % kv_heads).to(tl.int64)
    batch = (lane // kv_heads).to(tl.int64)
    total_q = n_q  # a head's rows of lse and delta
    first_row = batch * (kv_heads * group) * n_q
    if T.alibi == 2:
        slopes_ptr += batch * (kv_heads * group)
    start_k = batch * 0
    if T.packed:
        start_q, n_q = sequence_range(starts_q_ptr, batch, n_q)
        start_k, n_k = sequence_range(starts_k_ptr, batch, n_k)
        start_k = start_k.to(tl.int64)
        first_row = start_q.to(tl.int64)
        q_ptr += first_row * stride_qt
        dout_ptr += first_row * stride_gt
        k_ptr += start_k * stride_kt
        v_ptr += start_k * stride_vt
        batch = batch * 0

    first = block * T.cols
    keys = (first + tl.arange(0, T.cols))[:, None]
    inside = keys < n_k
    head = kv_head * group  # the first of those that share it
    q_ptr += batch * stride_qb + head * stride_qh
    dout_ptr += batch * stride_gb + head * stride_gh
    lse_ptr += first_row + head * total_q
    delta_ptr += first_row + head * total_q
    if T.mask != "":
        mask_ptr += batch * stride_mb + head * stride_mh
    if T.alibi:
        slopes_ptr += head
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    k = _load(k_ptr, keys, inside, stride_kt, T.head_dim, T.head_parts[0], T.head_parts[1], True)
    v = _load(v_ptr, keys, inside, stride_vt, T.value_dim, T.value_parts[0], T.value_parts[1], True)

    # The steps from begin to end see some of these keys; those from full to full_end see all of them.
    last = tl.minimum(first + T.cols, n_k) - 1
    offset = n_k - n_q
    begin = 0
    full = 0
    end = tl.cdiv(n_q, T.rows)
    if T.has_right:
        begin = tl.maximum(first - right - offset, 0) // T.rows
        full = tl.cdiv(tl.maximum(last - right - offset, 0), T.rows)
    if T.has_left:
        end = tl.cdiv(tl.minimum(tl.maximum(last + left - offset + 1, 0), n_q), T.rows)
    end = tl.where(first < n_k, tl.maximum(end, begin), begin)
    full = tl.minimum(full, end)
    full_end = end
    if T.has_left:
        full_end = tl.minimum(tl.maximum(tl.maximum(first + left - offset + 1, 0) // T.rows, full), end)
    if T.mask != "":
        full = end
        full_end = end

    dk_a, dk_b = _zeros(T.cols, T.head_parts[0], T.head_parts[1])
    dv_a, dv_b = _zeros(T.cols, T.value_parts[0], T.value_parts[1])
    if T.limited or T.mask != "":
        walk = (begin, full - begin + end - full_end, full - begin, full_end - full)
        dk_a, dk_b, dv_a, dv_b = _walk_queries(
            dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, keys, walk, group,
            n_q, n_k, total_q, scoring, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk,
            True, T,
        )  # fmt: skip
    if T.mask == "":
        walk = (full, full_end - full, 0, 0)
        dk_a, dk_b, dv_a, dv_b = _walk_queries(
            dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, keys, walk, group,
            n_q, n_k, total_q, scoring, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk,
            False, T,
        )  # fmt: skip

    if T.wanted != "dv":
        dk_ptr += batch * stride_dkb + kv_head * stride_dkh + start_k * stride_dkt
        _store(
            dk_ptr, dk_a * scale, dk_b * scale, keys, inside, stride_dkt,
            T.head_dim, T.head_parts[0], T.head_parts[1],
        )  # fmt: skip
    if T.wanted != "dk":
        dv_ptr += batch * stride_dvb + kv_head * stride_dvh + start_k * stride_dvt
        _store(dv_ptr, dv_a, dv_b, keys, inside, stride_dvt, T.value_dim, T.value_parts[0], T.value_parts[1])


@triton.jit
def _walk_keys(
    dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k, scoring,
    stride_kt, stride_vt, stride_mq, stride_mk, MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the keys of some steps to dq: from `begin` on, with `skip` steps left out after `before` steps."""
    begin, steps, before, skip = walk
    q_a, q_b = q
    dout_a, dout_b = dout
    TAIL: tl.constexpr = MASKED and not T.even
    col = tl.arange(0, T.cols)
    none, _ = _zeros(T.rows, T.cols, 0)
    for i in tl.range(0, steps, num_stages=T.stages):
        first = (begin + i + tl.where(i < before, 0, skip)) * T.cols
        cols = first + col
        at = first.to(tl.int64)
        inside = cols[:, None] < n_k
        k_a, k_b = _load(
            k_ptr + at * stride_kt, col[:, None], inside, stride_kt,
            T.head_dim, T.head_parts[0], T.head_parts[1], TAIL,
        )  # fmt: skip
        products = _dot(q_a, q_b, k_a, k_b, none, T.head_parts[1])
        p, scores = _probabilities(
            products, lse[:, None], rows, cols[None, :], n_k - n_q, n_q, n_k, mask_ptr, stride_mq, stride_mk, slope,
            scoring, MASKED, T,
        )  # fmt: skip
        v_a, v_b = _load(
            v_ptr + at * stride_vt, col[:, None], inside, stride_vt,
            T.value_dim, T.value_parts[0], T.value_parts[1], TAIL,
        )  # fmt: skip
        dp = _dot(dout_a, dout_b, v_a, v_b, none - delta[:, None], T.value_parts[1])  # less delta
        ds = _uncapped_gradient(p * dp, scores, scoring[1], T.capped)
        dq_a, dq_b = _add_dots(dq_a, dq_b, ds, k_a, k_b, T.head_parts[1])
    return dq_a, dq_b


@triton.jit(do_not_specialize=["n_q", "n_k", "heads", "group", "n_lanes", "n_blocks", "together", "left", "right"])
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    mask_ptr,
    slopes_ptr,
    starts_q_ptr,
    starts_k_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    n_q,
    n_k,
    heads,
    group,
    n_lanes,
    n_blocks,
    together,
    scale,
    factor,
    cap,
    left,
    right,
    T: tl.constexpr,
):
    """dq of one block of queries."""
    scoring = (factor, cap, left, right)
    lane, block = place(tl.program_id(0), together, n_lanes, n_blocks)
    if T.has_right:  # the last queries see the most keys
        block = n_blocks - 1 - block
    head = (lane % heads).to(tl.int64)
    kv_head = head // group
    batch = (lane // heads).to(tl.int64)
    if T.alibi == 2:
        slopes_ptr += batch * heads
    rows_at = head * n_q  # of lse and delta
    start_q = batch * 0
    if T.packed:
        start_q, n_q = sequence_range(starts_q_ptr, batch, n_q)
        start_k, n_k = sequence_range(starts_k_ptr, batch, n_k)
        start_q = start_q.to(tl.int64)
        start_k = start_k.to(tl.int64)
        rows_at += start_q
        q_ptr += start_q * stride_qt
        dout_ptr += start_q * stride_gt
        k_ptr += start_k * stride_kt
        v_ptr += start_k * stride_vt
        batch = batch * 0
    else:
        rows_at += batch * heads * n_q

    first = block * T.rows
    row = first + tl.arange(0, T.rows)
    rows = row[:, None]
    inside = rows < n_q
    q_ptr += batch * stride_qb + head * stride_qh
    dout_ptr += batch * stride_gb + head * stride_gh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    q = _load(q_ptr, rows, inside, stride_qt, T.head_dim, T.head_parts[0], T.head_parts[1], True)
    dout = _load(dout_ptr, rows, inside, stride_gt, T.value_dim, T.value_parts[0], T.value_parts[1], True)
    lse = _load_lse(lse_ptr + rows_at, row, n_q)
    delta = tl.load(delta_ptr + rows_at + row, mask=row < n_q, other=0.0)
    slope = 0.0
    if T.alibi:
        slope = tl.load(slopes_ptr + head).to(tl.float32) * LOG2E
    if T.mask != "":
        mask_ptr += batch * stride_mb + head * stride_mh

    # The steps from begin to end are seen by some of these queries; those from full to full_end by all of them.
    offset = n_k - n_q
    p_first = first + offset
    p_last = tl.minimum(first + T.rows, n_q) - 1 + offset
    begin = first_key(p_first, left, T.has_left) // T.cols
    full = begin
    if T.has_left:
        full = tl.cdiv(first_key(p_last, left, T.has_left), T.cols)
    end = tl.maximum(tl.cdiv(end_key(p_last, n_k, right, T.has_right), T.cols), begin)
    end = tl.where(first < n_q, end, begin)
    full = tl.minimum(full, end)
    full_end = tl.minimum(tl.maximum(end_key(p_first, n_k, right, T.has_right) // T.cols, full), end)
    if T.mask != "":
        full = end
        full_end = end

    dq_a, dq_b = _zeros(T.rows, T.head_parts[0], T.head_parts[1])
    if T.mask == "":
        walk = (full, full_end - full, 0, 0)
        dq_a, dq_b = _walk_keys(
            dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k, scoring,
            stride_kt, stride_vt, stride_mq, stride_mk, False, T,
        )  # fmt: skip
    if T.limited or T.mask != "" or not T.even:
        walk = (begin, full - begin + end - full_end, full - begin, full_end - full)
        dq_a, dq_b = _walk_keys(
            dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k, scoring,
            stride_kt, stride_vt, stride_mq, stride_mk, True, T,
        )  # fmt: skip

    dq_ptr += batch * stride_dqb + head * stride_dqh + start_q * stride_dqt
    _store(dq_ptr, dq_a * scale, dq_b * scale, rows, inside, stride_dqt, T.head_dim, T.head_parts[0], T.head_parts[1])


@dataclasses.dataclass(frozen=True)
class BackwardConfig(AttentionConfig):
    """How both kernels of the portable backward are launched.

    Args:
        block_m, block_n, num_warps, num_stages: of the dk and dv kernel, whose programs own block_n keys and walk over
            queries in steps of block_m.
        dq_block_m, dq_block_n, dq_num_warps, dq_num_stages: of the dq kernel, whose programs own dq_block_m queries and
            walk over keys in steps of dq_block_n.
    """

    dq_block_m: int = 64
    dq_block_n: int = 64
    dq_num_warps: int = 4
    dq_num_stages: int = 2

    def __post_init__(self) -> None:
        for c in (self.dkdv, self.dq):
            assert c.kernel == self.kernel

    @property
    def dkdv(self) -> AttentionConfig:
        return AttentionConfig(self.kernel, self.block_m, self.block_n, self.num_warps, self.num_stages)

    @property
    def dq(self) -> AttentionConfig:
        return AttentionConfig(self.kernel, self.dq_block_m, self.dq_block_n, self.dq_num_warps, self.dq_num_stages)


def both(c: AttentionConfig) -> BackwardConfig:
    """One tile for both kernels: that of dq owns block_n queries, and walks in steps of block_m keys."""
    if isinstance(c, BackwardConfig):
        return c
    return BackwardConfig(
        c.kernel, c.block_m, c.block_n, c.num_warps, c.num_stages, c.block_n, c.block_m, c.num_warps, c.num_stages
    )


accepts = has_unit_rows


def _shared(owned: int, step: int, stages: int, dims: int, itemsize: int, target: runtime.Target) -> int:
    """About the bytes of shared memory of a program: the tile that it owns, the loads in its pipeline, and p or ds."""
    buffers = stages if target.arch in _SMEM_OPERANDS else max(1, stages - 1)
    if target.warp_size == 64:  # AMD's matrix cores take operands from registers
        return dims * itemsize * buffers * step
    return dims * itemsize * (owned + buffers * step) + owned * step * itemsize


def _dims(p: Problem) -> int:
    return sum(split_dim(p.head_dim)) + sum(split_dim(p.value_dim))


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where these kernels can run that problem in that configuration, or the reason why they can't."""
    if c.kernel != "portable":
        return f"kernel is {c.kernel!r}, expected 'portable'"
    c = both(c)
    for name, tile, owned, step in (
        ("dk and dv", c.dkdv, c.block_n, c.block_m),
        ("dq", c.dq, c.dq_block_m, c.dq_block_n),
    ):
        if min(owned, step) < 16:
            return f"the tile of {name} is {tile.block_m}x{tile.block_n}, expected 16 of each at least"
        if tile.num_warps * target.warp_size > target.max_threads:
            return f"num_warps of {name} is {tile.num_warps}, expected {target.max_threads // target.warp_size} at most"
        need = _shared(owned, step, tile.num_stages, _dims(p), p.dtype.itemsize, target)
        if need > target.shared_memory:
            return (
                f"the tile of {name} needs {need} bytes of shared memory, and {target.arch} has {target.shared_memory}"
            )
    return None


def default_config(p: Problem, target: runtime.Target) -> BackwardConfig:
    """The first of the preferred tiles that fit."""
    for c in _candidates(p, target):
        if can_implement(p, c, target) is None:
            return c
    return both(AttentionConfig("portable", 16, 16, 4, 1))


def _candidates(p: Problem, target: runtime.Target) -> Iterator[BackwardConfig]:
    if target is runtime.INTERPRETER:  # a program costs by its operations, not by their size
        yield both(AttentionConfig("portable", 64, 64, 4, 1))
        return
    dim = max(sum(split_dim(p.head_dim)), sum(split_dim(p.value_dim)))
    warps = 8 * 32 // target.warp_size
    if p.dtype == torch.float32:  # on the FMA units, whose operands are in registers
        if dim <= 128:
            yield BackwardConfig("portable", 32, 32, warps, 1, 32 if dim <= 96 else 16, 32, warps, 1)
        yield BackwardConfig("portable", 16, 32, warps, 1, 16, 16, warps // 2, 1)
        return
    plain = not (p.mask or p.alibi or p.scoring.softcap)  # the others need registers beside the sums
    if target.arch in _SMEM_OPERANDS:
        if dim <= 64:
            yield BackwardConfig("portable", 64, 128, 8, 2, 128, 64, 8, 2)
        elif dim <= 128:
            yield BackwardConfig("portable", 64 if plain else 32, 128, 8, 2, 128, 64, 8, 2)
    elif target.warp_size == 32 and dim <= 128:
        steps = 64 if dim <= 64 else 32
        if split_dim(p.head_dim)[1] or split_dim(p.value_dim)[1]:
            yield BackwardConfig("portable", 32, 64, 8, 1, 64, 32, 4, 1)
        elif dim <= 64 or not plain:
            yield BackwardConfig("portable", 32, 64, 4, 2, 128, steps, 8, 2)
        yield BackwardConfig("portable", 64, 64, 8, 2, 128, 32, 8, 2)
    if target.warp_size == 32:
        yield both(AttentionConfig("portable", 64 if dim <= 128 or p.value_dim <= 128 else 32, 64, 8, 2))
        yield both(AttentionConfig("portable", 32, 64, 8, 2))
    yield both(AttentionConfig("portable", 32, 32, 4, 1))
    yield both(AttentionConfig("portable", 16, 32, 4, 1))


@functools.cache
def _launcher(tiling: _Tiling, num_warps: int, dtypes: tuple[torch.dtype | None, ...]) -> KernelLauncher:
    kernel = dq_kernel if tiling.wanted == "dq" else dkdv_kernel
    return KernelLauncher(kernel, {"T": tiling}, newest_assembler=True, num_warps=num_warps)


def _together(lane_bytes: int, lanes: int, target: runtime.Target) -> int:
    """Lanes whose blocks take turns: as many as leave half of the L2 free."""
    return max(1, min(lanes, target.l2 // 2 // max(1, lane_bytes)))


def _tiling(x: Inputs, c: AttentionConfig, wanted: str) -> _Tiling:
    walked, step = (x.k.shape[2], c.block_n) if wanted == "dq" else (x.q.shape[2], c.block_m)
    head_dim, value_dim = x.q.shape[3], x.v.shape[3]
    return _Tiling(
        rows=c.block_m,
        cols=c.block_n,
        stages=c.num_stages,
        head_dim=head_dim,
        head_parts=split_dim(head_dim),
        value_dim=value_dim,
        value_parts=split_dim(value_dim),
        shared=x.q.shape[1] > x.k.shape[1],
        capped=x.scoring.flags[0],
        has_left=x.scoring.flags[1],
        has_right=x.scoring.flags[2],
        mask=x.mask_kind,
        alibi=0 if x.alibi_slopes is None else x.alibi_slopes.dim(),
        packed=x.starts_q is not None,
        even=x.starts_q is None and walked % step == 0,
        wanted=wanted,
    )


def _bound(
    x: Inputs, dout: Tensor, gradients: tuple[Tensor | None, ...], c: AttentionConfig, wanted: str
) -> Callable[..., None]:
    """The launch of one kernel: with q, k, v, dout, lse, delta, its gradients, mask, slopes and both starts."""
    heads, kv_heads = x.q.shape[1], x.k.shape[1]
    group, dims, of_queries = heads // kv_heads, x.q.shape[3] + x.v.shape[3], wanted == "dq"
    longest, block = (x.longest_q, c.block_m) if of_queries else (x.longest_k, c.block_n)
    n_heads = heads if of_queries else kv_heads
    lanes, blocks = x.sequences * n_heads, library.cdiv(longest, block)
    walked = x.longest_k * dims // group if of_queries else x.longest_q * group * dims
    together = _together(walked * x.q.element_size(), lanes, runtime.target(x.q.device))
    read = (x.q, x.k, x.v, dout, *gradients)
    strides = tuple(n for t in read for n in ((0, 0, 0) if t is None else t.stride()[:3]))
    dtypes = tuple(None if t is None else t.dtype for t in (*read, x.mask, x.alibi_slopes))
    numbers = (x.q.shape[2], x.k.shape[2], n_heads, group, lanes, blocks, together)
    return bind(
        _launcher(_tiling(x, c, wanted), c.num_warps, dtypes),
        lanes * blocks,
        strides=(*strides, *x.mask_strides),
        numbers=(*numbers, x.scoring.scale, *x.scoring.numbers),
    )


def prepare(
    x: Inputs,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gradients: tuple[Tensor | None, ...],
    c: AttentionConfig,
    deterministic: bool = True,
) -> Callable[..., None]:
    """The launches for tensors like these, to be called with `q, k, v, out, lse, dout, dlse, *gradients, *x.tensors`.

    The gradients are dq, dk, dv and dsinks; those that nobody asks for are None. All tensors are (B, H, T, D) by
    strides with a last stride of 1, but out and dlse, which may have any. lse is contiguous. Of packed sequences only
    the rows that a sequence covers are written. Gradients are always deterministic.
    """
    dq, dk, dv, dsinks = gradients
    wants_dq = dq is not None and dq.numel() > 0
    wants_dk, wants_dv = (t is not None and t.numel() > 0 for t in (dk, dv))
    if not (wants_dq or wants_dk or wants_dv or dsinks is not None):
        return library.start_nothing
    c = both(c)
    sums = row_sums.prepare_delta(out, dout, dlse, x.sinks, dsinks)
    make_dkdv: Any = None
    if wants_dk or wants_dv:
        wanted = "dkdv" if wants_dk and wants_dv else "dk" if wants_dk else "dv"
        make_dkdv = _bound(x, dout, (dk, dv), c.dkdv, wanted)
    make_dq = _bound(x, dout, (dq,), c.dq, "dq") if wants_dq else None

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *rest: Any
    ) -> None:
        dq, dk, dv, dsinks, mask, slopes, sinks, starts_q, starts_k = rest
        delta = torch.empty_like(lse)
        sums(out, dout, dlse, delta, lse, sinks, dsinks)
        if make_dkdv is not None:
            make_dkdv(q, k, v, dout, lse, delta, dk, dv, mask, slopes, starts_q, starts_k)
        if make_dq is not None:
            make_dq(q, k, v, dout, lse, delta, dq, mask, slopes, starts_q, starts_k)

    return run
