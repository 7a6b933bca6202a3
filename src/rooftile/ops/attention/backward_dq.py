"""The portable backward: dq, in a kernel that walks over the keys.

    dq = scale * ds @ k

A program has a block of queries of one head, and accumulates its dq in registers, float32.
"""

from __future__ import annotations

from rooftile.ops.attention.backward_parts import (
    add_dots,
    dot,
    load,
    load_lse,
    probabilities,
    store,
    uncapped_gradient,
    zeros,
)
from rooftile.ops.attention.parts import end_key, first_key, rasterize, sequence_range
from rooftile.primitives.scores import LOG2E

import triton  # isort: skip
import triton.language as tl  # isort: skip


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
    none, _ = zeros(T.rows, T.cols, 0)
    for i in tl.range(0, steps, num_stages=T.stages):
        first = (begin + i + tl.where(i < before, 0, skip)) * T.cols
        cols = first + col
        at = first.to(tl.int64)
        inside = cols[:, None] < n_k
        k_a, k_b = load(
            k_ptr + at * stride_kt, col[:, None], inside, stride_kt,
            T.head_dim, T.head_parts[0], T.head_parts[1], TAIL,
        )  # fmt: skip
        products = dot(q_a, q_b, k_a, k_b, none, T.head_parts[1])
        p, scores = probabilities(
            products, lse[:, None], rows, cols[None, :], n_k - n_q, n_q, n_k, mask_ptr, stride_mq, stride_mk, slope,
            scoring, MASKED, T,
        )  # fmt: skip
        v_a, v_b = load(
            v_ptr + at * stride_vt, col[:, None], inside, stride_vt,
            T.value_dim, T.value_parts[0], T.value_parts[1], TAIL,
        )  # fmt: skip
        dp = dot(dout_a, dout_b, v_a, v_b, none - delta[:, None], T.value_parts[1])  # less delta
        ds = uncapped_gradient(p * dp, scores, scoring[1], T.capped)
        dq_a, dq_b = add_dots(dq_a, dq_b, ds, k_a, k_b, T.head_parts[1])
    return dq_a, dq_b


@triton.jit(
    do_not_specialize=["n_q", "n_k", "heads", "group", "n_batch_heads", "n_blocks", "together", "left", "right"]
)
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
    n_batch_heads,
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
    batch_head, block = rasterize(tl.program_id(0), together, n_batch_heads, n_blocks)
    if T.has_right:  # the last queries see the most keys
        block = n_blocks - 1 - block
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // group
    batch = (batch_head // heads).to(tl.int64)
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
    q = load(q_ptr, rows, inside, stride_qt, T.head_dim, T.head_parts[0], T.head_parts[1], True)
    dout = load(dout_ptr, rows, inside, stride_gt, T.value_dim, T.value_parts[0], T.value_parts[1], True)
    lse = load_lse(lse_ptr + rows_at, row, n_q)
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

    dq_a, dq_b = zeros(T.rows, T.head_parts[0], T.head_parts[1])
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
    store(dq_ptr, dq_a * scale, dq_b * scale, rows, inside, stride_dqt, T.head_dim, T.head_parts[0], T.head_parts[1])
