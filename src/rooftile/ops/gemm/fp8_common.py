"""What the kernels of fp8_linear share: the order of tiles, scales, the end of a tile."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem
from rooftile.primitives import quantize
from rooftile.primitives.splitk import arrives_last
from rooftile.quantize import BLOCK

import triton  # isort: skip
import triton.language as tl  # isort: skip

XScale = Literal["tensor", "row", "group"]
WScale = Literal["tensor", "row", "block"]
Key = tuple[int, int, str, str, bool, torch.dtype, torch.dtype, torch.dtype | None, bool]

EDGE = tl.constexpr(BLOCK)
# An operand that is read as bytes is 2^-8 of what it stands for, and so the product 2^-16.
UNDO = tl.constexpr(65536.0)


def plan_key(o: Operands) -> Key:
    """What of a plan is not in its configuration."""
    n, k = o.w.shape
    bias = None if o.bias is None else o.bias.dtype
    read = readable(o)[0].dtype
    return int(n), int(k), o.x_kind, o.w_kind, o.fast, read, o.out.dtype, bias, o.residual is not None


def scale_strides(o: Operands) -> tuple[int, int, int, int]:
    """Of x's scales along its rows and the sum, and of the weight's along its rows and the sum."""
    x = (0, 0) if o.x_scale is None or o.x_kind == "tensor" else o.x_scale.stride()
    w = (0, 0) if o.weight_scale is None or o.w_kind == "tensor" else o.weight_scale.stride()
    return (*x, *w)  # type: ignore[return-value]


def readable(o: Operands) -> tuple[Tensor, Tensor]:
    """x and w as a kernel reads them: where the chip has no fp8, their bytes."""
    return quantize.writable(o.x), quantize.writable(o.w)


def split_memory(o: Operands, tiles: int, c: MatmulConfig) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the partial sums of a split sum, and a counter for each tile."""
    if c.split_k == 1:
        return None, None
    partial = torch.empty((c.split_k, *o.out.shape), dtype=torch.float32, device=o.out.device)
    return partial, launching.counters(tiles, o.out.device)


def constants(key: Key, c: MatmulConfig) -> dict[str, object]:
    """Those that every kernel has."""
    n, k, x_kind, w_kind, fast, *_ = key
    return {
        "N": n,
        "K": k,
        "X_SCALE": x_kind,
        "W_SCALE": w_kind,
        "FAST": fast,
        "APART": c.block_k <= 128 and c.block_m * c.block_n <= 2048 * c.num_warps,  # 64 registers of a thread
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "SPLIT": c.split_k,
    }


def can_implement(p: Problem, c: MatmulConfig) -> str | None:
    """What no kernel can do."""
    if p.scaled_steps and BLOCK % c.block_k:
        return f"block_k is {c.block_k}, expected at most {BLOCK}, the elements of the sum that share a scale"
    if c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32"
    steps = library.cdiv(p.k, c.block_k)
    if c.split_k > max(1, steps):
        return f"split_k is {c.split_k}, expected at most the {steps} steps of {c.block_k} that the sum has"
    return None


@triton.jit
def tile_of(index, n_rows, N: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The place of a tile: GROUP_M tiles of rows, then the next columns, so that what they share stays in the L2."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    group = index // (GROUP_M * TILES_N)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = index % (GROUP_M * TILES_N)
    return group * GROUP_M + inside % rows, inside // rows


@triton.jit
def operand(t):
    """A tile as the matrix unit takes it. Bytes become float16, exactly, and 2^-8 of what they stand for."""
    if t.dtype == tl.uint8:
        wide = t.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return t


@triton.jit
def multiply(a, b, acc, FAST: tl.constexpr, APART: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc + a @ b. Hopper's fp8 sums have few bits: unless FAST they become part of acc every 128 elements.

    APART: by a sum of their own, all of whose instructions are under way at once. It takes as many registers again,
    where Triton's own way (max_num_imprecise_acc) takes those of one instruction, and waits for each.
    """
    if FAST or a.dtype == tl.uint8:
        acc = tl.dot(operand(a), operand(b), acc)
    elif APART:
        acc += tl.dot(a, b)
    else:
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=min(BLOCK_K, 128))
    return acc


@triton.jit
def x_scales(sx_ptr, stride_sxm, stride_sxk, rows, k, X_SCALE: tl.constexpr):
    """Those of the rows, from element k of the sum on."""
    at = sx_ptr + rows.to(tl.int64) * stride_sxm
    if X_SCALE == "group":
        at += (k // EDGE).to(tl.int64) * stride_sxk
    return tl.load(at)


@triton.jit
def w_scales(sw_ptr, stride_swn, stride_swk, first, cols, k, W_SCALE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the weight's rows `cols`, which begin at `first`, from element k of the sum on; one, if they share it."""
    if W_SCALE == "row":
        return tl.load(sw_ptr + cols.to(tl.int64) * stride_swn)
    elif BLOCK_N <= EDGE:
        return tl.load(sw_ptr + (first // EDGE).to(tl.int64) * stride_swn + (k // EDGE).to(tl.int64) * stride_swk)
    else:
        return tl.load(sw_ptr + (cols // EDGE).to(tl.int64) * stride_swn + (k // EDGE).to(tl.int64) * stride_swk)


@triton.jit
def scaled(
    acc,
    x_ptr,
    bias_ptr,
    scales,
    rows,
    cols,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """A tile's sum with the scales that belong to all of it, and the bias; rows and cols are inside the result.

    ROWS_FIRST: acc is (rows, cols), else (cols, rows). `scales`: pointers to x's and the weight's, and their strides.
    """
    sx_ptr, sw_ptr, stride_sxm, stride_swn = scales
    if X_SCALE == "tensor":
        acc *= tl.load(sx_ptr)
    elif X_SCALE == "row":
        acc *= tl.expand_dims(tl.load(sx_ptr + rows.to(tl.int64) * stride_sxm), 1 if ROWS_FIRST else 0)
    if W_SCALE == "tensor":
        acc *= tl.load(sw_ptr)
    elif W_SCALE == "row":
        acc *= tl.expand_dims(tl.load(sw_ptr + cols.to(tl.int64) * stride_swn), 0 if ROWS_FIRST else 1)
    if x_ptr.dtype.element_ty == tl.uint8:
        acc *= UNDO
    if bias_ptr is not None:
        acc += tl.expand_dims(tl.load(bias_ptr + cols).to(tl.float32), 0 if ROWS_FIRST else 1)
    return acc


@triton.jit
def store(z, residual_ptr, out_ptr, at, mask):
    """Round a tile of the result, to which the residual is added where there is one, and write it."""
    if residual_ptr is not None:
        z += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, z.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def exchange(acc, partial_ptr, counter_ptr, part, at, mask, size, SPLIT: tl.constexpr):
    """Leave this part of a tile's sum; whether it was the last, and then the whole sum, in the order of the parts.

    `at` is where the tile's elements lie in one of the partial results, of `size` elements each.
    """
    tl.store(partial_ptr + part.to(tl.int64) * size + at, acc, mask=mask)
    last = arrives_last(counter_ptr, SPLIT)
    if last:
        acc = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(partial_ptr + other * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    return last, acc
