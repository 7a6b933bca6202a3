"""Weights as kernels read them, most of all those of one row of x: as numbers of 32 or 16 bits, of 8 with a scale for
each row, of 4 with a scale for each group of a row; and how their products with one row of x are summed.

What is stored of a row are its columns: its K numbers, or of int4 K / 2 bytes with K / GROUP scales. There byte j is of
block j // GROUP, whose low nibbles are one group and whose high ones the next; a last group that has no second is a
block of its own, half of it low and half high.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.dequantize import as_float32, has_tricks, int4_as_float32
from rooftile.primitives.quantize import writable

import triton  # isort: skip
import triton.language as tl  # isort: skip

_PAIRS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Format(NamedTuple):
    """What a kernel is told of a weight's numbers.

    Attributes:
        has_scale: whether each row has a scale.
        group, groups: the numbers that share a scale, and how many scales a row has; 0 where they have none.
        pairs: as `in_pairs` says it.
        tricks: whether numbers become float32 by the chip's own instructions.
    """

    has_scale: bool
    group: int
    groups: int
    pairs: str
    tricks: bool

    @staticmethod
    def of(w: Tensor, scale: Tensor | None, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Format]:
        """A weight of K numbers a row, and its contiguous scales, as a kernel reads them beside an x of that dtype; and
        their format."""
        if scale is None:
            return w, scale, Format(False, 0, 0, "", False)
        tricks = has_tricks(runtime.target(w.device))
        if w.dtype != torch.uint8:
            w = writable(w)
            return w, scale, Format(True, 0, 0, "", tricks and w.dtype == torch.int8)
        groups = scale.shape[1]
        scale, pairs = in_pairs(scale)
        # Numbers that are too large, and sums of them less what that makes, are no match for an x in float32.
        return w, scale, Format(False, k // groups, groups, pairs, tricks and dtype != torch.float32)

    def constants(self) -> dict[str, Any]:
        """A kernel's parameters of these names."""
        return {name.upper(): value for name, value in self._asdict().items()}


def in_pairs(scale: Tensor) -> tuple[Tensor, str]:
    """Scales of 16 bits as words of two, where a row has an even number of them."""
    if scale.shape[-1] % 2 or scale.dtype not in _PAIRS:
        return scale, ""
    if scale.storage_offset() % 2:
        scale = scale.clone()
    return scale.view(torch.int32), _PAIRS[scale.dtype]


@triton.jit
def of_pair(words, PAIRS: tl.constexpr):
    """The two scales of each word."""
    if PAIRS == "bf16":
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def block_scales(scale_ptr, rows, block, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """The scales of a block's two groups."""
    if PAIRS != "":
        return of_pair(tl.load(scale_ptr + rows * (GROUPS // 2) + block), PAIRS)
    else:
        at = scale_ptr + rows * GROUPS + 2 * block
        return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)


@triton.jit
def numbers_of(columns, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Which numbers of a row stored columns' low nibbles are, and their high ones."""
    block = columns // GROUP
    low = columns + block * GROUP
    high = low + GROUP
    if GROUPS % 2 == 1:
        high = low + tl.where(block == GROUPS // 2, GROUP // 2, GROUP)
    return low, high


@triton.jit
def load_columns(
    ptr, columns, inside, GROUP: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr
):
    """What stands in a vector of K elements beside stored columns of a weight: a tuple of one tile, or for GROUP > 0
    two, beside the bytes' low nibbles and their high ones. EVEN: all columns are `inside`; else others give 0."""
    if GROUP == 0:
        if EVEN:
            return (tl.load(ptr + columns, eviction_policy=POLICY),)
        else:
            return (tl.load(ptr + columns, mask=inside, other=0.0, eviction_policy=POLICY),)
    else:
        low, high = numbers_of(columns, GROUP, GROUPS)
        if EVEN:
            return tl.load(ptr + low, eviction_policy=POLICY), tl.load(ptr + high, eviction_policy=POLICY)
        else:
            a = tl.load(ptr + low, mask=inside, other=0.0, eviction_policy=POLICY)
            return a, tl.load(ptr + high, mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def load_scales(
    scale_ptr, rows, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The scales of the low and the high nibbles of BLOCK_K stored columns from k on, one for each row and 16 columns,
    all in bounds; without groups an empty tuple."""
    if GROUP == 0:
        return ()
    else:
        # Along k first: threads then have the scales of what they sum, and none is brought to another.
        block = (k + tl.arange(0, BLOCK_K // 16) * 16) // GROUP
        block = tl.minimum(block, (GROUPS - 1) // 2)[:, None]
        if PAIRS != "":
            first, second = of_pair(tl.load(scale_ptr + rows[None, :] * (GROUPS // 2) + block), PAIRS)
        else:
            at = scale_ptr + rows[None, :] * GROUPS + 2 * block
            first = tl.load(at).to(tl.float32)
            second = tl.load(at + tl.minimum(1, GROUPS - 1 - 2 * block)).to(tl.float32)
        return tl.trans(first), tl.trans(second)


@triton.jit
def in_float32(x):
    """The tiles of a tuple of one or two."""
    if len(x) == 1:
        return (x[0].to(tl.float32),)
    else:
        return x[0].to(tl.float32), x[1].to(tl.float32)


@triton.jit
def no_sums(w_ptr, N: tl.constexpr, K: tl.constexpr):
    """Zeros for a thread's sums: one for each number that it loads at once, but one for all 16 bytes where numbers have
    8 bits or 4, for sixteen would take the registers of another program."""
    SHARED: tl.constexpr = min(16, K) if w_ptr.dtype.element_ty.primitive_bitwidth == 8 else 1
    return tl.zeros((N, K // SHARED), tl.float32)


@triton.jit
def _sums_by_16(q, x, N: tl.constexpr, SUMS: tl.constexpr, MORE: tl.constexpr):
    """The sums of 16 products each of q, which is MORE too large, and x."""
    # What a thread has of x is one vector, whose sums are taken once for all of its rows.
    x = tl.broadcast_to(x[None, :], q.shape)
    z = tl.sum((q * x).reshape(N, SUMS, 16), axis=2)
    if MORE > 0:
        z -= MORE * tl.sum(x.reshape(N, SUMS, 16), axis=2)
    return z


@triton.jit
def add_products(acc, w, x, scales, TRICKS: tl.constexpr):
    """The sums and the products of a tile of the weight with x, float32. x and scales are as `load_columns` and
    `load_scales` give them: of int4 two each, for the low nibbles and the high ones, else one x alone."""
    N: tl.constexpr = acc.shape[0]
    SUMS: tl.constexpr = acc.shape[1]
    if len(x) == 2:
        low, high, more = int4_as_float32(w, TRICKS)
        acc += _sums_by_16(low, x[0], N, SUMS, more) * scales[0]
        acc += _sums_by_16(high, x[1], N, SUMS, more) * scales[1]
    else:
        SHARED: tl.constexpr = w.shape[1] // SUMS
        products = as_float32(w, TRICKS) * x[0][None, :]
        if SHARED > 1:
            products = tl.sum(products.reshape(N, SUMS, SHARED), axis=2)
        acc += products
    return acc
