"""How kernels read a weight, and how GEMVs multiply it by one row of x.

A weight has elements of 32 or 16 bits, of 8 bits with a scale for each row, or of 4 bits with a scale for each group of
a row. Scales of groups that are `(N, groups, 2)` have offsets beside them: an offset is added to the elements before
they are scaled. It is 8 minus the zero point of nibbles. A row is stored in columns: its K elements, or for int4 K / 2
bytes, with K / GROUP scales. Byte j of int4 belongs to block j // GROUP. The low nibbles of a block are one group, and
its high nibbles the next. A last group without a second one is a block of its own: half of it in the low nibbles, half
in the high ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.dequantize import as_float32, has_fast_conversions, int4_as_float32
from rooftile.primitives.quantize import writable

import triton  # isort: skip
import triton.language as tl  # isort: skip

_PAIRS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Format(NamedTuple):
    """How a weight's elements are stored: constants of a kernel.

    Attributes:
        has_scale: whether each row has a scale.
        group, groups: elements that share a scale, and scales of a row; 0 where there are no groups.
        pairs: the dtype of scales that are read in pairs, see `view_in_pairs`; "" where they are not.
        has_offsets: whether each group has an offset beside its scale.
        fast_conversions: whether elements become float32 by the PTX of `dequantize.py`.
    """

    has_scale: bool
    group: int
    groups: int
    pairs: str
    has_offsets: bool
    fast_conversions: bool

    @staticmethod
    def of(w: Tensor, scale: Tensor | None, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Format]:
        """The weight and its contiguous scales as a kernel reads them, and their format.

        k is the elements of a row, dtype that of x.
        """
        if scale is None:
            return w, scale, Format(False, 0, 0, "", False, False)
        fast_conversions = has_fast_conversions(runtime.target(w.device))
        if w.dtype != torch.uint8:
            w = writable(w)
            return w, scale, Format(True, 0, 0, "", False, fast_conversions and w.dtype == torch.int8)
        groups, has_offsets = scale.shape[1], scale.dim() == 3
        scale, pairs = view_in_pairs(scale)
        # The PTX gives elements that are 136 too large, and sums lose the bits that an x in float32 needs.
        fast_conversions = fast_conversions and dtype != torch.float32
        return w, scale, Format(False, k // groups, groups, pairs, has_offsets, fast_conversions)

    def constants(self) -> dict[str, Any]:
        """The kernel's constants of these names."""
        return {name.upper(): value for name, value in self._asdict().items()}


def view_in_pairs(scale: Tensor) -> tuple[Tensor, str]:
    """Scales of 16 bits viewed as words of two, where a row has an even number of them, or each with its offset; and
    their dtype, or ""."""
    if scale.shape[-1] % 2 or scale.dtype not in _PAIRS:
        return scale, ""
    if scale.storage_offset() % 2 or scale.stride(0) % 2:  # one row may have any stride
        scale = scale.clone(memory_format=torch.contiguous_format)
    return scale.view(torch.int32), _PAIRS[scale.dtype]


@triton.jit
def unpack_pair(words, PAIRS: tl.constexpr):
    """The two scales of each word."""
    if PAIRS == "bf16":
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def scale_and_offset(scale_ptr, rows, group, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """The scale of a group, and its offset."""
    at = rows * GROUPS + group
    if PAIRS != "":
        return unpack_pair(tl.load(scale_ptr + at), PAIRS)
    else:
        return tl.load(scale_ptr + 2 * at).to(tl.float32), tl.load(scale_ptr + 2 * at + 1).to(tl.float32)


@triton.jit
def block_scales(scale_ptr, rows, block, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """The scales of a block's two groups."""
    if PAIRS != "":
        return unpack_pair(tl.load(scale_ptr + rows * (GROUPS // 2) + block), PAIRS)
    else:
        at = scale_ptr + rows * GROUPS + 2 * block
        return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)


@triton.jit
def elements_of(columns, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The elements of a row that the low nibbles of stored columns hold, and those that the high ones hold."""
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
    """The elements of a vector of K that belong to stored columns of a weight, in a tuple.

    It has one tile, or for GROUP > 0 two: for the low nibbles and for the high ones. EVEN says that all columns are
    `inside`; otherwise those outside give 0.
    """
    if GROUP == 0:
        if EVEN:
            return (tl.load(ptr + columns, eviction_policy=POLICY),)
        else:
            return (tl.load(ptr + columns, mask=inside, other=0.0, eviction_policy=POLICY),)
    else:
        low, high = elements_of(columns, GROUP, GROUPS)
        if EVEN:
            return tl.load(ptr + low, eviction_policy=POLICY), tl.load(ptr + high, eviction_policy=POLICY)
        else:
            a = tl.load(ptr + low, mask=inside, other=0.0, eviction_policy=POLICY)
            return a, tl.load(ptr + high, mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def load_scales(
    scale_ptr, rows, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The scales of BLOCK_K stored columns from k on: of the low nibbles and of the high ones, one for each row and 16
    columns, all in bounds; then the offsets, if there are any. Without groups an empty tuple."""
    if GROUP == 0:
        return ()
    elif HAS_OFFSETS:
        group = (k + tl.arange(0, BLOCK_K // 16) * 16) // GROUP * 2
        low = tl.minimum(group, GROUPS - 1)[:, None]
        high = tl.minimum(group + 1, GROUPS - 1)[:, None]
        first, first_offset = scale_and_offset(scale_ptr, rows[None, :], low, GROUPS, PAIRS)
        second, second_offset = scale_and_offset(scale_ptr, rows[None, :], high, GROUPS, PAIRS)
        return tl.trans(first), tl.trans(second), tl.trans(first_offset), tl.trans(second_offset)
    else:
        # k is the first dimension: each thread then has the scales of its own sums.
        block = (k + tl.arange(0, BLOCK_K // 16) * 16) // GROUP
        block = tl.minimum(block, (GROUPS - 1) // 2)[:, None]
        if PAIRS != "":
            first, second = unpack_pair(tl.load(scale_ptr + rows[None, :] * (GROUPS // 2) + block), PAIRS)
        else:
            at = scale_ptr + rows[None, :] * GROUPS + 2 * block
            first = tl.load(at).to(tl.float32)
            second = tl.load(at + tl.minimum(1, GROUPS - 1 - 2 * block)).to(tl.float32)
        return tl.trans(first), tl.trans(second)


@triton.jit
def in_float32(x):
    """A tuple of one or two tiles in float32."""
    if len(x) == 1:
        return (x[0].to(tl.float32),)
    else:
        return x[0].to(tl.float32), x[1].to(tl.float32)


@triton.jit
def zero_sums(w_ptr, N: tl.constexpr, K: tl.constexpr):
    """Zeros for a thread's sums: one for each element that it loads at once.

    Where elements have 8 or 4 bits, one for all 16 bytes: sixteen would take the registers of another CTA.
    """
    SHARED: tl.constexpr = min(16, K) if w_ptr.dtype.element_ty.primitive_bitwidth == 8 else 1
    return tl.zeros((N, K // SHARED), tl.float32)


@triton.jit
def _sums_by_16(q, x, offset, N: tl.constexpr, SUMS: tl.constexpr, MORE: tl.constexpr):
    """The sums of 16 products each of q, which is too large by MORE, plus the offset if there is one, and x."""
    # A thread has one vector of x, and sums it once for all of its rows.
    x = tl.broadcast_to(x[None, :], q.shape)
    z = tl.sum((q * x).reshape(N, SUMS, 16), axis=2)
    if offset is not None:
        z += (offset - MORE) * tl.sum(x.reshape(N, SUMS, 16), axis=2)
    elif MORE > 0:
        z -= MORE * tl.sum(x.reshape(N, SUMS, 16), axis=2)
    return z


@triton.jit
def add_products(acc, w, x, scales, FAST_CONVERSIONS: tl.constexpr):
    """acc plus the products of a tile of the weight and x, float32. x and scales are tuples of `load_columns` and
    `load_scales`."""
    N: tl.constexpr = acc.shape[0]
    SUMS: tl.constexpr = acc.shape[1]
    if len(x) == 2:
        low, high, more = int4_as_float32(w, FAST_CONVERSIONS)
        if len(scales) == 4:
            acc += _sums_by_16(low, x[0], scales[2], N, SUMS, more) * scales[0]
            acc += _sums_by_16(high, x[1], scales[3], N, SUMS, more) * scales[1]
        else:
            acc += _sums_by_16(low, x[0], None, N, SUMS, more) * scales[0]
            acc += _sums_by_16(high, x[1], None, N, SUMS, more) * scales[1]
    else:
        SHARED: tl.constexpr = w.shape[1] // SUMS
        products = as_float32(w, FAST_CONVERSIONS) * x[0][None, :]
        if SHARED > 1:
            products = tl.sum(products.reshape(N, SUMS, SHARED), axis=2)
        acc += products
    return acc
