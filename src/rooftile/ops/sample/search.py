"""The kernel that draws a token, without a sort.

What top-k, top-p and min-p keep of a row is its first so many tokens, in the order of their logits, the lowest index
first among equals. So each comes down to a threshold, which is searched for over the integers that order float32: a
pass over the row counts the tokens at or above a few pivots, and sums their probabilities, and the threshold is left
between two of them. Then one more pass adds Gumbel noise to what is kept; the largest sum is a draw from the
softmax (Gumbel 1954; Maddison et al. 2014, https://arxiv.org/abs/1411.0030).

Probabilities are relative to the largest, in units of 2^-40: sums of integers are the same in any order, so a row's
threshold depends neither on how many programs share it nor on what stands beside it.

Several programs share a row where there are few rows. After each pass is a barrier: each stores its sums in memory and
waits until all have come, then each adds up the sums of all and goes on by itself. All programs must run at once, so
the grid is launched as a cooperative one.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.common import (
    LARGEST,
    LOG2E,
    finish,
    given,
    key_in,
    key_of,
    load_logits,
    noise,
    value_of,
    with_index,
)
from rooftile.ops.sample.row_barrier import WORDS, gather, largest, row_barrier, words_of
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip

ONE = tl.constexpr(float(1 << 40))  # the largest probability; of 2^22 tokens the sum fits an int64


@triton.jit
def _at(vector, i):
    """One entry of a vector of 8."""
    return tl.sum(tl.where(tl.arange(0, 8) == i, vector, 0), axis=0)


@triton.jit
def _below(z, top, rate):
    """log2 of the probability relative to the largest; the largest is right even where it is infinite."""
    return tl.where(z == top, 0.0, (z - top) * rate)


@triton.jit
def _mass(exponent):
    return (tl.exp2(exponent) * ONE).to(tl.int64)


@triton.jit
def _pivot(i, first, low, high, step, shift, top, temperature, PIVOTS: tl.constexpr):
    """Pivot i. At first they lie powers of two, in temperatures, below the largest logit, later evenly."""
    by_key = low + step * (i + 1)
    if first:
        below = (1 << ((i + 1) * 8 // (PIVOTS + 1) - 1)).to(tl.float32)
        by_key = (key_of(top - temperature * below).to(tl.int64) >> shift) << shift
    return tl.minimum(by_key, high)


@triton.jit
def _columns(parts, N: tl.constexpr, LANES: tl.constexpr):
    """Three or seven vectors as the columns of one tile of 8, so that all are added up at once."""
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
    x_ptr, seen_ptr, begin, end, n_cols, penalty, top, rate,
    first, low, high, step, shift, temperature,
    PIVOTS: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Of the program's columns: how many are at or above each pivot, and their mass. Two vectors of 8."""
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
        _, z = load_logits(x_ptr, seen_ptr, cols, mask, penalty)
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
    """The least whole mass that reaches p; one unit at least, so that the largest is kept."""
    wanted = top_p.to(tl.float64) * mass.to(tl.float64)
    target = wanted.to(tl.int64)
    return tl.maximum(target + (target.to(tl.float64) < wanted).to(tl.int64), 1)


@triton.jit
def _threshold(
    x_ptr, seen_ptr, words_ptr, counter_ptr, split, splits, n_barriers, begin, end, n_cols,
    penalty, top, rate, temperature, top_k, top_p, shift, low, ceiling, low_mass,
    PIVOTS: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What top-k and top-p keep: all at or above `high`, and of what lies between `low` and `high` all, or with `cut`
    the first `kept`.

    Two searches, first for k tokens, then for p of the mass that they have. `low` always has enough tokens or mass at
    or above it, `high` has not; a search ends where what is between them is one value, or one token, or just enough.
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
    tied = low - 1  # where equal logits were cut by count, which mass may cut further
    first = searching
    while searching:
        going = (high - low > unit) & (low_count - high_count > 1) & ((low_count > target) | ~by_count)
        if going:
            step = (high - low + (PIVOTS + 1) * unit - 1) // ((PIVOTS + 1) * unit) * unit
            count, mass = _measure(
                x_ptr, seen_ptr, begin, end, n_cols, penalty, top, rate,
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
            # Equal pivots have equal counts; any of them will do. Where none is nearer, the old ones stay.
            low_count = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, count, 0), axis=0), low_count)
            low_mass = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, mass, 0), axis=0), low_mass)
            high_count = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0), axis=0), high_count)
            high_mass = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, mass, 0), axis=0), high_mass)
            low = new_low
            high = new_high
            first = low > high  # no more
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
                by_count = low > high  # mass now
                target = _target(top_p, low_mass)
                high = ceiling
                high_count = zero
                high_mass = zero
                first = searching
    return n_barriers, low, high, kept, cut


@triton.jit
def _draw(
    x_ptr, seen_ptr, begin, end, n_cols, penalty, top, rate, seed, position, min_p, low, high, cut, kept, before,
    QUADS: tl.constexpr,
):  # fmt: skip
    """The largest sum of logit and noise among the program's columns that are kept, with its column.

    Kept is what is at or above `high`; of what lies between `low` and `high` all, or with `cut` the first `kept` of the
    row, of which `before` stand in columns before these.
    """
    found = tl.full((QUADS,), -(2**63), tl.int64)
    block = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for start in tl.range(begin, end, QUADS * 4, num_stages=1):
        cols = start + block
        mask = cols < n_cols
        _, z = load_logits(x_ptr, seen_ptr, cols, mask, penalty)
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
        if tl.max(tl.max(keep.to(tl.int32), axis=1), axis=0) > 0:  # most blocks keep nothing, and noise costs most
            score = with_index(key_of(exponent + noise(seed, position, start, QUADS)), cols)
            found = tl.maximum(found, tl.max(tl.where(keep, score, -(2**63)), axis=1))
    return tl.max(found, axis=0)


@triton.jit
def _ties(x_ptr, seen_ptr, begin, end, n_cols, penalty, low, high, LANES: tl.constexpr, PACK: tl.constexpr):
    """How many of the program's columns lie between low and high."""
    count = tl.zeros((LANES,), tl.int32)
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    for start in tl.range(begin, end, LANES * PACK, num_stages=1):
        mask = start + block < n_cols
        _, z = load_logits(x_ptr, seen_ptr, start + block, mask, penalty)
        key = key_of(z)
        count += tl.sum((mask & (key >= low) & (key < high)).to(tl.int32), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def _row(
    row, split, splits, x_ptr, seen_ptr, tokens_ptr, logprobs_ptr, words_ptr, counters_ptr, n_cols,
    temperature, top_k, top_p, min_p, penalty, seed, position,
    SHIFT: tl.constexpr, WRITES_SEEN: tl.constexpr, PIVOTS: tl.constexpr,
    LANES: tl.constexpr, PACK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * PACK
    share = tl.cdiv(tl.cdiv(n_cols, BLOCK), splits) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, n_cols)
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    n_barriers = split * 0

    # The largest logit, raw and penalised.
    best = tl.full((LANES,), -(2**63), tl.int64)
    raw = tl.full((LANES,), -(2**31), tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        cols = start + block
        mask = cols < n_cols
        x, z = load_logits(x_ptr, seen_ptr, cols, mask, penalty)
        best = tl.maximum(best, tl.max(tl.where(mask, with_index(key_of(z), cols), -(2**63)), axis=1))
        raw = tl.maximum(raw, tl.max(tl.where(mask, key_of(x), -LARGEST - 1), axis=1))
    at = words_of(words_ptr, n_barriers, splits)
    tl.store(at + split * WORDS, tl.max(best, axis=0))
    tl.store(at + split * WORDS + 1, tl.max(raw, axis=0).to(tl.int64))
    n_barriers = row_barrier(counters_ptr, n_barriers, splits)
    best = largest(at, 0, splits, SPLITS)
    raw_top = value_of(largest(at, 1, splits, SPLITS).to(tl.int32))
    top = value_of(key_in(best))
    draws = (temperature > 0.0) & (top > float("-inf"))  # neither for NaN: its first column is the token
    rate = tl.maximum(LOG2E / tl.where(draws, temperature, 1.0), 1e-30)  # never 0: 0 times -inf is NaN

    # The sums of all probabilities: of the raw logits, for the log-probability, and of what is drawn from.
    raw_mass = tl.zeros((LANES,), tl.int64)
    mass = tl.zeros((LANES,), tl.int64)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        cols = start + block
        x, z = load_logits(x_ptr, seen_ptr, cols, cols < n_cols, penalty)
        raw_mass += tl.sum(_mass(_below(x, raw_top, LOG2E)), axis=1)
        mass += tl.sum(_mass(_below(z, top, rate)), axis=1)
    at = words_of(words_ptr, n_barriers, splits)
    tl.store(at + split * WORDS, tl.sum(raw_mass, axis=0))
    tl.store(at + split * WORDS + 1, tl.sum(mass, axis=0))
    n_barriers = row_barrier(counters_ptr, n_barriers, splits)
    sums = tl.sum(gather(at, 0, splits, SPLITS), axis=0)
    total = _at(sums, 0).to(tl.float32) / ONE

    # 16-bit logits differ in their upper bits alone, unless some were divided by a penalty.
    shift = tl.full((), SHIFT, tl.int64)
    if seen_ptr is not None:
        shift = tl.where(penalty == 1.0, shift, 0)
    low = tl.full((), -(2**31), tl.int64)
    ceiling = ((key_in(best).to(tl.int64) >> shift) + 1) << shift
    n_barriers, low, high, kept, cut = _threshold(
        x_ptr, seen_ptr, words_ptr, counters_ptr, split, splits, n_barriers, begin, end, n_cols,
        penalty, top, rate, temperature, tl.where(draws, top_k, 0), tl.where(draws, top_p, 1.0), shift, low, ceiling,
        _at(sums, 1), PIVOTS, LANES, PACK, SPLITS,
    )  # fmt: skip

    low = low.to(tl.int32)  # as keys, below that of NaN
    high = high.to(tl.int32)
    before = tl.zeros((), tl.int32)
    if cut:
        at = words_of(words_ptr, n_barriers, splits)
        ties_here = _ties(x_ptr, seen_ptr, begin, end, n_cols, penalty, low, high, LANES, PACK)
        tl.store(at + split * WORDS, ties_here.to(tl.int64))
        n_barriers = row_barrier(counters_ptr, n_barriers, splits)
        rows = tl.arange(0, SPLITS)
        of_rows = tl.load(at + rows * WORDS, mask=rows < split, other=0, cache_modifier=".cg")
        before += tl.sum(of_rows, axis=0).to(tl.int32)
    if draws:
        drawn = _draw(
            x_ptr, seen_ptr, begin, end, n_cols, penalty, top, rate, seed, position, min_p, low, high, cut, kept,
            before, LANES,
        )  # fmt: skip
        at = words_of(words_ptr, n_barriers, splits)
        tl.store(at + split * WORDS, drawn)
        best = drawn
    if arrives_last(counters_ptr + 1, splits):
        tl.store(counters_ptr, 0)  # all programs have passed the last barrier
        if draws:
            best = largest(words_of(words_ptr, n_barriers, splits), 0, splits, SPLITS)
        finish(row, best, x_ptr, seen_ptr, tokens_ptr, logprobs_ptr, raw_top, total, WRITES_SEEN)


@triton.jit
def _count(top_k):
    """A count of any width as an int32."""
    return tl.minimum(tl.maximum(top_k, 0), 2147483647).to(tl.int32)


_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "penalty", "seed", "position")


@triton.jit(do_not_specialize=["n_rows", "splits", "groups", *_NUMBERS])
def sample_kernel(
    x_ptr,
    seen_ptr,
    tokens_ptr,
    logprobs_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    penalty_ptr,
    seeds_ptr,
    positions_ptr,
    words_ptr,
    counters_ptr,
    stride_x,
    stride_s,
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
    SHIFT: tl.constexpr,
    WRITES_SEEN: tl.constexpr,
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
        _row(
            row, split, splits, x_ptr + at * stride_x, seen_row, tokens_ptr, logprobs_ptr,
            words_ptr + at * (2 * WORDS) * splits, counters_ptr + 2 * row, n_cols,
            given(temperature_ptr, temperature, row), _count(given(top_k_ptr, top_k, row)),
            given(top_p_ptr, top_p, row), given(min_p_ptr, min_p, row), given(penalty_ptr, penalty, row),
            given(seeds_ptr, seed, row).to(tl.int64), given(positions_ptr, position, row).to(tl.int32),
            SHIFT, WRITES_SEEN, PIVOTS, LANES, PACK, SPLITS,
        )  # fmt: skip
