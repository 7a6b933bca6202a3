"""The kernel that draws a token, without a sort.

Top-k, top-p and min-p keep the first tokens of a row in the order of their logits; equal logits are in the order of
their index. So each is a threshold. The kernel searches for it over the integer keys that order float32: a pass over
the row counts the tokens at or above a few pivots and sums their probabilities, and the threshold lies between two of
them. One more pass adds Gumbel noise to the kept logits; the largest sum is a draw from the softmax (Gumbel 1954;
Maddison et al. 2014, https://arxiv.org/abs/1411.0030).

Probabilities are relative to the largest, in units of 2^-40. Sums of integers are the same in any order, so a row's
threshold depends neither on the number of programs that share it nor on the other rows.

If there are few rows, several programs share one. A barrier follows each pass: each program stores its sums in memory,
waits for the others, and then adds up the sums of all by itself. All programs must be resident, so the grid is
launched as a cooperative one.

At the barrier a program adds to the counter of its row with release semantics, after a barrier of its own threads, and
polls it with acquire semantics; both are at GPU scope. What the others stored before is then visible to loads that
bypass the L1. Two sets of words alternate: when a program writes to a set again, every program has passed the next
barrier, and so has read that set. The program that ends last leaves the counter at zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.parts import (
    LARGEST,
    LOG2E,
    Parameters,
    Tables,
    finish,
    given,
    key_in,
    key_of,
    load_logits,
    noise,
    strides_of,
    value_of,
    with_index,
)
from rooftile.primitives.cta_exchange import resident
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip

WORDS = tl.constexpr(16)  # of a program at a barrier: 8 counts and 8 masses


@triton.jit
def row_barrier(counter_ptr, n_barriers, splits):
    """Wait until all programs of the row are here. What each has stored can then be read, bypassing the L1."""
    tl.debug_barrier()  # all threads of the program have stored their part
    come = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while come < splits * (n_barriers + 1):
        come = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()
    return n_barriers + 1


@triton.jit
def words_of(words_ptr, n_barriers, splits):
    """The words for the next barrier, while those of the last one may still be read."""
    return words_ptr + (n_barriers % 2) * splits * WORDS


@triton.jit
def gather(at, first, splits, SPLITS: tl.constexpr):
    """(programs, 8) words that all programs have stored, with zeros past the last program."""
    rows = tl.arange(0, SPLITS)[:, None]
    word_ptrs = at + rows * WORDS + first + tl.arange(0, 8)[None, :]
    return tl.load(word_ptrs, mask=rows < splits, other=0, cache_modifier=".cg")


@triton.jit
def largest(at, word, splits, SPLITS: tl.constexpr):
    rows = tl.arange(0, SPLITS)
    return tl.max(tl.load(at + rows * WORDS + word, mask=rows < splits, other=-(2**63), cache_modifier=".cg"), axis=0)


ONE = tl.constexpr(float(1 << 40))  # the largest probability; the sum over 2^22 tokens fits an int64


@triton.jit
def _at(vector, i):
    """One entry of a vector of 8."""
    return tl.sum(tl.where(tl.arange(0, 8) == i, vector, 0), axis=0)


@triton.jit
def _below(z, top, rate):
    """log2 of the probability relative to the largest, which is 0 for the largest even if it is infinite."""
    return tl.where(z == top, 0.0, (z - top) * rate)


@triton.jit
def _mass(exponent):
    return (tl.exp2(exponent) * ONE).to(tl.int64)


@triton.jit
def _pivot(i, first, low, high, step, shift, top, temperature, PIVOTS: tl.constexpr):
    """Pivot i. The first pivots lie powers of two, in temperatures, below the largest logit; later ones are even."""
    by_key = low + step * (i + 1)
    if first:
        below = (1 << ((i + 1) * 8 // (PIVOTS + 1) - 1)).to(tl.float32)
        by_key = (key_of(top - temperature * below).to(tl.int64) >> shift) << shift
    return tl.minimum(by_key, high)


@triton.jit
def _columns(parts, N: tl.constexpr, LANES: tl.constexpr):
    """Three or seven vectors as columns of one tile of 8, so that one reduction sums all."""
    zero = tl.zeros_like(parts[0])
    if N == 7:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], zero))
    else:
        even = tl.join(tl.join(parts[0], zero), tl.join(parts[2], zero))
        odd = tl.join(tl.join(parts[1], zero), tl.join(zero, zero))
    return tl.reshape(tl.join(even, odd), (LANES, 8))


@triton.jit
def _measure(
    logits, begin, end, n_cols, top, rate,
    first, low, high, step, shift, temperature,
    PIVOTS: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """How many of the program's columns are at or above each pivot, and their mass: two vectors of 8."""
    pivots = ()
    counts = ()
    masses = ()
    for i in tl.static_range(PIVOTS):
        at = tl.full((), i, tl.int32)
        pivot = _pivot(at, first, low, high, step, shift, top, temperature, PIVOTS)
        pivots += (pivot.to(tl.int32),)  # type: ignore[assignment]
        counts += (tl.zeros((LANES,), tl.int32),)  # type: ignore[assignment]
        masses += (tl.zeros((LANES,), tl.int64),)  # type: ignore[assignment]
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    for start in tl.range(begin, end, LANES * PACK, num_stages=1):
        cols = start + block
        mask = cols < n_cols
        _, z = load_logits(logits, cols, mask)
        key = tl.where(mask, key_of(z), -LARGEST - 1)
        mass = _mass(_below(z, top, rate))
        new_counts = ()
        new_masses = ()
        for i in tl.static_range(PIVOTS):
            inside = key >= pivots[i]
            new_counts += (counts[i] + tl.sum(inside.to(tl.int32), axis=1),)  # type: ignore[assignment]
            more = tl.sum(tl.where(inside, mass, 0), axis=1)
            new_masses += (masses[i] + more,)  # type: ignore[assignment]
        counts = new_counts
        masses = new_masses
    return tl.sum(_columns(counts, PIVOTS, LANES), axis=0).to(tl.int64), tl.sum(_columns(masses, PIVOTS, LANES), axis=0)


@triton.jit
def _target(top_p, mass):
    """The least integer mass that reaches p; at least one unit, so that the largest is kept."""
    wanted = top_p.to(tl.float64) * mass.to(tl.float64)
    target = wanted.to(tl.int64)
    return tl.maximum(target + (target.to(tl.float64) < wanted).to(tl.int64), 1)


@triton.jit
def _threshold(
    logits, words_ptr, counter_ptr, split, splits, n_barriers, begin, end, n_cols,
    top, rate, temperature, top_k, top_p, shift, low, ceiling, low_mass,
    PIVOTS: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What top-k and top-p keep: all keys at or above `high`, and those from `low` up to `high`. With `cut` only the
    first `kept` of the latter.

    Two searches: first for k tokens, then for p of their mass. At or above `low` there are always enough tokens or
    enough mass, at or above `high` not. A search ends when only one value or one token is between them, or when the
    count is exact.
    """
    slots = tl.arange(0, 8)
    unit = tl.full((), 1, tl.int64) << shift
    zero = low * 0
    high = ceiling
    low_count = zero + n_cols
    high_count = zero
    high_mass = zero
    by_count = (top_k > 0) & (top_k < n_cols)
    target = tl.where(by_count, zero + top_k, _target(top_p, low_mass))
    searching = by_count | (top_p < 1.0)
    kept = low_count
    cut = low > high  # not yet
    tied = low - 1  # the key at which equal logits were cut by count; the mass may cut them further
    first = searching
    while searching:
        going = (high - low > unit) & (low_count - high_count > 1) & ((low_count > target) | ~by_count)
        if going:
            step = (high - low + (PIVOTS + 1) * unit - 1) // ((PIVOTS + 1) * unit) * unit
            count, mass = _measure(
                logits, begin, end, n_cols, top, rate,
                first, low, high, step, shift, temperature, PIVOTS, LANES, PACK,
            )  # fmt: skip
            at = words_of(words_ptr, n_barriers, splits)
            tl.store(at + split * WORDS + slots, count)
            tl.store(at + split * WORDS + 8 + slots, mass)
            n_barriers = row_barrier(counter_ptr, n_barriers, splits)
            count = tl.sum(gather(at, 0, splits, SPLITS), axis=0)
            mass = tl.sum(gather(at, 8, splits, SPLITS), axis=0)

            pivots = _pivot(slots, first, low, high, step, shift, top, temperature, PIVOTS)
            enough = tl.where(by_count, count, mass) >= target
            up = (slots < PIVOTS) & enough & (pivots > low)
            down = (slots < PIVOTS) & ~enough & (pivots < high)
            new_low = tl.max(tl.where(up, pivots, low), axis=0)
            new_high = tl.min(tl.where(down, pivots, high), axis=0)
            # Equal pivots have equal counts, so any of them serves. If no pivot is nearer, the old values stay.
            low_count = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, count, 0), axis=0), low_count)
            low_mass = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, mass, 0), axis=0), low_mass)
            high_count = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0), axis=0), high_count)
            high_mass = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, mass, 0), axis=0), high_mass)
            low = new_low
            high = new_high
            first = low > high  # false from now on
        else:
            ties = low_count - high_count
            each = tl.maximum((low_mass - high_mass) // ties, 1)
            wanted = tl.where(by_count, target - high_count, (target - high_mass + each - 1) // each)
            kept = tl.minimum(tl.maximum(wanted, 1), ties)
            cut = (kept < ties) | (low == tied)
            searching = by_count & (top_p < 1.0)
            if searching:
                if cut:
                    tied = low
                    low_mass = high_mass + each * kept
                    low_count = high_count + kept
                by_count = low > high  # false: now by mass
                target = _target(top_p, low_mass)
                high = ceiling
                high_count = zero
                high_mass = zero
                first = searching
    return n_barriers, low, high, kept, cut


@triton.jit
def _draw(
    logits, begin, end, n_cols, top, rate, seed, position, min_p, low, high, cut, kept, before,
    QUADS: tl.constexpr,
):  # fmt: skip
    """The largest sum of logit and noise among the kept columns of the program, with its column.

    For `low`, `high`, `cut` and `kept` see `_threshold`. `before` of the columns between `low` and `high` precede those
    of the program.
    """
    found = tl.full((QUADS,), -(2**63), tl.int64)
    block = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for start in tl.range(begin, end, QUADS * 4, num_stages=1):
        cols = start + block
        mask = cols < n_cols
        _, z = load_logits(logits, cols, mask)
        key = key_of(z)
        exponent = _below(z, top, rate)
        keep = mask & (key >= low)
        if cut:
            tie = (keep & (key < high)).to(tl.int32)
            within = tl.cumsum(tie, axis=1)
            of_quad = tl.sum(tie, axis=1)
            rank = (before + tl.cumsum(of_quad, axis=0) - of_quad)[:, None] + within - tie
            keep &= (key >= high) | (rank < kept)
            before += tl.sum(of_quad, axis=0)
        if min_p > 0.0:
            keep &= tl.exp2(exponent) >= tl.minimum(min_p, 1.0)  # the largest is always kept
        if tl.max(tl.max(keep.to(tl.int32), axis=1), axis=0) > 0:  # most blocks keep nothing, and the noise is costly
            score = with_index(key_of(exponent + noise(seed, position, start, QUADS)), cols)
            found = tl.maximum(found, tl.max(tl.where(keep, score, -(2**63)), axis=1))
    return tl.max(found, axis=0)


@triton.jit
def _ties(logits, begin, end, n_cols, low, high, LANES: tl.constexpr, PACK: tl.constexpr):
    """How many of the program's columns lie between low and high."""
    count = tl.zeros((LANES,), tl.int32)
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    for start in tl.range(begin, end, LANES * PACK, num_stages=1):
        mask = start + block < n_cols
        _, z = load_logits(logits, start + block, mask)
        key = key_of(z)
        count += tl.sum((mask & (key >= low) & (key < high)).to(tl.int32), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def _row(
    row, split, splits, logits, tokens_ptr, logprobs_ptr, words_ptr, counters_ptr, n_cols,
    how, seed, position,
    SHIFT: tl.constexpr, WRITES: tl.constexpr, PIVOTS: tl.constexpr,
    LANES: tl.constexpr, PACK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    temperature, top_k, top_p, min_p = how
    BLOCK: tl.constexpr = LANES * PACK
    share = tl.cdiv(tl.cdiv(n_cols, BLOCK), splits) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, n_cols)
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    n_barriers = split * 0

    # The largest logit, raw and penalized.
    best = tl.full((LANES,), -(2**63), tl.int64)
    raw = tl.full((LANES,), -(2**31), tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        cols = start + block
        mask = cols < n_cols
        x, z = load_logits(logits, cols, mask)
        best = tl.maximum(best, tl.max(tl.where(mask, with_index(key_of(z), cols), -(2**63)), axis=1))
        raw = tl.maximum(raw, tl.max(tl.where(mask, key_of(x), -LARGEST - 1), axis=1))
    at = words_of(words_ptr, n_barriers, splits)
    tl.store(at + split * WORDS, tl.max(best, axis=0))
    tl.store(at + split * WORDS + 1, tl.max(raw, axis=0).to(tl.int64))
    n_barriers = row_barrier(counters_ptr, n_barriers, splits)
    best = largest(at, 0, splits, SPLITS)
    raw_top = value_of(largest(at, 1, splits, SPLITS).to(tl.int32))
    top = value_of(key_in(best))
    draws = (temperature > 0.0) & (top > float("-inf"))  # false for NaN, whose first column is the token
    # `fdiv`: the interpreter of Triton 3.7 and 3.8 divides no constant by a tensor. Never 0: 0 times -inf is NaN.
    rate = tl.maximum(tl.fdiv(LOG2E, tl.where(draws, temperature, 1.0)), 1e-30)

    # The sums of all probabilities: of the raw logits, for the log-probability, and of the distribution to draw from.
    raw_mass = tl.zeros((LANES,), tl.int64)
    mass = tl.zeros((LANES,), tl.int64)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        cols = start + block
        x, z = load_logits(logits, cols, cols < n_cols)
        raw_mass += tl.sum(_mass(_below(x, raw_top, LOG2E)), axis=1)
        mass += tl.sum(_mass(_below(z, top, rate)), axis=1)
    at = words_of(words_ptr, n_barriers, splits)
    tl.store(at + split * WORDS, tl.sum(raw_mass, axis=0))
    tl.store(at + split * WORDS + 1, tl.sum(mass, axis=0))
    n_barriers = row_barrier(counters_ptr, n_barriers, splits)
    sums = tl.sum(gather(at, 0, splits, SPLITS), axis=0)
    total = _at(sums, 0).to(tl.float32) / ONE

    # 16-bit logits differ only in their upper bits, unless some were changed (with biases or counts SHIFT is 0).
    shift = tl.full((), SHIFT, tl.int64)
    if logits[1] is not None:
        shift = tl.where(logits[5] == 1.0, shift, 0)
    low = tl.full((), -(2**31), tl.int64)
    ceiling = ((key_in(best).to(tl.int64) >> shift) + 1) << shift
    n_barriers, low, high, kept, cut = _threshold(
        logits, words_ptr, counters_ptr, split, splits, n_barriers, begin, end, n_cols,
        top, rate, temperature, tl.where(draws, top_k, 0), tl.where(draws, top_p, 1.0), shift, low, ceiling,
        _at(sums, 1), PIVOTS, LANES, PACK, SPLITS,
    )  # fmt: skip

    low = low.to(tl.int32)  # as keys, below that of NaN
    high = high.to(tl.int32)
    before = tl.zeros((), tl.int32)
    if cut:
        at = words_of(words_ptr, n_barriers, splits)
        ties_here = _ties(logits, begin, end, n_cols, low, high, LANES, PACK)
        tl.store(at + split * WORDS, ties_here.to(tl.int64))
        n_barriers = row_barrier(counters_ptr, n_barriers, splits)
        rows = tl.arange(0, SPLITS)
        of_rows = tl.load(at + rows * WORDS, mask=rows < split, other=0, cache_modifier=".cg")
        before += tl.sum(of_rows, axis=0).to(tl.int32)
    if draws:
        drawn = _draw(
            logits, begin, end, n_cols, top, rate, seed, position, min_p, low, high, cut, kept,
            before, LANES,
        )  # fmt: skip
        at = words_of(words_ptr, n_barriers, splits)
        tl.store(at + split * WORDS, drawn)
        best = drawn
    if arrives_last(counters_ptr + 1, splits):
        tl.store(counters_ptr, 0)  # all programs have passed the last barrier
        if draws:
            best = largest(words_of(words_ptr, n_barriers, splits), 0, splits, SPLITS)
        finish(row, best, logits, tokens_ptr, logprobs_ptr, raw_top, total, WRITES)


@triton.jit
def _count(top_k):
    """A count of any width as an int32."""
    return tl.minimum(tl.maximum(top_k, 0), 2147483647).to(tl.int32)


_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "penalty", "seed", "position", "presence", "frequency")


@triton.jit(do_not_specialize=["n_rows", "splits", "groups", *_NUMBERS])
def sample_kernel(
    x_ptr,
    seen_ptr,
    allowed_ptr,
    bias_ptr,
    counts_ptr,
    tokens_ptr,
    logprobs_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    penalty_ptr,
    presence_ptr,
    frequency_ptr,
    seeds_ptr,
    positions_ptr,
    words_ptr,
    counters_ptr,
    stride_x,
    stride_s,
    stride_a,
    stride_b,
    stride_c,
    n_cols,
    n_rows,
    splits,
    groups,
    temperature: tl.float32,
    top_k,
    top_p: tl.float32,
    min_p: tl.float32,
    penalty: tl.float32,
    seed: tl.int64,
    position,
    presence: tl.float32,
    frequency: tl.float32,
    SHIFT: tl.constexpr,
    WRITES: tl.constexpr,
    PIVOTS: tl.constexpr,
    LANES: tl.constexpr,
    PACK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0) % splits
    for row in tl.range(tl.program_id(0) // splits, n_rows, groups):
        at = row.to(tl.int64)
        seen_row = seen_ptr
        if seen_ptr is not None:
            seen_row = seen_ptr + at * stride_s
        x_row = x_ptr + at * stride_x
        words_row = words_ptr + at * (2 * WORDS) * splits
        counters_row = counters_ptr + 2 * row
        how = (
            given(temperature_ptr, temperature, row),
            _count(given(top_k_ptr, top_k, row)),
            given(top_p_ptr, top_p, row),
            given(min_p_ptr, min_p, row),
        )
        logits = (
            x_row,
            seen_row if seen_ptr is not None else None,
            allowed_ptr + at * stride_a if allowed_ptr is not None else None,
            bias_ptr + at * stride_b if bias_ptr is not None else None,
            counts_ptr + at * stride_c if counts_ptr is not None else None,
            given(penalty_ptr, penalty, row),
            given(presence_ptr, presence, row),
            given(frequency_ptr, frequency, row),
        )
        _row(
            row, split, splits, logits, tokens_ptr, logprobs_ptr, words_row, counters_row, n_cols, how,
            given(seeds_ptr, seed, row).to(tl.int64), given(positions_ptr, position, row).to(tl.int32),
            SHIFT, WRITES, PIVOTS, LANES, PACK, SPLITS,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class DrawConfig:
    """A launch of the drawing kernel.

    Attributes:
        pivots: pivots of a pass.
        lanes, pack: a block has `lanes` times `pack` logits.
        num_warps: warps of a program.
        per_sm: resident programs on each SM.
        max_registers: registers of a thread at most, so that those programs fit.
        multiprocessors: SMs of the GPU.
        most_splits: programs that share a row at most. Their words are read as one tile.
    """

    pivots: int
    lanes: int
    pack: int
    num_warps: int
    per_sm: int
    max_registers: int | None
    multiprocessors: int
    most_splits: int = 128

    def programs(self, n_rows: int, n_cols: int) -> tuple[int, int]:
        """Programs that share a row, and rows in work at once, so that all programs are resident."""
        most = self.multiprocessors * self.per_sm
        splits = max(1, min(most // n_rows, library.cdiv(n_cols, self.lanes * self.pack), self.most_splits))
        return splits, min(n_rows, most // splits)


FEW = 16  # below this number of rows the barrier of a pass takes longer than its work


@functools.cache
def config(few: bool, target: runtime.Target) -> DrawConfig:
    """Three pivots halve the search interval twice in a pass. Seven halve it three times for nearly twice the work, and
    take 150 registers a thread: an SM then holds one program of 256 threads."""
    if target is runtime.INTERPRETER:
        return DrawConfig(3, 1024, 4, 4, 1, None, multiprocessors=1, most_splits=4)
    warps = 8 * 32 // target.warp_size
    if few:
        return DrawConfig(7, 256, 4, warps, 1, None, target.multiprocessors)
    limit = 128 if target.warp_size == 32 else None  # AMD's compiler has no such limit
    return DrawConfig(3, 256, 4, warps, 2, limit, target.multiprocessors)


# The low bits of a float32 that are constant if it was converted from that dtype.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@functools.cache
def _launcher(dtypes: tuple[torch.dtype | None, ...], writes: bool, c: DrawConfig) -> launching.KernelLauncher:
    logits, _, _, _, bias, counts, *_ = dtypes
    constants = {
        "SHIFT": _SHIFTS[logits] if bias is counts is None else 0,  # type: ignore[index]
        "WRITES": writes,
        "PIVOTS": c.pivots,
        "LANES": c.lanes,
        "PACK": c.pack,
        "SPLITS": c.most_splits,
    }
    return launching.KernelLauncher(sample_kernel, constants, num_warps=c.num_warps, **resident(c.max_registers))


def prepare(
    tokens: Tensor, logprobs: Tensor, logits: Tensor, tables: Tables, how: Parameters, writes: bool
) -> Callable[..., None]:
    """The launch over such tensors, which are checked, to be called with them. `tables` has those that are used."""
    copies: library.Copies = {}
    rows = library.rows_of(logits, copies, 0)
    (n_rows, n_cols), device = rows.shape, logits.device
    c = config(n_rows < FEW, runtime.target(device))
    splits, groups = c.programs(n_rows, n_cols)
    of_rows = [v if isinstance(v, Tensor) else None for v in how]
    for i, tensor in enumerate(of_rows):
        library.contiguous_of(tensor, copies, 7 + i)
    # Typed by the kernel. Seeds and positions are given by each call.
    *numbers, presence, frequency, _, _ = [0 if isinstance(v, Tensor) else v for v in how]
    tensors = (logits, tokens, tables.seen, tables.mask, tables.logit_bias, tables.counts, *of_rows)
    start = launching.bind(
        _launcher(tuple(None if t is None else t.dtype for t in tensors), writes, c),
        splits * groups,
        strides=(rows.stride(0), *strides_of(tables, copies, 1), n_cols),
        numbers=(n_rows, splits, groups, *numbers, None, None, presence, frequency),
    )
    start = library.copying(start, copies)

    def run(tokens: Tensor, logprobs: Tensor, logits: Tensor, tables: Tables, how: Parameters) -> None:
        words = torch.empty(n_rows * 2 * splits * WORDS.value, dtype=torch.int64, device=device)
        of_rows = [v if isinstance(v, Tensor) else None for v in how]
        varying = [0 if isinstance(v, Tensor) else v for v in how[-2:]]
        counters = launching.counters(2 * n_rows, device)
        changes = (tables.seen, tables.mask, tables.logit_bias, tables.counts)
        start(logits, *changes, tokens, logprobs, *of_rows, words, counters, *varying)

    return run
