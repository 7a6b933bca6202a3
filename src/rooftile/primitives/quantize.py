"""Quantized results of kernels that hold them in float32: scales, and the saturating rounding to fp8 or int8.

    scale = max(|y|) / largest,   y_q = round(y / scale)

FORMAT is the name of the torch dtype, or None for a result that is not quantized. NVIDIA GPUs before compute capability
8.9 and AMD's MI300 have no instruction that rounds to float8_e4m3fn or float8_e5m2. There integer arithmetic gives the
same bytes, in some fifteen instructions an element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def magnitude(y):
    """|y| as an integer: the order is that of the floats, and NaN is the largest, so a maximum keeps it."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _not_too_small(scale):
    """At least 2^-126: zeros still give zeros, and both the scale and its reciprocal are normal floats."""
    return tl.where(scale < 2.0**-126, 2.0**-126, scale)  # NaN stays


@triton.jit
def scale_of(most, FORMAT: tl.constexpr):
    """The scale that maps the largest magnitude to the format's largest value."""
    tl.static_assert(FORMAT == "float8_e4m3fn" or FORMAT == "float8_e5m2" or FORMAT == "int8")
    LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0 if FORMAT == "float8_e4m3fn" else 57344.0
    return _not_too_small(most.to(tl.float32, bitcast=True) * (1.0 / LARGEST))


@triton.jit
def given(scale_ptr):
    """The reciprocal of the one scale that the caller gives."""
    return 1.0 / _not_too_small(tl.load(scale_ptr))


@triton.jit
def divide(y, scale_ptr, rows, row_mask, first, inverse, N: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr):
    """y divided by its scale; y itself if it is not quantized (FORMAT is None).

    Each SPAN columns have a scale, which is stored at scale_ptr. With SPAN = 0 the one scale there is read. With
    `inverse`, the reciprocal of a known scale, y is multiplied by it. y is a tile of the result: `rows`, of which those
    in `row_mask` exist, and the columns from `first` on. Elements outside the result are zero.
    """
    if FORMAT is None:
        return y
    elif inverse is not None:
        return y * inverse
    elif SPAN == 0:
        return y * given(scale_ptr)
    else:
        ROWS: tl.constexpr = y.shape[0]
        SPANS: tl.constexpr = y.shape[1] // SPAN
        IN_ROW: tl.constexpr = (N + SPAN - 1) // SPAN
        by_span = tl.reshape(y, (ROWS, SPANS, SPAN))
        scale = scale_of(tl.max(magnitude(by_span), axis=2, keep_dims=True), FORMAT)
        spans = first // SPAN + tl.arange(0, SPANS)[None, :]
        mask = row_mask & (spans < IN_ROW)
        tl.store(scale_ptr + rows * IN_ROW + spans, tl.reshape(scale, (ROWS, SPANS)), mask=mask)
        return tl.reshape(by_span * (1.0 / scale), y.shape)


@triton.jit
def rounded(v, FORMAT: tl.constexpr, IN_RANGE: tl.constexpr, DTYPE: tl.constexpr):
    """v rounded to the format and held as DTYPE: to nearest, ties to even, saturating. NaN becomes 0 in int8.

    IN_RANGE: v was divided by a scale of its own. DTYPE is the format, or uint8 for the bits of an fp8 format; if
    FORMAT is None, it is the dtype of the result.
    """
    if FORMAT is None:
        return v.to(DTYPE)
    elif FORMAT == "int8":
        v = tl.where(v == v, v, 0.0)
        if not IN_RANGE:
            v = tl.minimum(tl.maximum(v, -127.0), 127.0)
        # The sum has no fraction bits, so it is rounded to an integer, whose last byte is the sum's.
        return (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif DTYPE.is_fp8():
        return v.to(DTYPE)
    elif FORMAT == "float8_e4m3fn":
        return _fp8_bits(v, 3, 7, 0x7E)
    else:
        tl.static_assert(FORMAT == "float8_e5m2")
        return _fp8_bits(v, 2, 15, 0x7B)


@triton.jit
def _fp8_bits(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The bits of the fp8 value nearest to v, with MANTISSA bits of mantissa. LARGEST is the largest finite value.

    NaN is 0x7f, as NVIDIA's instruction gives.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = (127 - BIAS) << MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    STEP_IN_LAST_BIT: tl.constexpr = (
        151 - BIAS - MANTISSA
    ) << 23  # the float whose last bit is worth the smallest step

    bits = v.to(tl.int32, bitcast=True)
    most = tl.minimum(bits & 0x7FFFFFFF, (LARGEST + REBIAS) << DROPPED)
    # A carry out of the mantissa goes into the exponent, which is right.
    normal = ((most + ((1 << (DROPPED - 1)) - 1) + ((most >> DROPPED) & 1)) >> DROPPED) - REBIAS
    steps = most.to(tl.float32, bitcast=True) + 2.0 ** (24 - BIAS - MANTISSA)
    subnormal = steps.to(tl.int32, bitcast=True) - STEP_IN_LAST_BIT
    number = tl.where(most < SMALLEST_NORMAL, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(v == v, number, 0x7F).to(tl.uint8)


@functools.cache
def _has_instruction(target: runtime.Target) -> bool:
    """Whether the target rounds float32 to e4m3fn and e5m2 itself: compute capability 8.9 and later."""
    if target is runtime.INTERPRETER:
        return True
    return target.arch.startswith("sm_") and int(target.arch.removeprefix("sm_")) >= 89


def writable(y: Tensor) -> Tensor:
    """y as a kernel writes it: its bytes, if the GPU has no instruction that rounds to fp8."""
    return y if y.dtype == torch.int8 or _has_instruction(runtime.target(y.device)) else y.view(torch.uint8)


def empty(x: Tensor, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialized y and scales for a result of x's shape; the scales are `(0,)` if the scale is given."""
    shape: tuple[int, ...] = (0,)
    if per != "tensor":
        shape = (*x.shape[:-1], library.cdiv(x.shape[-1], group_size) if per == "group" else 1)
    y = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    return y, torch.empty(shape, dtype=torch.float32, device=x.device)


def allocator(y: Tensor, scales: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A function that allocates such a y, its view that a kernel writes (see `writable`), and such scales."""
    as_bytes = writable(y) is not y
    of_y = y.shape, library.contiguous_strides(y.shape)
    of_scales = scales.shape, library.contiguous_strides(scales.shape)
    y_dtype, device = y.dtype, y.device

    def allocate() -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty_strided(*of_y, dtype=y_dtype, device=device)
        scales = torch.empty_strided(*of_scales, dtype=torch.float32, device=device)
        return y, y.view(torch.uint8) if as_bytes else y, scales

    return allocate


def span(n_cols: int, per: str, group_size: int) -> int:
    """The columns that share a scale, as a power of two; 0 if all elements share a given one."""
    return {"row": library.power_of_two(n_cols), "group": group_size, "tensor": 0}[per]
