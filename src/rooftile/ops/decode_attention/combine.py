"""The parts of an item, brought together: each part left the softmax's maximum and sum, and its sum of values.

    m = max m_i,   l = sum l_i 2^(m_i - m),   out = sum o_i 2^(m_i - m) / l

in the order of the parts, many parts at a time. A part leaves all that in a slot of float32: its rows of o, then m and
l of its rows. A program has two slots, as it may end one item and begin another; what it does between is whole.

Either the last program of an item to arrive brings its parts together, or a second kernel does it, a row to a program,
which is for many rows in many parts.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention.scores import LN2, LOG2E
from rooftile.ops.decode_attention.schedule import load_lengths, parts_of_item, share_out, slot_of
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def rescaled(m, top):
    """2^(m - top), where m is at most top; 0 for the m of what saw no key."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2(m - top))


@triton.jit
def leave_part(
    partial_ptr,
    slot,
    m,
    total,
    o,
    o_second,
    rows,
    mask,
    WIDTH: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
):
    at = partial_ptr + slot.to(tl.int64) * (ROWS * (WIDTH + 2))
    cols = tl.arange(0, V0)[None, :]
    tl.store(at + rows[:, None] * WIDTH + cols, o, mask=mask[:, None])
    if V1 > 0:
        cols = V0 + tl.arange(0, V1)[None, :]
        tl.store(at + rows[:, None] * WIDTH + cols, o_second, mask=mask[:, None])
    at += ROWS * WIDTH
    tl.store(at + rows, m, mask=mask)
    tl.store(at + ROWS + rows, total, mask=mask)


@triton.jit
def _parts_of_o(at, part, rows, cols, mask, WIDTH: tl.constexpr):
    """Some parts' rows of o, (parts, rows, cols); past the L1, where another program's stores may not be."""
    pointers = at[:, None, None] + rows[None, :, None] * WIDTH + cols[None, None, :]
    return tl.load(pointers, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")


@triton.jit
def bring_together(
    partial_ptr,
    first,
    late,
    count,
    rows,
    mask,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """m, l and o (in two parts of its columns) of an item's rows, of all its parts."""
    WIDTH: tl.constexpr = V0 + V1
    top = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    o = tl.zeros((rows.shape[0], V0), tl.float32)
    o_second = tl.zeros((rows.shape[0], V1 if V1 > 0 else 1), tl.float32)
    cols = tl.arange(0, V0)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        part = start + tl.arange(0, AT_ONCE)
        there = (part < count)[:, None] & mask[None, :]
        at = partial_ptr + slot_of(part, first, late).to(tl.int64) * (ROWS * (WIDTH + 2))
        of_row = at[:, None] + ROWS * WIDTH + rows[None, :]
        m = tl.load(of_row, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(of_row + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        values = _parts_of_o(at, part, rows, cols, there, WIDTH)
        new = tl.maximum(top, tl.max(m, axis=0))
        kept = rescaled(top, new)
        weight = rescaled(m, new[None, :])
        total = total * kept + tl.sum(sums * weight, axis=0)
        o = o * kept[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        if V1 > 0:
            values = _parts_of_o(at, part, rows, V0 + tl.arange(0, V1), there, WIDTH)
            o_second = o_second * kept[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        top = new
    return top, total, o, o_second


@triton.jit
def _write(out_ptr, o, row, mask, first: tl.constexpr, V: tl.constexpr, VALUE_DIM: tl.constexpr):
    cols = first + tl.arange(0, V)[None, :]
    out = out_ptr + row[:, None] * VALUE_DIM + cols
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (cols < VALUE_DIM))


@triton.jit
def finish(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    m,
    total,
    o,
    o_second,
    seq,
    kv_head,
    rows,
    mask,
    n_new,
    kv_heads,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
):
    """The softmax's last step, and the results of a KV head's rows: row r is head r % GROUP of token r // GROUP."""
    head = kv_head * GROUP + rows % GROUP
    token = rows // GROUP
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(m, sink)
        kept = rescaled(m, new)
        total = total * kept + rescaled(sink, new)
        o = o * kept[:, None]
        o_second = o_second * kept[:, None]
        m = new
    # A row that saw nothing is 0, and the logarithm of its sum -inf.
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    row = (seq.to(tl.int64) * n_new + token) * (kv_heads * GROUP) + head
    _write(out_ptr, o * inverse, row, mask, 0, V0, VALUE_DIM)
    if V1 > 0:
        _write(out_ptr, o_second * inverse, row, mask, V0, V1, VALUE_DIM)
    if HAS_LSE:
        lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(total)) * LN2)
        at = (seq.to(tl.int64) * (kv_heads * GROUP) + head) * n_new + token
        tl.store(lse_ptr + at, lse, mask=mask)


@triton.jit(do_not_specialize=["n_seqs", "n_new", "kv_heads", "capacity", "programs"])
def combine_kernel(
    lengths_ptr,
    sinks_ptr,
    partial_ptr,
    out_ptr,
    lse_ptr,
    n_seqs,
    n_new,
    kv_heads,
    capacity,
    programs,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SURPLUS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of an item; nothing where the item was done whole."""
    per_seq = kv_heads * TILES
    item = tl.program_id(0) // ROWS
    rows = tl.program_id(0) % ROWS + tl.arange(0, 1)
    # The kernel before let this one start when the lengths were there already: only its parts are waited for.
    if EARLY:
        pdl_launch_dependents()
    lengths = load_lengths(lengths_ptr, n_seqs, BLOCK_B)
    blocks, aligned, parts, _, each, more = share_out(
        lengths, n_seqs, n_new, per_seq, capacity, programs, WINDOW, BLOCK_B, BLOCK_N, LEAST, SURPLUS
    )
    seq = item // per_seq
    within = item % per_seq
    seqs = tl.arange(0, BLOCK_B)
    n_blocks = tl.sum(tl.where(seqs == seq, blocks, 0), axis=0)
    begin = tl.sum(tl.where(seqs < seq, blocks, 0), axis=0) * per_seq + within * n_blocks
    first, late, count = parts_of_item(item, begin, n_blocks, aligned, parts, each, more)
    row = (within % TILES) * ROWS + rows
    mask = row < n_new * GROUP
    if EARLY:
        pdl_wait()
    if count > 1:
        m, total, o, o_second = bring_together(partial_ptr, first, late, count, rows, mask, V0, V1, ROWS, AT_ONCE)
        finish(
            out_ptr, lse_ptr, sinks_ptr, m, total, o, o_second, seq, within // TILES, row, mask, n_new, kv_heads,
            VALUE_DIM, GROUP, HAS_SINKS, HAS_LSE, V0, V1,
        )  # fmt: skip
