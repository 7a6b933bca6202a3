"""Parts that the kernels share: a row's logits with its options, integer keys in the order of floats, noise."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(0x7FFFFFFF)  # of int32: the key of NaN, above the key of infinity
MOST_COUNTED = tl.constexpr(32767)  # of a token: counts stay there
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32


@triton.jit
def given(ptr, number, row):
    """A parameter of a row: its entry of a tensor, or the number for all rows."""
    if ptr is None:
        return number
    else:
        return tl.load(ptr + row)


@triton.jit
def load_logits(logits, cols, mask):
    """The raw logits at those columns, -inf outside, and those to sample from: masked, biased, and penalized.

    `logits` is of one row: pointers to its logits and, or None, its seen tokens, allowed tokens, biases and counts;
    its repetition, presence and frequency penalty.
    Logits of seen tokens are divided by the first if positive, else multiplied (Keskar et al. 2019,
    https://arxiv.org/abs/1909.05858, as in Hugging Face).
    """
    x_ptr, seen_ptr, allowed_ptr, bias_ptr, counts_ptr, penalty, presence, frequency = logits
    x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    z = x
    if allowed_ptr is not None:
        allowed = tl.load(allowed_ptr + (cols >> 5), mask=mask, other=0)
        z = tl.where(((allowed >> (cols & 31)) & 1) != 0, z, float("-inf"))
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    if seen_ptr is not None:
        word_ptrs = seen_ptr + (cols >> 5)
        if penalty != 1.0:
            words = tl.load(word_ptrs, mask=mask, other=0)
            seen = ((words >> (cols & 31)) & 1) != 0
            # Correctly rounded, so that exact quotients are exact and ties stay ties.
            z = tl.where(seen, tl.where(z > 0.0, tl.div_rn(z, tl.zeros_like(z) + penalty), z * penalty), z)
    if counts_ptr is not None:  # noqa: SIM102  # a constant, then a number
        if (presence != 0.0) | (frequency != 0.0):
            n = tl.load(counts_ptr + cols, mask=mask, other=0).to(tl.float32)
            # An explicit fma: each pass over the row has to round alike.
            z = tl.fma(tl.zeros_like(n) - frequency, n, z - tl.where(n > 0.0, presence, 0.0))
    return x, z


@triton.jit
def key_of(z):
    """int32 in the order of float32. Both zeros have one key; NaN is above all."""
    z = tl.where(z == 0.0, 0.0, z)
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(z == z, bits ^ ((bits >> 31) & LARGEST), LARGEST)


@triton.jit
def value_of(key):
    """The float32 with this key."""
    return (key ^ ((key >> 31) & LARGEST)).to(tl.float32, bitcast=True)


@triton.jit
def with_index(key, cols):
    """Key and column in one int64. The maximum has the largest key, and among equal keys the lowest column."""
    return (key.to(tl.int64) << 32) + (LARGEST - cols)


@triton.jit
def column_of(best):
    return LARGEST - (best & 0xFFFFFFFF)


@triton.jit
def key_in(best):
    return (best >> 32).to(tl.int32)


@triton.jit
def gumbel(bits):
    """Gumbel noise times log2(e), of 32 random bits: -log2(-ln(1 - u)), u = (bits + 1/2) / 2^32 rounded to float32.

    The noise is large where u is small. There u has full float32 precision, and so must ln(1 - u).
    """
    u = tl.minimum((bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return -tl.log2(tl.where(u < 0.015625, small, -tl.log(1.0 - u)))


@triton.jit
def noise(seed, position, first, QUADS: tl.constexpr):
    """Gumbel noise for QUADS x 4 columns from `first`, a multiple of 4: a function of seed, position and column only.

    Philox (Salmon et al. 2011) with the seed as key and (column // 4, position, 0, 0) as counter gives four words, one
    for each of four adjacent columns.
    """
    counter = first // 4 + tl.arange(0, QUADS)
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + position, zero, zero)
    lane = tl.arange(0, 4)[None, :]
    bits = tl.where(lane < 2, tl.where(lane == 0, a[:, None], b[:, None]), tl.where(lane == 2, c[:, None], d[:, None]))
    return gumbel(bits)


@triton.jit
def finish(row, best, logits, tokens_ptr, logprobs_ptr, top, total, WRITES: tl.constexpr):
    """Store a row's token and its log-probability. `total` is the sum of exp(x - top). With WRITES the token is seen,
    and counted, where there are bits and counts."""
    token = column_of(best)
    x = tl.load(logits[0] + token).to(tl.float32)
    tl.store(tokens_ptr + row, token.to(tokens_ptr.dtype.element_ty))
    tl.store(logprobs_ptr + row, (x - top) - tl.log(total))
    if WRITES:
        if logits[1] is not None:
            word_ptr = logits[1] + (token >> 5)
            tl.store(word_ptr, tl.load(word_ptr) | (1 << (token & 31)).to(tl.int32))
        if logits[4] is not None:
            count_ptr = logits[4] + token
            tl.store(count_ptr, tl.minimum(tl.load(count_ptr).to(tl.int32) + 1, MOST_COUNTED).to(tl.int16))


class Tables(NamedTuple):
    """What changes the logits of each row: bits of seen tokens, counts of generated ones, biases, allowed tokens."""

    seen: Tensor | None = None
    counts: Tensor | None = None
    logit_bias: Tensor | None = None
    mask: Tensor | None = None


def strides_of(tables: Tables, copies: library.Copies, place: int) -> tuple[int | None, ...]:
    """Row strides of seen tokens (0 without), allowed tokens, biases and counts, at those places of a launch."""
    if tables.logit_bias is not None:
        library.rows_of(tables.logit_bias, copies, place + 2)
    bias = None if tables.logit_bias is None else library.as_rows(tables.logit_bias)
    mask, counts = (None if t is None else t.stride(0) for t in (tables.mask, tables.counts))
    return 0 if tables.seen is None else tables.seen.stride(0), mask, None if bias is None else bias.stride(0), counts


class Parameters(NamedTuple):
    """How each row is sampled: tensors with an entry for each row, or numbers for all rows."""

    temperature: Tensor | float
    top_k: Tensor | int
    top_p: Tensor | float
    min_p: Tensor | float
    repetition_penalty: Tensor | float
    presence_penalty: Tensor | float
    frequency_penalty: Tensor | float
    seeds: Tensor | int
    positions: Tensor | int

    @property
    def greedy(self) -> bool:
        """Whether the host knows that no row draws."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def penalties(self) -> tuple[Tensor | float, ...]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def penalized(self) -> bool:
        return isinstance(self.repetition_penalty, Tensor) or self.repetition_penalty != 1

    @property
    def counting(self) -> bool:
        """Whether a penalty depends on the counts of generated tokens."""
        return any(isinstance(x, Tensor) or x != 0 for x in (self.presence_penalty, self.frequency_penalty))
