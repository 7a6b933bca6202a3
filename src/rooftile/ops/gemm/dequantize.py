"""The GEMM of many rows of x: the weight is dequantized to x's dtype once, and a dense GEMM follows.

The other kernels dequantise a weight as often as there are tiles of x's rows. Here it is done once, and costs the way
to memory and back, 4 bytes for each element of 16 bits; the dense GEMM then runs the tensor cores at their full rate.
What is multiplied is rounded to x's dtype with its scale, as a dense weight would be. Some rows of the weight are
dequantised at a time, so that beside it there is never more than AT_A_TIME, or 256 rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem
from rooftile.primitives.dequantize import as_float32, int4_as_float32
from rooftile.primitives.weights import Format, elements_of, load_scales

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Bytes of the weight in x's dtype: half of the largest GEMM of Llama-3-8B, 4096 -> 28672, and the whole of others.
AT_A_TIME = 128 << 20


@triton.jit
def _by_16(q, scale, offset, N: tl.constexpr, K: tl.constexpr):
    """q, plus the offset of each row and 16 columns if there is one, times their scale."""
    q = q.reshape(N, K // 16, 16)
    if offset is not None:
        q += offset[:, :, None]
    return (q * scale[:, :, None]).reshape(N, K)


@triton.jit(do_not_specialize=["n_rows"])
def _dequantize_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    stride_wn,
    columns,
    n_rows,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    FAST_CONVERSIONS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of BLOCK_N rows and BLOCK_K stored columns; neighbours have neighbouring columns."""
    tiles = tl.cdiv(columns, BLOCK_K)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = (tl.program_id(0) % tiles) * BLOCK_K
    cols = first + tl.arange(0, BLOCK_K)
    mask = (rows < n_rows)[:, None] & (cols < columns)[None, :]
    w = tl.load(w_ptr + rows[:, None] * stride_wn + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    rows = tl.minimum(rows, n_rows - 1)  # in bounds, so that scales need no mask
    if HAS_SCALE:
        y = as_float32(w, FAST_CONVERSIONS) * tl.load(scale_ptr + rows).to(tl.float32)[:, None]
        tl.store(out_ptr + rows[:, None] * columns + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        low, high, more = int4_as_float32(w, FAST_CONVERSIONS)
        scales = load_scales(scale_ptr, rows, first, GROUP, GROUPS, PAIRS, HAS_OFFSETS, BLOCK_K)
        low = _by_16(low - more, scales[0], scales[2] if HAS_OFFSETS else None, BLOCK_N, BLOCK_K)
        high = _by_16(high - more, scales[1], scales[3] if HAS_OFFSETS else None, BLOCK_N, BLOCK_K)
        at, at_high = elements_of(cols, GROUP, GROUPS)
        out = out_ptr + rows[:, None] * (2 * columns)
        tl.store(out + at[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + at_high[None, :], high.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _plan(dtypes: tuple[torch.dtype, ...], form: Format, c: GemmConfig) -> launching.KernelLauncher:
    block_k = c.block_k // 2 if form.group else c.block_k
    constants = {**form.constants(), "BLOCK_N": c.block_n, "BLOCK_K": block_k}
    return launching.KernelLauncher(_dequantize_kernel, constants, num_warps=c.num_warps)


def dequantized(w: Tensor, scale: Tensor, dtype: torch.dtype, k: int, c: GemmConfig) -> Tensor:
    """The weight `(N, K)` in that dtype, of int8 or float8_e4m3fn `(N, K)`, or uint8 `(N, K/2)`, contiguous along K."""
    n, columns = w.shape
    out = torch.empty((n, k), dtype=dtype, device=w.device)
    w, read, form = Format.of(w, scale, k, dtype)
    plan = _plan((w.dtype, scale.dtype, dtype), form, c)
    tiles = library.cdiv(n, c.block_n) * library.cdiv(columns, plan.constants["BLOCK_K"])
    launching.launch(plan, tiles, (w, read, out), (w.stride(0), columns), (n,))
    return out


def rows_at_a_time(n: int, k: int, itemsize: int) -> int:
    """Rows of the weight: all, or equal parts of whole tiles of the GEMM, 256 rows."""
    most = max(1, AT_A_TIME // (256 * max(1, k * itemsize))) * 256
    return library.cdiv(n, library.cdiv(n, most) * 256) * 256 if n > most else n


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute that problem so; None where it can."""
    if p.dtype == torch.float16:
        return "kernel 'dequantize' takes float32 and bfloat16; float16 might not hold an element times its scale"
    for name in ("block_m", "split_k", "num_stages"):
        if getattr(c, name) != 1:
            return f"{name} is {getattr(c, name)}, expected 1 for kernel 'dequantize'"
    if c.prefetch is not None:
        return f"prefetch is {c.prefetch}, expected None for kernel 'dequantize'"
    if p.group and c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32 for kernel 'dequantize' and a weight of 4 bits"
    elements = c.block_n * c.block_k
    if elements > 128 * c.num_warps * target.warp_size:
        return f"block_n x block_k is {elements} elements for {c.num_warps} warps, more than 128 a thread"
    return None


def launch(o: Operands, c: GemmConfig) -> None:
    """Dequantize the weight, some rows at a time, and multiply by the dense GEMM."""
    assert o.weight_scale is not None, "the weight is quantized"
    n, k = o.w.shape[0], o.x.shape[1]
    step = rows_at_a_time(n, k, o.x.element_size())
    for first in range(0, n, step):
        part = slice(first, first + step)
        weight = dequantized(o.w[part], o.weight_scale[part], o.x.dtype, k, c)
        of_part = [None if t is None else t[..., part] for t in (o.bias, o.residual)]
        dispatch.gemm("dequantize", o.x, weight, o.out[:, part], *of_part)
        del weight  # before there is memory for the next
