"""The portable backward: dk and dv, in one kernel that walks over the queries.

    dv = pᵀ @ dout,   dk = scale * dsᵀ @ q

A program has a block of keys of one KV head, and walks over the queries of all query heads that share it (GQA). dk and
dv are accumulated in registers, float32. Scores are computed transposed, keys by queries: pᵀ and dsᵀ then leave one
tl.dot in the layout in which the next one takes its first operand.
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
from rooftile.ops.attention.parts import rasterize, sequence_range
from rooftile.primitives.scores import LOG2E

import triton  # isort: skip
import triton.language as tl  # isort: skip


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
    none, _ = zeros(T.cols, T.rows, 0)
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
        q_a, q_b = load(
            q_at + at * stride_qt, row[:, None], inside, stride_qt,
            T.head_dim, T.head_parts[0], T.head_parts[1], not T.even,
        )  # fmt: skip
        lse = load_lse(lse_at, rows, n_q)
        products = dot(k_a, k_b, q_a, q_b, none, T.head_parts[1])
        p, scores = probabilities(
            products, lse[None, :], rows[None, :], cols, n_k - n_q, n_q, n_k, mask_at, stride_mq, stride_mk, slope,
            scoring, MASKED, T,
        )  # fmt: skip
        dout_a, dout_b = load(
            dout_at + at * stride_gt, row[:, None], inside, stride_gt,
            T.value_dim, T.value_parts[0], T.value_parts[1], not T.even,
        )  # fmt: skip
        if T.wanted != "dk":
            dv_a, dv_b = add_dots(dv_a, dv_b, p, dout_a, dout_b, T.value_parts[1])
        if T.wanted != "dv":
            delta = tl.load(delta_at + rows, mask=rows < n_q, other=0.0)
            dp = dot(v_a, v_b, dout_a, dout_b, none - delta[None, :], T.value_parts[1])  # less delta
            ds = uncapped_gradient(p * dp, scores, scoring[1], T.capped)
            dk_a, dk_b = add_dots(dk_a, dk_b, ds, q_a, q_b, T.head_parts[1])
    return dk_a, dk_b, dv_a, dv_b


@triton.jit(
    do_not_specialize=["n_q", "n_k", "kv_heads", "group", "n_batch_heads", "n_blocks", "together", "left", "right"]
)
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
    """dk and dv of one block of keys. n_q and n_k are those of the tensors: of all packed sequences together."""
    scoring = (factor, cap, left, right)
    batch_head, block = rasterize(tl.program_id(0), together, n_batch_heads, n_blocks)
    kv_head = (batch_head % kv_heads).to(tl.int64)
    batch = (batch_head // kv_heads).to(tl.int64)
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
    k = load(k_ptr, keys, inside, stride_kt, T.head_dim, T.head_parts[0], T.head_parts[1], True)
    v = load(v_ptr, keys, inside, stride_vt, T.value_dim, T.value_parts[0], T.value_parts[1], True)

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

    dk_a, dk_b = zeros(T.cols, T.head_parts[0], T.head_parts[1])
    dv_a, dv_b = zeros(T.cols, T.value_parts[0], T.value_parts[1])
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
        store(
            dk_ptr, dk_a * scale, dk_b * scale, keys, inside, stride_dkt,
            T.head_dim, T.head_parts[0], T.head_parts[1],
        )  # fmt: skip
    if T.wanted != "dk":
        dv_ptr += batch * stride_dvb + kv_head * stride_dvh + start_k * stride_dvt
        store(dv_ptr, dv_a, dv_b, keys, inside, stride_dvt, T.value_dim, T.value_parts[0], T.value_parts[1])
