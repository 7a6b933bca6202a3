"""The portable forward: FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), for any GPU and every option.

A program computes BLOCK_M query rows of one head, and walks over the blocks of BLOCK_N keys that any of them sees, with
an online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867): m is the largest score so far, denom
the sum of 2^(s - m), acc the sum of 2^(s - m) v. A block that raises m rescales denom and acc.

m, denom and acc stay in registers, float32. Blocks of keys and values go through shared memory, in a pipeline of STAGES
stages. Only blocks at the edges of causality or the window are masked: the others, which all queries of the tile see
whole, take a loop without comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.attention.parts import (
    end_key,
    first_key,
    has_unit_rows,
    is_seen,
    load_rows,
    rasterize,
    sequence_range,
    store_rows,
)
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem
from rooftile.primitives.dequantize import eight_bits_as
from rooftile.primitives.paging import page_of
from rooftile.primitives.scores import LN2, LOG2E, capped_scores, split_dim

import triton  # isort: skip
import triton.language as tl  # isort: skip

_CHUNK = 16  # elements of a float32 head that one tl.dot multiplies: see `_walk_keys`


@triton.jit
def eights(stride, EIGHTS: tl.constexpr):
    """The stride. With EIGHTS it is a multiple of 8, and the compiler is told so, to load vectors."""
    if EIGHTS:
        return stride // 8 * 8
    else:
        return stride


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

    rows (R, 1) must be rows of the mask. With MASKED, it is not read at cols (1, C) from n_k on.
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
def load_keys(
    ptr, rows, inside, stride, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`load_rows`; elements of a cache of 8 bits become DTYPE, which is exact."""
    tile = load_rows(ptr, rows, inside, stride, D, FIRST, BLOCK, MASKED)
    if tile.dtype != DTYPE:
        tile = eight_bits_as(tile, DTYPE, PTX)
    return tile


@triton.jit
def load_scales(ptr, page, keys, inside, stride_sp, stride_st, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The scales of a block's keys; 0 for keys that are not `inside`."""
    ptrs = ptr + page * stride_sp + (keys % PAGE) * stride_st
    return tl.load(ptrs, mask=tl.reshape(inside, (BLOCK_N,)), other=0.0)


@triton.jit
def _walk_keys(
    acc, acc_rest, m, denom, q, q_rest,
    q_ptr, k_ptr, v_ptr, mask_ptr, slope, rows, p, first, lo, hi, n_k, scoring, pages, scales,
    stride_qt, stride_kt, stride_vt, stride_mt, stride_ms,
    CAPPED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, RAW: tl.constexpr,
    PAGE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PTX: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The mainloop over the keys from lo to hi. With MASKED, keys that do not exist or are not seen are masked.

    Pages and scales are those of `attend`. Keys of a cache before `first` are not read: the window has passed them, and
    their pages may belong to others by now.

    CHUNK is for float32, whose exact products run on the FMA units. Their operands are in registers, so a head is
    multiplied in chunks, for which q is loaded again in every block.
    """
    # RAW scores are scaled where their maximum is subtracted: one instruction an element less.
    factor, cap, left, right = scoring
    block = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        keys = start + block
        cols = keys[None, :]
        inside = (keys < n_k)[:, None]
        k_block, v_block, at = k_ptr, v_ptr, keys[:, None]
        if PAGE > 0:
            pages_ptr, seq, n_pages, stride_pb, stride_kp, stride_vp = pages
            if MASKED and HAS_LEFT:
                inside &= (keys >= first)[:, None]
            page = page_of(pages_ptr, seq, start // BLOCK_N, block, n_k, n_pages, stride_pb, PAGE, BLOCK_N, PTX)
            if PAGE < BLOCK_N:  # a page for each key
                at = (keys % PAGE)[:, None]
                k_block = k_ptr + page[:, None] * stride_kp
                v_block = v_ptr + page[:, None] * stride_vp
            else:
                at = (start % PAGE + block)[:, None]
                k_block = k_ptr + page * stride_kp
                v_block = v_ptr + page * stride_vp

        if CHUNK > 0:
            s = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
            for d in tl.static_range(0, D1 + D2, CHUNK):
                q_part = load_rows(q_ptr, rows, rows >= 0, stride_qt, D, d, CHUNK, False)
                k = load_keys(k_block, at, inside, stride_kt, D, d, CHUNK, MASKED, q_ptr.dtype.element_ty, PTX)
                s = tl.dot(q_part, tl.trans(k), s, input_precision="ieee")
        else:
            k = load_keys(k_block, at, inside, stride_kt, D, 0, D1, MASKED, q_ptr.dtype.element_ty, PTX)
            s = tl.dot(q, tl.trans(k))
            if D2 > 0:
                k_rest = load_keys(k_block, at, inside, stride_kt, D, D1, D2, MASKED, q_ptr.dtype.element_ty, PTX)
                s = tl.dot(q_rest, tl.trans(k_rest), s)

        if K_SCALES == "token":
            s *= load_scales(scales[0], page, keys, inside, scales[1], scales[2], PAGE, BLOCK_N)[None, :]
        if not RAW:
            s = capped_scores(s, factor, cap, CAPPED)
        s = biased(s, p, cols, rows, mask_ptr, slope, stride_mt, stride_ms, n_k, MASK, ALIBI, MASKED)
        if MASKED:
            s = tl.where(is_seen(p, cols, n_k, left, right, HAS_LEFT, HAS_RIGHT), s, float("-inf"))

        top = tl.max(s, 1)
        if RAW:
            top *= factor
        m_new = tl.maximum(m, top)
        m_off = m_new
        if MASKED or MASK != "":  # while a row has seen no key, m is -inf: exp2(-inf - -inf) would be NaN, not 0
            m_off = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_off)
        p_tile = tl.exp2(s * factor - m_off[:, None] if RAW else s - m_off[:, None])
        denom = denom * alpha + tl.sum(p_tile, 1)
        m = m_new

        if V_SCALES == "token":
            p_tile *= load_scales(scales[3], page, keys, inside, scales[4], scales[5], PAGE, BLOCK_N)[None, :]
        v = load_keys(v_block, at, inside, stride_vt, V, 0, V1, MASKED, q_ptr.dtype.element_ty, PTX)
        weights = p_tile.to(v.dtype)
        acc = tl.dot(weights, v, acc * alpha[:, None], input_precision="ieee")
        if V2 > 0:
            v_rest = load_keys(v_block, at, inside, stride_vt, V, V1, V2, MASKED, q_ptr.dtype.element_ty, PTX)
            acc_rest = tl.dot(weights, v_rest, acc_rest * alpha[:, None], input_precision="ieee")
    return acc, acc_rest, m, denom


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, slopes_ptr, sinks_ptr, head, start_m, n_q, n_k, scoring,
    pages, scales, stride_qt, stride_kt, stride_vt, stride_ot, stride_mt, stride_ms,
    CAPPED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, RAW: tl.constexpr,
    PAGE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PTX: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of the tile of queries from start_m on, of one head: q, k, v, out, lse and mask point to its sequence.

    With PAGE, keys and values are in pages of so many rows. `pages` are the table, the sequence's row in it, the number
    of pages, and the strides of the table's rows and of the pages of k and v. `scales` are, for k and then for v, the
    pointer to the head's scales, their stride of pages and that of tokens. K_SCALES and V_SCALES say which there are:
    "token" for one of each key or value, "head" for one of all (that of the keys is in `scoring` already), else "".
    """
    _, _, left, right = scoring
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
    if SINKS:  # as a score before the first key
        m = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        denom += 1.0
    acc = tl.zeros((BLOCK_M, V1), tl.float32)
    acc_rest = acc
    if V2 > 0:
        acc_rest = tl.zeros((BLOCK_M, V2), tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head).to(tl.float32) * LOG2E
    safe_rows = tl.minimum(rows, n_q - 1)[:, None]

    # Three ranges of blocks: those at the window's left edge, those that all queries see whole, and those at its right
    # edge, or causality's, or the end of the keys. Only the first and the last are masked.
    first = first_key(p_first, left, HAS_LEFT)
    lo = first // BLOCK_N * BLOCK_N
    hi = end_key(p_last, n_k, right, HAS_RIGHT)
    whole_lo = lo
    if HAS_LEFT:
        whole_lo = tl.cdiv(first_key(p_last, left, HAS_LEFT), BLOCK_N) * BLOCK_N
    whole_hi = end_key(p_first, n_k, right, HAS_RIGHT) // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        acc, acc_rest, m, denom = _walk_keys(
            acc, acc_rest, m, denom, q, q_rest,
            q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, first, lo, tl.minimum(whole_lo, hi),
            n_k, scoring, pages, scales, stride_qt, stride_kt, stride_vt, stride_mt, stride_ms,
            CAPPED, HAS_LEFT, HAS_RIGHT, MASK, ALIBI, RAW, PAGE, K_SCALES, V_SCALES, PTX,
            D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, True,
        )  # fmt: skip
    acc, acc_rest, m, denom = _walk_keys(
        acc, acc_rest, m, denom, q, q_rest,
        q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, first, whole_lo, whole_hi,
        n_k, scoring, pages, scales, stride_qt, stride_kt, stride_vt, stride_mt, stride_ms,
        CAPPED, HAS_LEFT, HAS_RIGHT, MASK, ALIBI, RAW, PAGE, K_SCALES, V_SCALES, PTX,
        D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, False,
    )  # fmt: skip
    acc, acc_rest, m, denom = _walk_keys(
        acc, acc_rest, m, denom, q, q_rest,
        q_ptr, k_ptr, v_ptr, mask_ptr, slope, safe_rows, p, first, tl.maximum(whole_lo, whole_hi), hi,
        n_k, scoring, pages, scales, stride_qt, stride_kt, stride_vt, stride_mt, stride_ms,
        CAPPED, HAS_LEFT, HAS_RIGHT, MASK, ALIBI, RAW, PAGE, K_SCALES, V_SCALES, PTX,
        D, D1, D2, V, V1, V2, CHUNK, BLOCK_N, STAGES, True,
    )  # fmt: skip

    denom = tl.where(denom == 0.0, 1.0, denom)  # a row that sees no key: its output is 0, and its lse m, -inf
    acc /= denom[:, None]
    if V_SCALES == "head":
        v_scale = tl.load(scales[3])
        acc *= v_scale
        acc_rest *= v_scale
    store_rows(out_ptr, acc, rows[:, None], inside, stride_ot, V, 0, V1)
    if V2 > 0:
        store_rows(out_ptr, acc_rest / denom[:, None], rows[:, None], inside, stride_ot, V, V1, V2)
    tl.store(lse_ptr + rows, m * LN2 + tl.log(denom), mask=rows < n_q)


@triton.jit(do_not_specialize=["pairs", "together", "heads", "group", "n_q", "n_k", "n_blocks", "left", "right"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, slopes_ptr, sinks_ptr, starts_q_ptr, starts_k_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_mb, stride_mh, stride_mt, stride_ms,
    pairs, together, heads, group, n_q, n_k, n_blocks, factor, cap, left, right,
    CAPPED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr,
    EIGHTS: tl.constexpr, RAW: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # `together` pairs of a sequence and a head, whose keys and values fit in the L2, run before the next ones. The last
    # block of each, which sees the most keys under causality, comes first, so that a launch ends with short blocks.
    pair, block = rasterize(tl.program_id(0), together, pairs, n_blocks)
    start_m = (n_blocks - 1 - block) * BLOCK_M
    head = (pair % heads).to(tl.int64)
    batch = (pair // heads).to(tl.int64)
    kv_head = head // group

    stride_qb, stride_qh, stride_qt = eights(stride_qb, EIGHTS), eights(stride_qh, EIGHTS), eights(stride_qt, EIGHTS)
    stride_kb, stride_kh, stride_kt = eights(stride_kb, EIGHTS), eights(stride_kh, EIGHTS), eights(stride_kt, EIGHTS)
    stride_vb, stride_vh, stride_vt = eights(stride_vb, EIGHTS), eights(stride_vh, EIGHTS), eights(stride_vt, EIGHTS)
    stride_ob, stride_oh, stride_ot = eights(stride_ob, EIGHTS), eights(stride_oh, EIGHTS), eights(stride_ot, EIGHTS)

    if ALIBI == 2:
        slopes_ptr += batch * heads
    lse_ptr += head * n_q
    if PACKED:
        total_k = n_k
        begin_q, n_q = sequence_range(starts_q_ptr, batch, n_q)
        begin_k, n_k = sequence_range(starts_k_ptr, batch, total_k)
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

    if MASK != "":
        mask_ptr += batch * stride_mb + head * stride_mh
    attend(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, slopes_ptr, sinks_ptr, head, start_m, n_q, n_k,
        (factor, cap, left, right), None, None, stride_qt, stride_kt, stride_vt, stride_ot, stride_mt, stride_ms,
        CAPPED, HAS_LEFT, HAS_RIGHT, MASK, ALIBI, SINKS, RAW, 0, "", "", False, D, D1, D2, V, V1, V2,
        CHUNK, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip


accepts = has_unit_rows


def _shared_memory(p: Problem, c: AttentionConfig, target: runtime.Target) -> int:
    """Bytes of shared memory of a program: its queries, and the keys and values in its pipeline."""
    d, v = sum(split_dim(p.head_dim)), sum(split_dim(p.value_dim))
    if p.dtype.itemsize == 4:  # queries and keys come in chunks, and the output leaves through shared memory
        return 4 * (c.block_m + c.block_n) * (v + _CHUNK) + 1024
    queries, keys = c.block_m * d, c.num_stages * c.block_n * (d + v)
    # AMD's matrix cores take operands from registers: the queries are gone before the keys come.
    return p.dtype.itemsize * (max(queries, keys) if target.warp_size == 64 else queries + keys) + 1024


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where this kernel can run that problem in that configuration, or the reason why it can't."""
    for name in ("block_m", "block_n"):
        if getattr(c, name) < 16:
            return f"{name} is {getattr(c, name)}, expected at least 16, the smallest tile of a tensor core"
    needed = _shared_memory(p, c, target)
    if needed > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: tiles take {needed} bytes of shared memory, expected at most "
            f"{target.shared_memory}"
        )
    sums = c.block_m * (c.block_n + sum(split_dim(p.value_dim))) // (c.num_warps * target.warp_size)
    if sums > 256:
        return f"block_m x (block_n + value_dim) is {sums} elements for each thread, expected at most 256"
    return None


def tile_constants(dtype: torch.dtype, dims: tuple[int, int], c: AttentionConfig) -> dict[str, int]:
    """The last constants of the kernels around `attend`: how heads of q and v are computed, and the tiles."""
    (d1, d2), (v1, v2) = map(split_dim, dims)
    return {
        "D": dims[0],
        "D1": d1,
        "D2": d2,
        "V": dims[1],
        "V1": v1,
        "V2": v2,
        "CHUNK": 0 if dtype.itemsize == 2 else _CHUNK,
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "STAGES": c.num_stages,
    }


@functools.cache
def _launcher(
    dtypes: tuple[torch.dtype | None, ...],
    dims: tuple[int, int],
    flags: tuple[bool, bool, bool],
    mask: str,
    alibi: int,
    packed: bool,
    eights: bool,
    raw: bool,
    c: AttentionConfig,
) -> KernelLauncher:
    dtype, _mask, _slopes, sinks = dtypes
    assert dtype is not None
    constants = {
        "CAPPED": flags[0],
        "HAS_LEFT": flags[1],
        "HAS_RIGHT": flags[2],
        "MASK": mask,
        "ALIBI": alibi,
        "SINKS": sinks is not None,
        "PACKED": packed,
        "EIGHTS": eights,
        "RAW": raw,
        **tile_constants(dtype, dims, c),
    }
    return KernelLauncher(forward_kernel, constants, newest_assembler=True, num_warps=c.num_warps)


def prepare(x: Inputs, out: Tensor, c: AttentionConfig) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `q, k, v, out, lse, *x.tensors`.

    out is (batch, heads, tokens, dim) with a last stride of 1, and lse (batch, heads, tokens) contiguous.
    """
    heads, n_q, head_dim = x.q.shape[1:]
    kv_heads, n_k, value_dim = x.v.shape[1:]
    packed = x.starts_q is not None
    pairs, n_blocks = x.sequences * heads, library.cdiv(x.longest_q, c.block_m)
    if pairs * n_blocks == 0:
        return library.start_nothing
    group = heads // kv_heads
    kv_bytes = x.longest_k * (head_dim + value_dim) * x.k.element_size()
    together = min(pairs, max(1, runtime.target(x.q.device).l2 // 2 // max(1, kv_bytes)) * group)
    strides = tuple(n for t in (x.q, x.k, x.v, out) for n in t.stride()[:3])
    # Triton knows by itself of strides that are multiples of 16.
    eights = all(n % 8 == 0 for n in strides) and not all(n % 16 == 0 for n in strides)
    # Scores stay unscaled (RAW) where they can. A subnormal factor is flushed to 0 on the device, and 0 * -inf is NaN.
    s = x.scoring
    raw = not (s.softcap or x.alibi_slopes is not None or x.mask_kind == "float") and s.numbers[0] >= 2.0**-126
    dtypes = tuple(None if t is None else t.dtype for t in (x.q, x.mask, x.alibi_slopes, x.sinks))
    alibi = 0 if x.alibi_slopes is None else x.alibi_slopes.dim()
    launcher = _launcher(dtypes, (head_dim, value_dim), s.flags, x.mask_kind, alibi, packed, eights, raw, c)
    numbers = (pairs, together, heads, group, n_q, n_k, n_blocks, *s.numbers)
    return bind(launcher, pairs * n_blocks, strides=(*strides, *x.mask_strides), numbers=numbers)
