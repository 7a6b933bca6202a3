"""The portable forward kernel: a program holds a block of queries and walks over the keys that any of them sees.

The softmax is computed as it goes (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867): m is the largest
score so far, denom the sum of 2^(s - m), acc the sum of 2^(s - m) v. A block that raises m scales denom and acc down.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention.scores import LN2, LOG2E, capped, end_key, first_key, seen

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def load_rows(
    ptr, rows, inside, stride, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Columns FIRST to FIRST + BLOCK of these rows (R, 1), zeros past D; where MASKED, those inside alone."""
    cols = FIRST + tl.arange(0, BLOCK)[None, :]
    ptrs = ptr + rows.to(tl.int64) * stride + cols
    if D < FIRST + BLOCK:
        if MASKED:
            tile = tl.load(ptrs, mask=inside & (cols < D), other=0.0)
        else:
            tile = tl.load(ptrs, mask=cols < D, other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=inside, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def eights(stride, EIGHTS: tl.constexpr):
    """The stride; where it is known to be a multiple of 8, so that the compiler knows it too, and loads vectors."""
    if EIGHTS:
        return stride // 8 * 8
    else:
        return stride


@triton.jit
def sequence(starts_ptr, index, total):
    """Where a packed sequence begins and how long it is: within [0, total], whatever the numbers are."""
    begin = tl.minimum(tl.maximum(tl.load(starts_ptr + index), 0), total)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + index + 1), begin), total)
    return begin, end - begin


@triton.jit
def biased(
    s,
    p,
    cols,
    rows,
    mask_ptr,
    slope,
    stride_mt,
    stride_ms,
    n_k,
    MASK: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The scores with the additive mask and the slope of ALiBi; -inf where a bool mask hides a key.

    rows (R, 1) are inside the mask; of cols (1, C) those are that are less than n_k.
    """
    if MASK != "":
        ptrs = mask_ptr + rows.to(tl.int64) * stride_mt + cols.to(tl.int64) * stride_ms
        if MASKED:
            bias = tl.load(ptrs, mask=cols < n_k, other=0)
        else:
            bias = tl.load(ptrs)
        if MASK == "bool":
            s = tl.where(bias.to(tl.int1), s, float("-inf"))
        else:
            s += bias.to(tl.float32) * LOG2E
    if ALIBI:
        s -= slope * tl.abs(p - cols).to(tl.float32)
    return s


@triton.jit
def _walk(
    acc, acc_rest, m, denom, q, q_rest,
    q_ptr, k_ptr, v_ptr, mask_ptr, slope, rows, p, lo, hi, n_k, stride_qt, stride_kt, stride_vt, stride_mt, stride_ms,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, RAW: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys from lo to hi; with MASKED only those that are seen, and that there are.

    CHUNK is of float32, whose exact products are the ordinary units': their operands are in registers, so that a head
    is multiplied in parts, for which q is read again.
    """
    # Raw scores are scaled where their maximum is taken off: one fused instruction an element less.
    FACTOR: tl.constexpr = SCALE * LOG2E if RAW else 1.0
    block = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        keys = start + block
        cols = keys[None, :]
        inside = (keys < n_k)[:, None]

        if CHUNK > 0:
            s = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
            for d in tl.static_range(0, D1 + D2, CHUNK):
                q_part = load_rows(q_ptr, rows, rows >= 0, stride_qt, D, d, CHUNK, False)
                k = load_rows(k_ptr, keys[:, None], inside, stride_kt, D, d, CHUNK, MASKED)
                s = tl.dot(q_part, tl.trans(k), s, input_precision="ieee")
        else:
            k = load_rows(k_ptr, keys[:, None], inside, stride_kt, D, 0, D1, MASKED)
            s = tl.dot(q, tl.trans(k))
            if D2 > 0:
                k_rest = load_rows(k_ptr, keys[:, None], inside, stride_kt, D, D1, D2, MASKED)
                s = tl.dot(q_rest, tl.trans(k_rest), s)

        if not RAW:
            s = capped(s, SCALE, SOFTCAP)
        s = biased(s, p, cols, rows, mask_ptr, slope, stride_mt, stride_ms, n_k, MASK, ALIBI, MASKED)
        if MASKED:
            s = tl.where(seen(p, cols, n_k, LEFT, RIGHT), s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1) * FACTOR)
        m_off = m_new
        if MASKED or MASK != "":  # of what has seen no key yet: exp2(-inf) is 0, exp2(-inf + inf) is not
            m_off = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_off)
        p_tile = tl.exp2(s * FACTOR - m_off[:, None])
        denom = denom * alpha + tl.sum(p_tile, 1)
        m = m_new

        v = load_rows(v_ptr, keys[:, None], inside, stride_vt, V, 0, V1, MASKED)
        weights = p_tile.to(v.dtype)
        acc = tl.dot(weights, v, acc * alpha[:, None], input_precision="ieee")
        if V2 > 0:
            v_rest = load_rows(v_ptr, keys[:, None], inside, stride_vt, V, V1, V2, MASKED)
            acc_rest = tl.dot(weights, v_rest, acc_rest * alpha[:, None], input_precision="ieee")
    return acc, acc_rest, m, denom


@triton.jit(do_not_specialize=["pairs", "together", "heads", "group", "n_q", "n_k", "n_blocks"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, slopes_ptr, sinks_ptr, starts_q_ptr, starts_k_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_mb, stride_mh, stride_mt, stride_ms,
    pairs, together, heads, group, n_q, n_k, n_blocks,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, EIGHTS: tl.constexpr, RAW: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # As many pairs of sequence and head as have their keys and values in the L2 are computed together, from the last
    # block of queries, which sees the most keys, to the first: what ends a launch is short.
    first = tl.program_id(0) // (together * n_blocks) * together
    within = tl.program_id(0) - first * n_blocks
    among = tl.minimum(together, pairs - first)
    start_m = (n_blocks - 1 - within // among) * BLOCK_M
    pair = first + within % among
    head = (pair % heads).to(tl.int64)
    batch = (pair // heads).to(tl.int64)
    kv_head = head // group

    stride_qb, stride_qh, stride_qt = eights(stride_qb, EIGHTS), eights(stride_qh, EIGHTS), eights(stride_qt, EIGHTS)
    stride_kb, stride_kh, stride_kt = eights(stride_kb, EIGHTS), eights(stride_kh, EIGHTS), eights(stride_kt, EIGHTS)
    stride_vb, stride_vh, stride_vt = eights(stride_vb, EIGHTS), eights(stride_vh, EIGHTS), eights(stride_vt, EIGHTS)
    stride_ob, stride_oh, stride_ot = eights(stride_ob, EIGHTS), eights(stride_oh, EIGHTS), eights(stride_ot, EIGHTS)

    lse_ptr += head * n_q
    if PACKED:
        total_k = n_k
        begin_q, n_q = sequence(starts_q_ptr, batch, n_q)
        begin_k, n_k = sequence(starts_k_ptr, batch, total_k)
        if start_m >= n_q:
            return
        q_ptr += begin_q.to(tl.int64) * stride_qt
        k_ptr += begin_k.to(tl.int64) * stride_kt
        v_ptr += begin_k.to(tl.int64) * stride_vt
        out_ptr += begin_q.to(tl.int64) * stride_ot
        lse_ptr += begin_q
    else:
        q_ptr += batch * stride_qb
        k_ptr += batch * stride_kb
        v_ptr += batch * stride_vb
        out_ptr += batch * stride_ob
        lse_ptr += batch * heads * n_q
    q_ptr += head * stride_qh
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    out_ptr += head * stride_oh

    rows = start_m + tl.arange(0, BLOCK_M)
    p_first = start_m + n_k - n_q
    p_last = tl.minimum(start_m + BLOCK_M, n_q) - 1 + n_k - n_q
    p = (rows + (n_k - n_q))[:, None]
    inside = (rows < n_q)[:, None]
    q = tl.zeros((BLOCK_M, 1), tl.float32)
    if CHUNK == 0:
        q = load_rows(q_ptr, rows[:, None], inside, stride_qt, D, 0, D1, True)
    q_rest = q
    if D2 > 0 and CHUNK == 0:
        q_rest = load_rows(q_ptr, rows[:, None], inside, stride_qt, D, D1, D2, True)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    denom = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:  # a score that is there before the first key
        m = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head) * LOG2E
        denom += 1.0
    acc = tl.zeros((BLOCK_M, V1), tl.float32)
    acc_rest = acc
    if V2 > 0:
        acc_rest = tl.zeros((BLOCK_M, V2), tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head) * LOG2E
    if MASK != "":
        mask_ptr += batch * stride_mb + head * stride_mh
    safe_rows = tl.minimum(rows, n_q - 1)[:, None]

    # Blocks that all queries see whole need no comparisons: they are between those at the window's and the end's edge.
    lo = first_key(p_first, LEFT) // BLOCK_N * BLOCK_N
    hi = end_key(p_last, n_k, RIGHT)
    whole_lo = lo
    if LEFT >= 0:
        whole_lo = tl.cdiv(first_key(p_last, LEFT), BLOCK_N) * BLOCK_N
    whole_hi = end_key(p_first, n_k, RIGHT) // BLOCK_N * BLOCK_N
    if LEFT >= 0:
        acc, acc_rest, m, denom = _walk(
            acc, acc_rest, m, denom, q, q_rest,
            q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, lo, tl.minimum(whole_lo, hi), n_k,
            stride_qt, stride_kt, stride_vt, stride_mt, stride_ms, SCALE, SOFTCAP, LEFT, RIGHT, MASK, ALIBI, RAW,
            D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, True,
        )  # fmt: skip
    acc, acc_rest, m, denom = _walk(
        acc, acc_rest, m, denom, q, q_rest,
        q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, whole_lo, whole_hi, n_k,
        stride_qt, stride_kt, stride_vt, stride_mt, stride_ms, SCALE, SOFTCAP, LEFT, RIGHT, MASK, ALIBI, RAW,
        D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, False,
    )  # fmt: skip
    if RIGHT >= 0 or not EVEN:
        acc, acc_rest, m, denom = _walk(
            acc, acc_rest, m, denom, q, q_rest,
            q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, tl.maximum(whole_lo, whole_hi), hi, n_k,
            stride_qt, stride_kt, stride_vt, stride_mt, stride_ms, SCALE, SOFTCAP, LEFT, RIGHT, MASK, ALIBI, RAW,
            D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, True,
        )  # fmt: skip

    denom = tl.where(denom == 0.0, 1.0, denom)  # a row that sees no key: zeros, and log 0
    acc /= denom[:, None]
    store_rows(out_ptr, acc, rows[:, None], inside, stride_ot, V, 0, V1)
    if V2 > 0:
        store_rows(out_ptr, acc_rest / denom[:, None], rows[:, None], inside, stride_ot, V, V1, V2)
    tl.store(lse_ptr + rows, m * LN2 + tl.log(denom), mask=rows < n_q)


@triton.jit
def store_rows(ptr, tile, rows, inside, stride, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """The tile, rounded, as columns FIRST to FIRST + BLOCK of those rows (R, 1) that are inside."""
    cols = FIRST + tl.arange(0, BLOCK)[None, :]
    mask = inside
    if D < FIRST + BLOCK:
        mask &= cols < D
    tl.store(ptr + rows.to(tl.int64) * stride + cols, tile.to(ptr.dtype.element_ty), mask=mask)
