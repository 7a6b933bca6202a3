"""The kernel: each program walks its parts of the work, and of each part over the keys, block after block.

The query heads of one KV head, times the new tokens, are the rows of one tile: a block of keys and values is read once
for all of them. Blocks are on their way STAGES - 1 ahead. While the kernel before still ends an early program computes
its part, by the lengths as they are then, and has its first blocks brought into the L2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.decode_attention.schedule import (
    WHOLE,
    bring_together,
    differ,
    finish,
    leave_part,
    load_lengths,
    no_part,
    part_at,
    plan_of,
    rescaled,
)
from rooftile.primitives.assembly import assembly
from rooftile.primitives.dequantize import e4m3_of_bits
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.scores import LOG2E, capped_scores, split_dim
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    """Cached numbers as the matrix unit takes them; none of e4m3's or int8's is rounded."""
    if x.dtype == tl.uint8:
        y = e4m3_of_bits(x).to(DTYPE)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _cached(
    c_ptr, offsets, mask, first: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr, EVICTION: tl.constexpr,
    SIDEWAYS: tl.constexpr,
):  # fmt: skip
    """Columns of a block of keys or values, (keys, columns), zero where there are none; sideways (columns, keys), which
    is how words get to a transposed operand by way of shared memory. `c_ptr` may be one for each key."""
    cols = first + tl.arange(0, D)
    across: tl.constexpr = 0 if SIDEWAYS else 1
    cols = tl.expand_dims(cols, 1 - across)
    there = tl.expand_dims(mask, across)
    if first + D > WHOLE:
        there &= cols < WHOLE
    if offsets.shape[0] > 1:
        pointers = c_ptr + (tl.expand_dims(offsets, across) + cols)
    else:
        pointers = tl.expand_dims(c_ptr, across) + cols
    return tl.load(pointers, mask=there, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _keys(
    c_ptr, offsets, mask, first: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
    EVICTION: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns of a block of keys."""
    if PAIRS == "":
        k = _as(_cached(c_ptr, offsets, mask, first, D, WHOLE, EVICTION, False), DTYPE)
    else:
        words = _cached(c_ptr, offsets, mask, first // 2, D // 2, WHOLE // 2, EVICTION, False)
        k = along_rows(words, PAIRS, PTX)
    return k


@triton.jit
def _add_values(
    p, kept, o, o_odd, c_ptr, offsets, mask, first: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr,
    EVICTION: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """kept * o + transposed values · p, of some columns; of pairs, the even columns' and the odd ones'."""
    if PAIRS == "":
        v = _as(_cached(c_ptr, offsets, mask, first, V, WHOLE, EVICTION, False), p.dtype)
        o = tl.dot(v.T, p, o * kept[None, :], input_precision="ieee")
    else:
        words = _cached(c_ptr, offsets, mask, first // 2, V // 2, WHOLE // 2, EVICTION, True)
        even, odd = halves(words, PAIRS, PTX)
        o = tl.dot(even, p, o * kept[None, :])
        o_odd = tl.dot(odd, p, o_odd * kept[None, :])
    return o, o_odd


@triton.jit
def _rows_of(o, o_odd, PAIRS: tl.constexpr):
    """(rows, columns) of a transposed result."""
    if PAIRS == "":
        rows = o.T
    else:
        rows = tl.interleave(o.T, o_odd.T)
    return rows


# A mask's rows may be as long as a cache that grows: whether by multiples of 16 bytes does not make another kernel.
@triton.jit(
    do_not_specialize=["n_seqs", "n_new", "kv_heads", "capacity", "n_pages", "programs"],
    do_not_specialize_on_alignment=["stride_mb"],
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    mask_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    counters_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_ksb,
    stride_kst,
    stride_ksh,
    stride_vsb,
    stride_vst,
    stride_vsh,
    stride_pb,
    stride_mb,
    n_seqs,
    n_new,
    kv_heads,
    capacity,
    n_pages,
    programs,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    SURPLUS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    K_LINES: tl.constexpr,
    V_LINES: tl.constexpr,
    EARLY: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.float16 if PAIRS != "" else q_ptr.dtype.element_ty
    OF_RANGE: tl.constexpr = PAIRS != "" and q_ptr.dtype.element_ty != tl.float16
    PER: tl.constexpr = 2 if PAIRS != "" else 1  # numbers to what the cache's pointers point to
    EVICTION: tl.constexpr = "evict_first" if TILES == 1 else ""
    program = tl.program_id(0)
    per_seq = kv_heads * TILES
    rows = tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    # From a block's first key to the others, where they lie in one sequence or page.
    SCATTERED: tl.constexpr = PAGE > 0 and PAGE < BLOCK_N
    FAR: tl.constexpr = BLOCK_N * (STRIDE_KT if STRIDE_KT > STRIDE_VT else STRIDE_VT) >= 2**31
    near = key.to(tl.int64) if FAR else key
    k_offsets = near * STRIDE_KT
    v_offsets = near * STRIDE_VT
    if SCATTERED:  # a pointer to each key
        k_offsets = tl.zeros((1,), tl.int32)
        v_offsets = k_offsets
    GUESSED: tl.constexpr = EARLY and AHEAD > 0
    if EARLY:
        if AT_ONCE > 0:
            pdl_launch_dependents()
        if not GUESSED:
            pdl_wait()
            if AT_ONCE == 0:  # the next may be the second kernel, which shall find the lengths as they are now
                pdl_launch_dependents()
    # A guess, where the kernel before may still write them: what follows from them is computed in its shadow, and when
    # it has ended they are compared; where no item is cut, the new ones just take their place.
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    sharing, at, stop = plan_of(
        lengths, program, n_seqs, n_new, per_seq, capacity, programs, WINDOW, BLOCK_B, BLOCK_N, LEAST, SURPLUS
    )
    if GUESSED:
        part = part_at(
            at, stop, program, programs, lengths, sharing, n_new, per_seq, capacity, WINDOW, BLOCK_B, BLOCK_N
        )
        bring_ahead(
            k_ptr, v_ptr, pages_ptr, stride_kb, stride_kh, stride_vb, stride_vh, stride_pb, part, n_pages,
            HEAD_DIM // PER, VALUE_DIM // PER, TILES, PAGE, STRIDE_KT, STRIDE_VT, BLOCK_N, AHEAD, K_LINES, V_LINES,
        )  # fmt: skip
    guessed = True
    while (GUESSED and guessed) or at < stop:
        # In the loop, because what all parts have in common is hoisted out of it: so it is computed before the wait.
        if GUESSED and guessed:
            pdl_wait()
            if AT_ONCE == 0:
                pdl_launch_dependents()
            known = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
            # On their way beside the lengths: no key is loaded before the queries have been put into shared memory.
            q, q_second = queries_of(
                q_ptr, part, n_new, rows, stride_qb, stride_qt, stride_qh, HEAD_DIM, GROUP, TILES, D0, D1, ROWS, PAIRS
            )
            if LEAST == WHOLE:  # only how long an item is follows from the lengths, and not which one it is
                lengths = known
                part = part_at(
                    program, stop, program, programs, lengths, sharing, n_new, per_seq, capacity, WINDOW, BLOCK_B,
                    BLOCK_N,
                )  # fmt: skip
            elif differ(known, lengths):
                lengths = known
                sharing, at, stop = plan_of(
                    lengths, program, n_seqs, n_new, per_seq, capacity, programs, WINDOW, BLOCK_B, BLOCK_N, LEAST,
                    SURPLUS,
                )  # fmt: skip
                part = no_part(at)  # the next is one by the new lengths
            guessed = False
        else:
            part = part_at(
                at, stop, program, programs, lengths, sharing, n_new, per_seq, capacity, WINDOW, BLOCK_B, BLOCK_N
            )
            q, q_second = queries_of(
                q_ptr, part, n_new, rows, stride_qb, stride_qt, stride_qh, HEAD_DIM, GROUP, TILES, D0, D1, ROWS, PAIRS
            )
        seq, within, n_keys, first_block, low, high, after, slot, first_program, late, count = part
        kv_head = within // TILES

        if low < high:
            row, mask, token, head = rows_of(within, n_new, rows, GROUP, TILES, ROWS)
            position = (n_keys - n_new + token)[None, :]
            if HAS_ALIBI:
                slope = (tl.load(slopes_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2E)[None, :]
            k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
            v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
            k_scale_head = k_scale_ptr
            v_scale_head = v_scale_ptr
            if K_SCALES != "":
                k_scale_head += kv_head.to(tl.int64) * stride_ksh
            if V_SCALES != "":
                v_scale_head += kv_head.to(tl.int64) * stride_vsh
            factor = 1.0
            if K_SCALES == "head":
                factor = tl.load(k_scale_head)
            query, query_second = q, q_second
            if OF_RANGE:
                largest = largest_of(q)
                if D1 > 0:
                    largest = tl.maximum(largest, largest_of(q_second))
                up, down = into_range(largest)
                factor = (factor * down)[None, :]
                query = scaled(q, up)
                if D1 > 0:
                    query_second = scaled(q_second, up)

            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            # Summed over the keys at the end: what goes across warps costs as much as a product.
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            o = tl.zeros((V0 // PER, BLOCK_M), tl.float32)
            o_odd = o
            o_second = tl.zeros((V1 // PER if V1 > 0 else 1, BLOCK_M), tl.float32)
            o_second_odd = o_second
            of_values = 0.0  # the largest scale of the values so far
            for block in tl.range(first_block + low, first_block + high, num_stages=STAGES):
                cols = block * BLOCK_N + key
                inside = cols < n_keys
                if HAS_MASK:  # on its way while keys are waited for, which are read whatever it says
                    shown = tl.load(mask_ptr + seq.to(tl.int64) * stride_mb + cols, mask=inside, other=0)
                home = home_of(pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE, BLOCK_N, PTX)
                place = place_in(block, key, PAGE, BLOCK_N)
                k_block = k_head + (home * stride_kb + place * STRIDE_KT)
                v_block = v_head + (home * stride_vb + place * STRIDE_VT)
                k = _keys(k_block, k_offsets, inside, 0, D0, HEAD_DIM, DTYPE, EVICTION, PAIRS, PTX)
                s = tl.dot(k, query, input_precision="ieee")
                if D1 > 0:
                    k = _keys(k_block, k_offsets, inside, D0, D1, HEAD_DIM, DTYPE, EVICTION, PAIRS, PTX)
                    s = tl.dot(k, query_second, s, input_precision="ieee")
                if K_SCALES == "head" or OF_RANGE:
                    s *= factor
                if K_SCALES == "token":
                    at_key = home * stride_ksb + (place if SCATTERED else place + key) * stride_kst
                    of_key = tl.load(k_scale_head + at_key, mask=inside, other=0.0)
                    s *= of_key[:, None]
                FACTOR: tl.constexpr = SCALE * LOG2E if SOFTCAP == 0 else SCALE / SOFTCAP
                s = capped_scores(s, FACTOR, SOFTCAP * LOG2E, SOFTCAP > 0)
                ahead = position - cols[:, None]  # how far the key is before the query
                if HAS_ALIBI:
                    s -= slope * tl.abs(ahead).to(tl.float32)
                seen = (ahead >= 0) & inside[:, None]
                if HAS_MASK:
                    seen &= shown[:, None]
                if WINDOW > 0:
                    seen &= ahead < WINDOW
                s = tl.where(seen, s, float("-inf"))

                new = tl.maximum(m, tl.max(s, axis=0))
                kept = rescaled(m, new)
                p = rescaled(s, new[None, :])
                sums = sums * kept[None, :] + p
                m = new
                if V_SCALES == "token":
                    at_key = home * stride_vsb + (place if SCATTERED else place + key) * stride_vst
                    of_key = tl.load(v_scale_head + at_key, mask=inside, other=0.0)
                    if PAIRS != "":  # float16 has not their range: the weights are in units of the largest
                        larger = tl.maximum(of_values, tl.max(tl.abs(of_key), axis=0))
                        inverse = tl.where(larger > 0.0, 1.0 / larger, 0.0)
                        kept *= of_values * inverse
                        of_key *= inverse
                        of_values = larger
                    p *= of_key[:, None]
                p = p.to(DTYPE)
                o, o_odd = _add_values(
                    p, kept, o, o_odd, v_block, v_offsets, inside, 0, V0, VALUE_DIM, EVICTION, PAIRS, PTX
                )
                if V1 > 0:
                    o_second, o_second_odd = _add_values(
                        p, kept, o_second, o_second_odd, v_block, v_offsets, inside, V0, V1, VALUE_DIM, EVICTION,
                        PAIRS, PTX,
                    )  # fmt: skip

            total = tl.sum(sums, axis=0)
            factor = 1.0
            if V_SCALES == "head":
                factor = tl.load(v_scale_head)
            if V_SCALES == "token" and PAIRS != "":
                factor = of_values
            row_o = _rows_of(o, o_odd, PAIRS) * factor
            row_o_second = tl.zeros((BLOCK_M, 1), tl.float32)
            if V1 > 0:
                row_o_second = _rows_of(o_second, o_second_odd, PAIRS) * factor
            if partial_ptr is None or count == 1:  # without a buffer no item is shared
                finish(
                    out_ptr, lse_ptr, sinks_ptr, m, total, row_o, row_o_second, seq, kv_head, row, mask, n_new,
                    kv_heads, VALUE_DIM, GROUP, HAS_SINKS, HAS_LSE, V0, V1,
                )  # fmt: skip
            else:
                leave_part(partial_ptr, slot, m, total, row_o, row_o_second, rows, mask, V0 + V1, V0, V1, ROWS)
                if AT_ONCE > 0:  # noqa: SIM102  # a constant: without it there is nothing to compile
                    if arrives_last(counters_ptr + (seq * per_seq + within), count):
                        few = tl.arange(0, ROWS)
                        few_row = (within % TILES) * ROWS + few
                        few_mask = few_row < n_new * GROUP
                        all_m, all_total, all_o, all_o_second = bring_together(
                            partial_ptr, first_program, late, count, few, few_mask, V0, V1, ROWS, AT_ONCE
                        )
                        finish(
                            out_ptr, lse_ptr, sinks_ptr, all_m, all_total, all_o, all_o_second, seq, kv_head,
                            few_row, few_mask, n_new, kv_heads, VALUE_DIM, GROUP, HAS_SINKS, HAS_LSE, V0, V1,
                        )  # fmt: skip
        # Of a loop that is seen to end here nothing is kept for another turn, in registers that the keys take.
        at = stop if ONCE else after


@triton.jit
def rows_of(within, n_new, rows, GROUP: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """An item's rows, and which of them there are; their tokens, and their heads."""
    row = (within % TILES) * ROWS + rows
    return row, (rows < ROWS) & (row < n_new * GROUP), row // GROUP, within // TILES * GROUP + row % GROUP


@triton.jit
def _columns(
    q_ptr, rows_at, mask, first: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns of the query's rows, transposed; in `along_rows`'s order, of pairs."""
    cols = tl.arange(0, D)
    if PAIRS != "":
        cols = cols % (D // 2) * 2 + cols // (D // 2)
    cols += first
    return tl.load(q_ptr + rows_at[None, :] + cols[:, None], mask=mask[None, :] & (cols < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def queries_of(
    q_ptr, part, n_new, rows, stride_qb, stride_qt, stride_qh, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The query's rows of a part, in two parts of their columns; of a part of no blocks nothing is read."""
    seq, within, _, _, low, high, _, _, _, _, _ = part
    _, mask, token, head = rows_of(within, n_new, rows, GROUP, TILES, ROWS)
    mask &= low < high
    at = seq.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = _columns(q_ptr, at, mask, 0, D0, HEAD_DIM, PAIRS)
    q_second = q
    if D1 > 0:
        q_second = _columns(q_ptr, at, mask, D0, D1, HEAD_DIM, PAIRS)
    return q, q_second


@triton.jit
def largest_of(q):
    return tl.max(tl.abs(q.to(tl.float32)), axis=0)


@triton.jit
def scaled(q, by):
    return (q.to(tl.float32) * by[None, :]).to(tl.float16)


# The low bytes of two words, then the high ones.
_E4M3 = assembly("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The sign's bit is turned over, which adds 128.
_INT8 = assembly("""{
    .reg .b32 word, magic, less;
    mov.b32 magic, 0x64646464;
    mov.b32 less, 0xe480e480;
    xor.b32 word, $2, 0x80808080;
    prmt.b32 $0, word, magic, 0x4240;
    prmt.b32 $1, word, magic, 0x4341;
    add.rn.f16x2 $0, $0, less;
    add.rn.f16x2 $1, $1, less;
}""")


def kind_of(q: Tensor, k: Tensor, v: Tensor, target: runtime.Target) -> str:
    """How a cache is read in words: as "e4m3" or "int8"; "" where it is read number by number."""
    e4m3 = k.dtype == torch.float8_e4m3fn
    if k.element_size() > 1 or q.dtype == torch.float32:
        return ""
    if target is not runtime.INTERPRETER:
        arch = target.arch
        if not arch.startswith("sm_") or (e4m3 and int(arch[3:]) < 89):  # older chips don't convert e4m3
            return ""
    for t in (k, v):
        # A second part of the columns, too, has words enough for the matrix unit.
        if any(0 < part < 32 for part in split_dim(t.shape[3])) or t.shape[3] % 2:
            return ""
    return "e4m3" if e4m3 else "int8"


def words_of(t: Tensor) -> Tensor:
    """A cache as words; copied where its rows begin at odd bytes."""
    if any(stride % 2 for stride in t.stride()[:3]) or t.storage_offset() % 2:
        t = t.clone(memory_format=torch.contiguous_format)
    return t.view(torch.int16)


@triton.jit
def _e4m3(byte):
    """Bits of e4m3, as they are where float16 has them: 2^8 too small."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit
def halves(words, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """The low bytes and the high bytes of words, in float16."""
    if PTX and PAIRS == "e4m3":
        low, high = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            _INT8, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PAIRS == "e4m3":
        low = _e4m3(words.to(tl.int32) & 0xFF)
        high = _e4m3((words.to(tl.int32) >> 8) & 0xFF)
    else:
        low = ((words.to(tl.int32) << 24) >> 24).to(tl.float16)
        high = (words.to(tl.int32) >> 8).to(tl.float16)
    return low, high


@triton.jit
def along_rows(words, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """(rows, words) as (rows, numbers): a row's even places, then its odd ones. No number goes to another thread."""
    low, high = halves(words, PAIRS, PTX)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def into_range(top):
    """Powers of two for rows whose largest number is `top`: what brings it to 2^14 and more, and its inverse."""
    exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return up, down


@triton.jit
def _page(pointers, PTX: tl.constexpr):
    """Numbers of pages. As a load of Triton's it would be pipelined as well, and keys and values half as deep.

    What is read before the wait, which is by Triton's load on an NVIDIA GPU, goes past the L1: there it would be found
    again after the wait, as it was before.
    """
    if PTX:
        page = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(pointers, cache_modifier=".cg")
    return page


@triton.jit
def home_of(
    pages_ptr,
    seq,
    block,
    key,
    n_keys,
    n_pages,
    stride_pb,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """What holds a block's keys: the sequence, or the block's page, or the page of each key.

    A page that there is, whatever the table says; the table is not read past the last key.
    """
    if PAGE == 0:
        home = seq.to(tl.int64)
    else:
        token = block * BLOCK_N
        if PAGE < BLOCK_N:
            token += key
        token = tl.maximum(tl.minimum(token, n_keys - 1), 0)
        page = _page(pages_ptr + seq.to(tl.int64) * stride_pb + token // PAGE, PTX)
        home = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
    return home


@triton.jit
def place_in(block, key, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a block's first key is in its sequence or page; or where each is, of a block in several pages."""
    token = block * BLOCK_N
    if PAGE > 0 and PAGE < BLOCK_N:
        token += key
    if PAGE > 0:
        token %= PAGE
    return token.to(tl.int64)


@triton.jit
def _lines_of(c_ptr, offsets, D: tl.constexpr, LINES: tl.constexpr):
    """Bring rows of D numbers into the L2, each LINES lines of 128 bytes."""
    PER_LINE: tl.constexpr = 128 // (c_ptr.dtype.element_ty.primitive_bitwidth // 8)
    cols = tl.minimum(tl.arange(0, LINES) * PER_LINE, D - 1)
    prefetch(c_ptr + (offsets[:, None] + cols[None, :]))


@triton.jit
def bring_ahead(
    k_ptr,
    v_ptr,
    pages_ptr,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_pb,
    part,
    n_pages,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    K_LINES: tl.constexpr,
    V_LINES: tl.constexpr,
):
    """Bring the first blocks of a part into the L2 while the kernel before still ends.

    The part is a guess, by lengths that the kernel before may still write, as it may the page table, which is read
    here. Wrong ones cost a prefetch: they are clamped as ever, and all is read again afterwards. What the kernel
    before still writes into the cache it writes into the same L2.
    """
    seq, within, n_keys, first_block, low, high, _, _, _, _, _ = part
    head = (within // TILES).to(tl.int64)
    key = tl.arange(0, BLOCK_N)
    for i in tl.static_range(AHEAD):
        if low + i < high:
            block = first_block + low + i
            # Not by PTX: two pure instructions with one address might be taken for one, and that address is read again.
            home = home_of(pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE, BLOCK_N, False)
            token = tl.maximum(tl.minimum(block * BLOCK_N + key, n_keys - 1), 0)
            if PAGE > 0:
                token %= PAGE
            token = token.to(tl.int64)
            _lines_of(k_ptr, head * stride_kh + home * stride_kb + token * STRIDE_KT, HEAD_DIM, K_LINES)
            _lines_of(v_ptr, head * stride_vh + home * stride_vb + token * STRIDE_VT, VALUE_DIM, V_LINES)
