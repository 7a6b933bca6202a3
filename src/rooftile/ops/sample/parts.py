"""Parts that the kernels share: penalized logits, integer keys in the order of floats, random numbers of a row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(0x7FFFFFFF)  # of int32: the key of NaN, above the key of infinity
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32


@triton.jit
def given(ptr, number, row):
    """A parameter of a row: its entry of a tensor, or the number for all rows."""
    if ptr is None:
        return number
    else:
        return tl.load(ptr + row)


@triton.jit
def load_logits(x_ptr, seen_ptr, cols, mask, penalty):
    """The raw logits at those columns, -inf outside, and the penalized ones. Logits of seen tokens are divided by the
    penalty if positive, else multiplied (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, as in Hugging Face)."""
    x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    z = x
    if seen_ptr is not None:
        word_ptrs = seen_ptr + (cols >> 5)
        if penalty != 1.0:
            words = tl.load(word_ptrs, mask=mask, other=0)
            seen = ((words >> (cols & 31)) & 1) != 0
            # Correctly rounded, so that exact quotients are exact and ties stay ties.
            z = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty), x)
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
def finish(row, best, x_ptr, seen_ptr, tokens_ptr, logprobs_ptr, top, total, WRITES_SEEN: tl.constexpr):
    """Store a row's token and its log-probability, and mark the token as seen. `total` is the sum of exp(x - top)."""
    token = column_of(best)
    x = tl.load(x_ptr + token).to(tl.float32)
    tl.store(tokens_ptr + row, token.to(tokens_ptr.dtype.element_ty))
    tl.store(logprobs_ptr + row, (x - top) - tl.log(total))
    if WRITES_SEEN:
        word_ptr = seen_ptr + (token >> 5)
        tl.store(word_ptr, tl.load(word_ptr) | (1 << (token & 31)).to(tl.int32))


class Parameters(NamedTuple):
    """How each row is sampled: tensors with an entry for each row, or numbers for all rows."""

    temperature: Tensor | float
    top_k: Tensor | int
    top_p: Tensor | float
    min_p: Tensor | float
    repetition_penalty: Tensor | float
    seeds: Tensor | int
    positions: Tensor | int

    @property
    def greedy(self) -> bool:
        """Whether the host knows that no row draws."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def penalized(self) -> bool:
        return isinstance(self.repetition_penalty, Tensor) or self.repetition_penalty != 1
