"""Parts of the GEMM mainloops for few and many rows, up to the sum; `epilogue.py` has what comes after it.

A mainloop calls those parts that its constants select. Each part takes pointers or tiles, and no context.

    tiles             `divisible`; `grouped_tile`, which the Hopper mainloops call too
    prologue          `norm_weights`, `near_one`: RMSNorm of x. `operand`: fp8 for GPUs that have none
    each step         `multiply_add`, with the scales of the step
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.quantize import BLOCK

import triton  # isort: skip
import triton.language as tl  # isort: skip

EDGE = tl.constexpr(BLOCK)  # elements of the sum, and rows of the weight, that share a scale
# An fp8 operand that is read as bytes is 2^-8 of what it stands for, and so a product of two 2^-16.
UNDO = tl.constexpr(65536.0)


@triton.jit
def divisible(n, BY_16: tl.constexpr):
    """n. With BY_16 the compiler knows that 16 divides it, so that masks up to n are masks of whole vectors."""
    return n // 16 * 16 if BY_16 else n


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and column of a tile, counted in tiles.

    Rasterization: GROUP_M rows of tiles are walked column by column, so that what CTAs read together stays in the L2.
    """
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % width % size, tile % width // size


@triton.jit
def norm_weights(norm_ptr, k, n_inner, OFFSET: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm's weight, plus OFFSET, from element k on. Past the end of the sum the values are arbitrary."""
    if EVEN_K:
        weight = tl.load(norm_ptr + tl.minimum(k, n_inner - BLOCK_K) + tl.arange(0, BLOCK_K))
    else:
        ks = k + tl.arange(0, BLOCK_K)
        weight = tl.load(norm_ptr + ks, mask=ks < n_inner, other=0.0)
    return weight.to(tl.float32) + OFFSET


@triton.jit
def near_one(x):
    """Each row times the power of two that brings its largest element to between 1 and 2, and the inverse power."""
    largest = tl.max(tl.abs(x), axis=1)
    # A float32's exponent is the eight bits after its sign; a NaN's or an infinity's is 255.
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * down[:, None], (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def operand(t):
    """A tile as the tensor cores take it. Bytes of fp8 become float16, exactly: 2^-8 of what they stand for.

    `primitives.dequantize.e4m3_of_bits` multiplies each element by the missing factor; here `UNDO` multiplies the sum.
    """
    if t.dtype == tl.uint8:
        wide = t.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return t


@triton.jit
def multiply_add(
    a, b, acc, a_scale, b_scale, PRECISION: tl.constexpr, FAST: tl.constexpr, APART: tl.constexpr, BLOCK_K: tl.constexpr
):
    """acc + a @ b, and where the step has scales, acc + a @ b * b_scale * a_scale.

    Hopper's tensor cores accumulate fp8 products with some 14 bits. Unless FAST, their sums are added to acc in float32
    every 128 elements. APART: the step is a tl.dot of its own, with a second accumulator, whose instructions are all
    issued at once. Triton's way (max_num_imprecise_acc) takes registers for one instruction more, and waits for each.
    """
    if a_scale is not None or b_scale is not None:
        step = tl.dot(operand(a), operand(b), input_precision=PRECISION)
        if b_scale is not None:
            step *= b_scale
        if a_scale is not None:
            step *= a_scale
        acc += step
    elif FAST or not a.dtype.is_fp8():
        acc = tl.dot(operand(a), operand(b), acc, input_precision=PRECISION)
    elif APART:
        acc += tl.dot(a, b)
    else:
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=min(BLOCK_K, 128))
    return acc


@triton.jit
def x_step_scale(scale_ptr, rows, k, stride_sm, stride_sk):
    """The scales of x's rows for the 128 elements of the sum that k is one of."""
    return tl.load(scale_ptr + rows.to(tl.int64) * stride_sm + (k // EDGE).to(tl.int64) * stride_sk)


@triton.jit
def w_step_scale(scale_ptr, cols, first, k, stride_sn, stride_sk, BLOCK_N: tl.constexpr):
    """The scales of the weight's rows `cols`, from `first` on, for the 128 elements of the sum that k is one of.

    Tiles of at most 128 rows, which share a block, have a single scale.
    """
    at = scale_ptr + (k // EDGE).to(tl.int64) * stride_sk
    if BLOCK_N <= EDGE:
        return tl.load(at + (first // EDGE).to(tl.int64) * stride_sn)
    else:
        return tl.load(at + (cols // EDGE).to(tl.int64) * stride_sn)
