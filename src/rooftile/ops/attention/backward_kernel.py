"""The kernels of attention's backward: one for dk and dv, which walks the queries, one for dq, which walks the keys.

With s the scores (scaled, capped, biased), p = exp(s - lse) and ds = p * (dout·v - delta):

    dv = pᵀ @ dout,   dk = scale * dsᵀ @ q,   dq = scale * ds @ k

A program owns a block of keys of one KV head, or of queries of one head, and sums in registers in a fixed order: no
atomics, so a second run gives the same bits. Both compute p anew from q, k and the log-sum-exp. The dk and dv kernel
has its scores transposed, keys by queries: pᵀ and dsᵀ then leave the tensor cores as they enter the next product.

A head's dimensions are held in one or two parts, powers of two: 80 as 64 + 16.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: it fixes the mode of the process
from rooftile.ops.attention.backward_parts import (
    add_products,
    load,
    load_lse,
    place,
    probabilities,
    product,
    store,
    zeros,
)
from rooftile.ops.attention.forward_kernel import sequence
from rooftile.ops.attention.scores import LOG2E, end_key, first_key, uncapped_gradient

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _walk_queries(
    dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, cols, walk, group,
    n_q, n_k, total_q, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk,
    MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the queries of some steps give: from `begin` on, `skip` left out after `before` steps.

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
        products = product(k_a, k_b, q_a, q_b, none, T.head_parts[1])
        p, scores = probabilities(
            products, lse[None, :], rows[None, :], cols, n_k - n_q, n_q, n_k, mask_at, stride_mq, stride_mk, slope,
            MASKED, T,
        )  # fmt: skip
        dout_a, dout_b = load(
            dout_at + at * stride_gt, row[:, None], inside, stride_gt,
            T.value_dim, T.value_parts[0], T.value_parts[1], not T.even,
        )  # fmt: skip
        if T.wanted != "dk":
            dv_a, dv_b = add_products(dv_a, dv_b, p, dout_a, dout_b, T.value_parts[1])
        if T.wanted != "dv":
            delta = tl.load(delta_at + rows, mask=rows < n_q, other=0.0)
            dp = product(v_a, v_b, dout_a, dout_b, none - delta[None, :], T.value_parts[1])  # less delta
            ds = uncapped_gradient(p * dp, scores, 1.0, T.softcap)
            dk_a, dk_b = add_products(dk_a, dk_b, ds, q_a, q_b, T.head_parts[1])
    return dk_a, dk_b, dv_a, dv_b


@triton.jit(do_not_specialize=["n_q", "n_k", "kv_heads", "group", "n_lanes", "n_blocks", "together"])
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
    T: tl.constexpr,
):
    """dk and dv of one block of keys. n_q and n_k are what the tensors have; of packed sequences, of all together."""
    lane, block = place(n_lanes, n_blocks, together)
    kv_head = (lane % kv_heads).to(tl.int64)
    batch = (lane // kv_heads).to(tl.int64)
    total_q = n_q  # a head's rows of lse and delta
    first_row = batch * (kv_heads * group) * n_q
    start_k = batch * 0
    if T.packed:
        start_q, n_q = sequence(starts_q_ptr, batch, n_q)
        start_k, n_k = sequence(starts_k_ptr, batch, n_k)
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
    if T.right >= 0:
        begin = tl.maximum(first - T.right - offset, 0) // T.rows
        full = tl.cdiv(tl.maximum(last - T.right - offset, 0), T.rows)
    if T.left >= 0:
        end = tl.cdiv(tl.minimum(tl.maximum(last + T.left - offset + 1, 0), n_q), T.rows)
    end = tl.where(first < n_k, tl.maximum(end, begin), begin)
    full = tl.minimum(full, end)
    full_end = end
    if T.left >= 0:
        full_end = tl.minimum(tl.maximum(tl.maximum(first + T.left - offset + 1, 0) // T.rows, full), end)
    if T.mask != "":
        full = end
        full_end = end

    dk_a, dk_b = zeros(T.cols, T.head_parts[0], T.head_parts[1])
    dv_a, dv_b = zeros(T.cols, T.value_parts[0], T.value_parts[1])
    if T.windowed or T.mask != "":
        walk = (begin, full - begin + end - full_end, full - begin, full_end - full)
        dk_a, dk_b, dv_a, dv_b = _walk_queries(
            dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, keys, walk, group,
            n_q, n_k, total_q, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk, True, T,
        )  # fmt: skip
    if T.mask == "":
        walk = (full, full_end - full, 0, 0)
        dk_a, dk_b, dv_a, dv_b = _walk_queries(
            dk_a, dk_b, dv_a, dv_b, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, mask_ptr, slopes_ptr, keys, walk, group,
            n_q, n_k, total_q, stride_qh, stride_qt, stride_gh, stride_gt, stride_mh, stride_mq, stride_mk, False, T,
        )  # fmt: skip

    if T.wanted != "dv":
        dk_ptr += batch * stride_dkb + kv_head * stride_dkh + start_k * stride_dkt
        store(
            dk_ptr, dk_a * T.scale, dk_b * T.scale, keys, inside, stride_dkt,
            T.head_dim, T.head_parts[0], T.head_parts[1],
        )  # fmt: skip
    if T.wanted != "dk":
        dv_ptr += batch * stride_dvb + kv_head * stride_dvh + start_k * stride_dvt
        store(dv_ptr, dv_a, dv_b, keys, inside, stride_dvt, T.value_dim, T.value_parts[0], T.value_parts[1])


@triton.jit
def _walk_keys(
    dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k,
    stride_kt, stride_vt, stride_mq, stride_mk, MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add to dq what the keys of some steps give: from `begin` on, `skip` left out after `before` steps."""
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
        products = product(q_a, q_b, k_a, k_b, none, T.head_parts[1])
        p, scores = probabilities(
            products, lse[:, None], rows, cols[None, :], n_k - n_q, n_q, n_k, mask_ptr, stride_mq, stride_mk, slope,
            MASKED, T,
        )  # fmt: skip
        v_a, v_b = load(
            v_ptr + at * stride_vt, col[:, None], inside, stride_vt,
            T.value_dim, T.value_parts[0], T.value_parts[1], TAIL,
        )  # fmt: skip
        dp = product(dout_a, dout_b, v_a, v_b, none - delta[:, None], T.value_parts[1])  # less delta
        ds = uncapped_gradient(p * dp, scores, 1.0, T.softcap)
        dq_a, dq_b = add_products(dq_a, dq_b, ds, k_a, k_b, T.head_parts[1])
    return dq_a, dq_b


@triton.jit(do_not_specialize=["n_q", "n_k", "heads", "group", "n_lanes", "n_blocks", "together"])
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
    T: tl.constexpr,
):
    """dq of one block of queries."""
    lane, block = place(n_lanes, n_blocks, together)
    if T.right >= 0:  # the last queries see the most keys
        block = n_blocks - 1 - block
    head = (lane % heads).to(tl.int64)
    kv_head = head // group
    batch = (lane // heads).to(tl.int64)
    rows_at = head * n_q  # of lse and delta
    start_q = batch * 0
    if T.packed:
        start_q, n_q = sequence(starts_q_ptr, batch, n_q)
        start_k, n_k = sequence(starts_k_ptr, batch, n_k)
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
    begin = first_key(p_first, T.left) // T.cols
    full = begin
    if T.left >= 0:
        full = tl.cdiv(first_key(p_last, T.left), T.cols)
    end = tl.maximum(tl.cdiv(end_key(p_last, n_k, T.right), T.cols), begin)
    end = tl.where(first < n_q, end, begin)
    full = tl.minimum(full, end)
    full_end = tl.minimum(tl.maximum(end_key(p_first, n_k, T.right) // T.cols, full), end)
    if T.mask != "":
        full = end
        full_end = end

    dq_a, dq_b = zeros(T.rows, T.head_parts[0], T.head_parts[1])
    if T.mask == "":
        walk = (full, full_end - full, 0, 0)
        dq_a, dq_b = _walk_keys(
            dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k,
            stride_kt, stride_vt, stride_mq, stride_mk, False, T,
        )  # fmt: skip
    if T.windowed or T.mask != "" or not T.even:
        walk = (begin, full - begin + end - full_end, full - begin, full_end - full)
        dq_a, dq_b = _walk_keys(
            dq_a, dq_b, q, dout, lse, delta, k_ptr, v_ptr, mask_ptr, slope, rows, walk, n_q, n_k,
            stride_kt, stride_vt, stride_mq, stride_mk, True, T,
        )  # fmt: skip

    dq_ptr += batch * stride_dqb + head * stride_dqh + start_q * stride_dqt
    store(
        dq_ptr, dq_a * T.scale, dq_b * T.scale, rows, inside, stride_dqt, T.head_dim, T.head_parts[0], T.head_parts[1]
    )
