"""The attention kernel: each program loops over its work, and for each piece of work over blocks of keys.

The new tokens of all query heads of one KV head are the rows of one tile, so a block of keys and values is read once
for all of them. More rows than a tile holds are several tiles, each with a program of its own: these walk the same
blocks at the same time, so that one reads a block from memory and the others from the L2. Where values are the first
columns of the keys, one tile in shared memory serves both GEMMs. Loads are pipelined by STAGES - 1 blocks. With
programmatic dependent launch a program starts while the previous kernel still runs: it plans its work from the lengths
as they are then, and prefetches its first blocks into the L2. After the wait it reads the lengths again, and plans anew
if they differ.

The file has four sections: the kernel; queries; caches of 8 bits, read as 16-bit pairs; pages and prefetching.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.decode_attention.schedule import (
    NEVER_SPLIT,
    any_differs,
    combine_splits,
    exp2_difference,
    load_lengths,
    no_work,
    plan_work,
    query_rows,
    store_partial,
    work_at,
    write_output,
)
from rooftile.primitives.assembly import assembly
from rooftile.primitives.dequantize import e4m3_of_bits
from rooftile.primitives.paging import page_of, token_in_page
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.scores import LOG2E, capped_scores, split_dim
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _convert(x, DTYPE: tl.constexpr):
    """Cached elements in the dtype of the GEMM; e4m3 and int8 convert exactly."""
    if x.dtype == tl.uint8:
        y = e4m3_of_bits(x).to(DTYPE)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _load_cached(
    c_ptr, offsets, mask, first: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, EVICTION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Columns of a block of keys or values, (keys, columns), zero where masked.

    TRANSPOSED gives (columns, keys): packed pairs reach a transposed operand through shared memory. `c_ptr` may hold
    one pointer for each key.
    """
    cols = first + tl.arange(0, D)
    across: tl.constexpr = 0 if TRANSPOSED else 1
    cols = tl.expand_dims(cols, 1 - across)
    there = tl.expand_dims(mask, across)
    if first + D > DIM:
        there &= cols < DIM
    if offsets.shape[0] > 1:
        pointers = c_ptr + (tl.expand_dims(offsets, across) + cols)
    else:
        pointers = tl.expand_dims(c_ptr, across) + cols
    return tl.load(pointers, mask=there, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _load_keys(
    c_ptr, offsets, mask, first: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr,
    EVICTION: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns of a block of keys."""
    if PACKED == "":
        k = _convert(_load_cached(c_ptr, offsets, mask, first, D, DIM, EVICTION, False), DTYPE)
    else:
        words = _load_cached(c_ptr, offsets, mask, first // 2, D // 2, DIM // 2, EVICTION, False)
        k = unpack_rows(words, PACKED, PTX)
    return k


@triton.jit
def _accumulate_tile(p, alpha, o, v):
    return tl.dot(v.T, p, o * alpha[None, :], input_precision="ieee")


@triton.jit
def _accumulate_values(
    p, alpha, o, o_odd, c_ptr, offsets, mask, first: tl.constexpr, V: tl.constexpr, DIM: tl.constexpr,
    EVICTION: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """alpha * o + transpose(values) · p for some columns; for packed pairs, even and odd columns apart."""
    if PACKED == "":
        v = _convert(_load_cached(c_ptr, offsets, mask, first, V, DIM, EVICTION, False), p.dtype)
        o = _accumulate_tile(p, alpha, o, v)
    else:
        words = _load_cached(c_ptr, offsets, mask, first // 2, V // 2, DIM // 2, EVICTION, True)
        even, odd = unpack_pairs(words, PACKED, PTX)
        o = tl.dot(even, p, o * alpha[None, :])
        o_odd = tl.dot(odd, p, o_odd * alpha[None, :])
    return o, o_odd


@triton.jit
def _transpose_output(o, o_odd, PACKED: tl.constexpr):
    """The transposed result as (rows, columns)."""
    if PACKED == "":
        rows = o.T
    else:
        rows = tl.interleave(o.T, o_odd.T)
    return rows


# A mask's row stride may follow a growing cache: its alignment does not select another kernel.
@triton.jit(
    do_not_specialize=["n_seqs", "n_new", "kv_heads", "capacity", "n_pages", "programs", "window"],
    do_not_specialize_on_alignment=["stride_mb"],
)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, pages_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr, mask_ptr, out_ptr,
    lse_ptr, partial_ptr, counters_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ksb, stride_kst, stride_ksh,
    stride_vsb, stride_vst, stride_vsh, stride_pb, stride_mb,
    n_seqs, n_new, kv_heads, capacity, n_pages, programs, score_factor, cap, window,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, ROW_TILES: tl.constexpr, PAGE: tl.constexpr,
    STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, FACTOR: tl.constexpr, CAPPED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, K_SCALE_KIND: tl.constexpr,
    V_SCALE_KIND: tl.constexpr, ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SLACK: tl.constexpr, COMBINE_SPLITS: tl.constexpr, PREFETCH_BLOCKS: tl.constexpr,
    ONE_ITEM: tl.constexpr, K_LINES: tl.constexpr, V_LINES: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    if not HAS_WINDOW:
        window = None
    DTYPE: tl.constexpr = tl.float16 if PACKED != "" else q_ptr.dtype.element_ty
    SCALE_QUERY: tl.constexpr = PACKED != "" and q_ptr.dtype.element_ty != tl.float16
    PER_WORD: tl.constexpr = 2 if PACKED != "" else 1  # elements per item of the cache's pointers
    EVICTION: tl.constexpr = "evict_first" if ROW_TILES == 1 else ""
    program = tl.program_id(0) // ROW_TILES
    tile = tl.program_id(0) % ROW_TILES
    rows = tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    # Offsets from a block's first key to the others, if they lie in one sequence or page.
    SCATTERED: tl.constexpr = PAGE > 0 and PAGE < BLOCK_N
    WIDE_OFFSETS: tl.constexpr = BLOCK_N * (STRIDE_KT if STRIDE_KT > STRIDE_VT else STRIDE_VT) >= 2**31
    key_index = key.to(tl.int64) if WIDE_OFFSETS else key
    k_offsets = key_index * STRIDE_KT
    v_offsets = key_index * STRIDE_VT
    if SCATTERED:  # one pointer for each key
        k_offsets = tl.zeros((1,), tl.int32)
        v_offsets = k_offsets
    SPECULATE: tl.constexpr = PDL and PREFETCH_BLOCKS > 0
    if PDL:
        if COMBINE_SPLITS > 0:
            pdl_launch_dependents()
        if not SPECULATE:
            pdl_wait()
            if COMBINE_SPLITS == 0:  # the next kernel may be combine_kernel, which reads the lengths at once
                pdl_launch_dependents()
    # Before the wait these lengths are a guess, because the previous kernel may still write them. The plan is computed
    # meanwhile, and kept if the lengths turn out equal. If no item is split, the final lengths just replace them.
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    partition, at, stop = plan_work(
        lengths, program, n_seqs, n_new, kv_heads, capacity, programs, window, BLOCK_B, BLOCK_N, MIN_BLOCKS, SLACK
    )
    if SPECULATE:
        work = work_at(
            at, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, window, BLOCK_B, BLOCK_N
        )
        prefetch_blocks(
            k_ptr, v_ptr, pages_ptr, stride_kb, stride_kh, stride_vb, stride_vh, stride_pb, work, n_pages,
            HEAD_DIM // PER_WORD, VALUE_DIM // PER_WORD, VALUES_IN_KEYS, PAGE, STRIDE_KT, STRIDE_VT, BLOCK_N,
            PREFETCH_BLOCKS, K_LINES, V_LINES,
        )  # fmt: skip
    speculative = True
    while (SPECULATE and speculative) or at < stop:
        # The wait is inside the loop, so that the loop-invariant code hoisted out of it runs before the wait.
        if SPECULATE and speculative:
            pdl_wait()
            if COMBINE_SPLITS == 0:
                pdl_launch_dependents()
            known = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
            # Loaded together with the lengths: keys are loaded only after the queries are in shared memory.
            q, q_second = load_queries(
                q_ptr,
                work,
                tile,
                n_new,
                rows,
                stride_qb,
                stride_qt,
                stride_qh,
                HEAD_DIM,
                GROUP,
                D0,
                D1,
                ROWS,
                PACKED,
            )
            if MIN_BLOCKS == NEVER_SPLIT:  # the lengths decide how long an item is, not which one it is
                lengths = known
                work = work_at(
                    program, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, window, BLOCK_B,
                    BLOCK_N,
                )  # fmt: skip
            elif any_differs(known, lengths):
                lengths = known
                partition, at, stop = plan_work(
                    lengths, program, n_seqs, n_new, kv_heads, capacity, programs, window, BLOCK_B, BLOCK_N, MIN_BLOCKS,
                    SLACK,
                )  # fmt: skip
                work = no_work(at)  # the next iteration follows the new plan
            speculative = False
        else:
            work = work_at(
                at, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, window, BLOCK_B, BLOCK_N
            )
            q, q_second = load_queries(
                q_ptr,
                work,
                tile,
                n_new,
                rows,
                stride_qb,
                stride_qt,
                stride_qh,
                HEAD_DIM,
                GROUP,
                D0,
                D1,
                ROWS,
                PACKED,
            )
        seq, kv_head, n_keys, first_block, low, high, after, slot, first_split, stride, second_slot, count = work

        if low < high:
            mask, token, head = query_rows(kv_head, tile, n_new, rows, GROUP, ROWS)
            position = (n_keys - n_new + token)[None, :]
            if ALIBI:
                slopes = slopes_ptr + head
                if ALIBI == 2:
                    slopes += seq.to(tl.int64) * (kv_heads * GROUP)
                slope = (tl.load(slopes, mask=mask, other=0.0).to(tl.float32) * LOG2E)[None, :]
            k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
            if not VALUES_IN_KEYS:
                v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
            k_scale_head = k_scale_ptr
            v_scale_head = v_scale_ptr
            if K_SCALE_KIND != "":
                k_scale_head += kv_head.to(tl.int64) * stride_ksh
            if V_SCALE_KIND != "":
                v_scale_head += kv_head.to(tl.int64) * stride_vsh
            factor = 1.0
            if K_SCALE_KIND == "head":
                factor = tl.load(k_scale_head)
            query, query_second = q, q_second
            if SCALE_QUERY:
                largest = row_absmax(q)
                if D1 > 0:
                    largest = tl.maximum(largest, row_absmax(q_second))
                up, down = float16_range_scales(largest)
                factor = (factor * down)[None, :]
                query = scale_to_float16(q, up)
                if D1 > 0:
                    query_second = scale_to_float16(q_second, up)

            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            # Summed over the keys after the loop: a reduction across warps costs as much as a tl.dot.
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            o = tl.zeros((V0 // PER_WORD, BLOCK_M), tl.float32)
            o_odd = o
            o_second = tl.zeros((V1 // PER_WORD if V1 > 0 else 1, BLOCK_M), tl.float32)
            o_second_odd = o_second
            v_scale_max = 0.0  # largest value scale so far
            end = first_block + tl.where(n_keys > 0, high, low)  # an empty sequence has a block, for its result alone
            for block in tl.range(first_block + low, end, num_stages=STAGES):
                cols = block * BLOCK_N + key
                inside = cols < n_keys
                if HAS_MASK:  # loaded while keys are awaited, which are read whatever the mask says
                    visible = tl.load(mask_ptr + seq.to(tl.int64) * stride_mb + cols, mask=inside, other=0)
                page = page_of(pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE, BLOCK_N, PTX)
                token_index = token_in_page(block, key, PAGE, BLOCK_N)
                k_block = k_head + (page * stride_kb + token_index * STRIDE_KT)
                if not VALUES_IN_KEYS:
                    v_block = v_head + (page * stride_vb + token_index * STRIDE_VT)
                k = _load_keys(k_block, k_offsets, inside, 0, D0, HEAD_DIM, DTYPE, EVICTION, PACKED, PTX)
                s = tl.dot(k, query, input_precision="ieee")
                if D1 > 0:
                    k_second = _load_keys(k_block, k_offsets, inside, D0, D1, HEAD_DIM, DTYPE, EVICTION, PACKED, PTX)
                    if VALUES_IN_KEYS:
                        # No chain of dots, into which Triton would fold a sum: see the mask below.
                        s = tl.fma(tl.dot(k_second, query_second, input_precision="ieee"), 1.0, s)
                    else:
                        s = tl.dot(k_second, query_second, s, input_precision="ieee")
                if K_SCALE_KIND == "head" or SCALE_QUERY:
                    s *= factor
                if K_SCALE_KIND == "token":
                    scale_offset = page * stride_ksb + (token_index if SCATTERED else token_index + key) * stride_kst
                    key_scale = tl.load(k_scale_head + scale_offset, mask=inside, other=0.0)
                    s *= key_scale[:, None]
                s = capped_scores(s, FACTOR if FACTOR != 0 else score_factor, cap, CAPPED)
                distance = position - cols[:, None]  # from the key to the query
                if ALIBI:
                    s -= slope * tl.abs(distance).to(tl.float32)
                if CAUSAL:
                    seen = (distance >= 0) & inside[:, None]
                else:
                    seen = inside[:, None]
                if HAS_MASK:
                    seen &= visible[:, None]
                if window is not None:
                    seen &= distance < window
                if VALUES_IN_KEYS and not HAS_MASK and window is None:
                    # The branch also lets two warp groups share the scores: Triton gives each group all of them where
                    # it sees a second dot that depends on the first.
                    if (block + 1) * BLOCK_N > n_keys - (n_new - 1):
                        s = tl.where(seen, s, float("-inf"))
                else:
                    s = tl.where(seen, s, float("-inf"))

                new = tl.maximum(m, tl.max(s, axis=0))
                alpha = exp2_difference(m, new)
                p = exp2_difference(s, new[None, :])
                sums = sums * alpha[None, :] + p
                m = new
                if V_SCALE_KIND == "token":
                    scale_offset = page * stride_vsb + (token_index if SCATTERED else token_index + key) * stride_vst
                    key_scale = tl.load(v_scale_head + scale_offset, mask=inside, other=0.0)
                    if PACKED != "":  # float16 lacks the range: p is in units of the largest scale
                        larger = tl.maximum(v_scale_max, tl.max(tl.abs(key_scale), axis=0))
                        inverse = tl.where(larger > 0.0, 1.0 / larger, 0.0)
                        alpha *= v_scale_max * inverse
                        key_scale *= inverse
                        v_scale_max = larger
                    p *= key_scale[:, None]
                p = p.to(DTYPE)
                if VALUES_IN_KEYS:
                    o = _accumulate_tile(p, alpha, o, k)
                else:
                    o, o_odd = _accumulate_values(
                        p, alpha, o, o_odd, v_block, v_offsets, inside, 0, V0, VALUE_DIM, EVICTION, PACKED, PTX
                    )
                if V1 > 0 and VALUES_IN_KEYS:
                    o_second = _accumulate_tile(p, alpha, o_second, k_second)
                elif V1 > 0:
                    o_second, o_second_odd = _accumulate_values(
                        p, alpha, o_second, o_second_odd, v_block, v_offsets, inside, V0, V1, VALUE_DIM, EVICTION,
                        PACKED, PTX,
                    )  # fmt: skip

            total = tl.sum(sums, axis=0)
            factor = 1.0
            if V_SCALE_KIND == "head":
                factor = tl.load(v_scale_head)
            if V_SCALE_KIND == "token" and PACKED != "":
                factor = v_scale_max
            row_o = _transpose_output(o, o_odd, PACKED) * factor
            row_o_second = tl.zeros((BLOCK_M, 1), tl.float32)
            if V1 > 0:
                row_o_second = _transpose_output(o_second, o_second_odd, PACKED) * factor
            if partial_ptr is None or count == 1:  # without a buffer no item is split
                write_output(
                    out_ptr, lse_ptr, sinks_ptr, m, total, row_o, row_o_second, seq, token, head, mask, n_new,
                    kv_heads * GROUP, VALUE_DIM, HAS_SINKS, HAS_LSE, V0, V1,
                )  # fmt: skip
            else:
                slot = slot * ROW_TILES + tile
                store_partial(partial_ptr, slot, m, total, row_o, row_o_second, rows, mask, V0 + V1, V0, V1, ROWS)
                if COMBINE_SPLITS > 0:  # noqa: SIM102  # a constant: without it there is nothing to compile
                    if arrives_last(counters_ptr + ((seq * kv_heads + kv_head) * ROW_TILES + tile), count):
                        few = tl.arange(0, ROWS)
                        few_mask, few_token, few_head = query_rows(kv_head, tile, n_new, few, GROUP, ROWS)
                        all_m, all_total, all_o, all_o_second = combine_splits(
                            partial_ptr, tile, first_split, stride, second_slot, count, few, few_mask, V0, V1,
                            ROW_TILES, ROWS, COMBINE_SPLITS,
                        )  # fmt: skip
                        write_output(
                            out_ptr, lse_ptr, sinks_ptr, all_m, all_total, all_o, all_o_second, seq, few_token,
                            few_head, few_mask, n_new, kv_heads * GROUP, VALUE_DIM, HAS_SINKS, HAS_LSE, V0, V1,
                        )  # fmt: skip
        # A loop that provably ends here keeps no registers for another iteration.
        at = stop if ONE_ITEM else after


# Queries


@triton.jit
def _load_query_columns(
    q_ptr, rows_at, mask, first: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Columns of the query rows, transposed; for packed pairs in the order of `unpack_rows`."""
    cols = tl.arange(0, D)
    if PACKED != "":
        cols = cols % (D // 2) * 2 + cols // (D // 2)
    cols += first
    return tl.load(q_ptr + rows_at[None, :] + cols[:, None], mask=mask[None, :] & (cols < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def load_queries(
    q_ptr, work, tile, n_new, rows, stride_qb, stride_qt, stride_qh, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The query rows of a piece of work, in two ranges of columns; nothing is read if it has no blocks."""
    seq, kv_head, _, _, low, high, _, _, _, _, _, _ = work
    mask, token, head = query_rows(kv_head, tile, n_new, rows, GROUP, ROWS)
    mask &= low < high
    at = seq.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = _load_query_columns(q_ptr, at, mask, 0, D0, HEAD_DIM, PACKED)
    q_second = q
    if D1 > 0:
        q_second = _load_query_columns(q_ptr, at, mask, D0, D1, HEAD_DIM, PACKED)
    return q, q_second


@triton.jit
def row_absmax(q):
    return tl.max(tl.abs(q.to(tl.float32)), axis=0)


@triton.jit
def scale_to_float16(q, by):
    return (q.to(tl.float32) * by[None, :]).to(tl.float16)


# Caches of 8 bits, read as 16-bit pairs
#
# `primitives.dequantize` converts tiles of bytes, and keeps their order. Here a pair goes to two tiles, so a word of
# two pairs becomes its even bytes and its odd ones.

# e4m3 to float16: the low bytes of two 16-bit words, then the high bytes.
_E4M3 = assembly("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# int8 to float16: flipping the sign bit adds 128; the bytes become the mantissas of 1024 + x, and 1152 is subtracted.
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


def packed_format(q: Tensor, k: Tensor, v: Tensor, target: runtime.Target) -> str:
    """The format of a cache that is read in pairs of elements: "e4m3" or "int8"; "" if it is read by elements."""
    e4m3 = k.dtype == torch.float8_e4m3fn
    if k.element_size() > 1 or q.dtype == torch.float32:
        return ""
    if target is not runtime.INTERPRETER:
        arch = target.arch
        if not arch.startswith("sm_") or (e4m3 and int(arch[3:]) < 89):  # older GPUs do not convert e4m3
            return ""
    for t in (k, v):
        # Each range of columns needs enough pairs for the tensor core.
        if any(0 < width < 32 for width in split_dim(t.shape[3])) or t.shape[3] % 2:
            return ""
    return "e4m3" if e4m3 else "int8"


def as_pairs(t: Tensor) -> Tensor:
    """A cache as 16-bit pairs; copied if its rows begin at odd bytes."""
    if any(stride % 2 for stride in t.stride()[:3]) or t.storage_offset() % 2:
        t = t.clone(memory_format=torch.contiguous_format)
    return t.view(torch.int16)


@triton.jit
def unpack_pairs(words, PACKED: tl.constexpr, PTX: tl.constexpr):
    """The low and the high bytes of 16-bit words, as float16."""
    if PTX and PACKED == "e4m3":
        low, high = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            _INT8, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PACKED == "e4m3":
        low = e4m3_of_bits(words).to(tl.float16)
        high = e4m3_of_bits(words >> 8).to(tl.float16)
    else:
        low = ((words.to(tl.int32) << 24) >> 24).to(tl.float16)
        high = (words.to(tl.int32) >> 8).to(tl.float16)
    return low, high


@triton.jit
def unpack_rows(words, PACKED: tl.constexpr, PTX: tl.constexpr):
    """(rows, words) as (rows, elements): a row's even columns, then its odd ones. No element changes threads."""
    low, high = unpack_pairs(words, PACKED, PTX)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def float16_range_scales(top):
    """For rows whose largest magnitude is `top`: the power of two that brings it to [2^14, 2^15), and its inverse."""
    exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return up, down


# Pages and prefetching


@triton.jit
def _prefetch_rows(c_ptr, offsets, D: tl.constexpr, LINES: tl.constexpr):
    """Prefetch rows of D elements into the L2, LINES lines of 128 bytes each."""
    PER_LINE: tl.constexpr = 128 // (c_ptr.dtype.element_ty.primitive_bitwidth // 8)
    cols = tl.minimum(tl.arange(0, LINES) * PER_LINE, D - 1)
    prefetch(c_ptr + (offsets[:, None] + cols[None, :]))


@triton.jit
def prefetch_blocks(
    k_ptr, v_ptr, pages_ptr, stride_kb, stride_kh, stride_vb, stride_vh, stride_pb, work, n_pages,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, PAGE: tl.constexpr,
    STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH_BLOCKS: tl.constexpr,
    K_LINES: tl.constexpr, V_LINES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first blocks of a piece of work into the L2 while the previous kernel still runs.

    The previous kernel may still write the lengths, from which the work was planned, and the page table, which is read
    here. Wrong values cost a useless prefetch: indices are clamped, and everything is read again after the wait. What
    the previous kernel still writes to the cache goes to the same L2.
    """
    seq, head, n_keys, first_block, low, high, _, _, _, _, _, _ = work
    head = head.to(tl.int64)
    key = tl.arange(0, BLOCK_N)
    for i in tl.static_range(PREFETCH_BLOCKS):
        if low + i < high:
            block = first_block + low + i
            # Not by inline PTX: the compiler may merge two pure loads of one address, and this one is loaded again.
            page = page_of(pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE, BLOCK_N, False)
            token = tl.maximum(tl.minimum(block * BLOCK_N + key, n_keys - 1), 0)
            if PAGE > 0:
                token %= PAGE
            token = token.to(tl.int64)
            _prefetch_rows(k_ptr, head * stride_kh + page * stride_kb + token * STRIDE_KT, HEAD_DIM, K_LINES)
            if not VALUES_IN_KEYS:
                _prefetch_rows(v_ptr, head * stride_vh + page * stride_vb + token * STRIDE_VT, VALUE_DIM, V_LINES)
