"""RMSNorm with a quantised result, for a matrix product that follows: y leaves the float32 registers as fp8 or int8.

Bytes: what the forward reads, then one byte for each element, and four for each scale. Two kernels, by the length of a
row:

- tile: a program holds whole rows in registers, so that it has a row's statistics and scale before it writes anything;
- loop: longer rows are read again, out of the L2, once their statistics are known: once where a scale is given or
  belongs to a group of columns, twice where it belongs to the row.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.rms_norm.common import check, scale
from rooftile.primitives import quantize
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.quantize import Quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    scale_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < N)

    u = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
        u = (u + residual).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + rows * N + cols, u, mask=mask)
        u = u.to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)

    y = u * tl.rsqrt(tl.sum(u * u, axis=1, keep_dims=True) / N + EPS)
    if HAS_WEIGHT:
        y = scale(y, weight, OFFSET, x_ptr.dtype.element_ty, CAST_FIRST)

    y = divide(y, scale_ptr, rows, rows < n_rows, 0, N, SPAN, FORMAT)
    tl.store(y_ptr + rows * N + cols, rounded(y, FORMAT, SPAN > 0, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part(
    u_ptr,
    weight_ptr,
    cols,
    rstd,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Those columns of a row's float32 result."""
    y = tl.load(u_ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION).to(tl.float32) * rstd
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = scale(y, weight, OFFSET, u_ptr.dtype.element_ty, CAST_FIRST)
    return y


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    scale_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if HAS_RESIDUAL:
        residual_ptr += row * stride_rm
        u_ptr += row * N
    block = tl.arange(0, BLOCK_N)[None, :]

    squares = tl.zeros((1, BLOCK_N), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        u = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
            u = (u + residual.to(tl.float32)).to(u_ptr.dtype.element_ty)
            tl.store(u_ptr + cols, u, mask=cols < N)
            u = u.to(tl.float32)
        squares += u * u
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + EPS)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # what is read below was written above, by other threads perhaps
        x_ptr = u_ptr

    ONE_SCALE: tl.constexpr = SPAN >= N  # it is the row's
    if ONE_SCALE:
        most = tl.zeros((1, BLOCK_N), tl.int32)
        for start in tl.range(0, N, BLOCK_N, num_stages=1):
            y = _part(x_ptr, weight_ptr, start + block, rstd, OFFSET, N, HAS_WEIGHT, CAST_FIRST, "evict_last")
            most = tl.maximum(most, magnitude(y))
        row_scale = scale_of(tl.max(most, axis=1), FORMAT)
        tl.store(scale_ptr + row + tl.arange(0, 1), row_scale)
        inverse = (1.0 / row_scale)[:, None]

    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        y = _part(x_ptr, weight_ptr, cols, rstd, OFFSET, N, HAS_WEIGHT, CAST_FIRST, "evict_first")
        if ONE_SCALE:
            y = y * inverse
        else:
            y = divide(y, scale_ptr, row, True, start, N, SPAN, FORMAT)
        tl.store(
            y_ptr + cols, rounded(y, FORMAT, SPAN > 0, y_ptr.dtype.element_ty), mask=cols < N, cache_modifier=".cs"
        )


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows that a program of the tile kernel holds."""

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1


@functools.cache
def config(n_cols: int, itemsize: int, span: int, target: runtime.Target) -> Config:
    """On an H200 (bf16, parts of a copy's speed) 0.94 at 4096 columns and 0.91 at 8192 with a scale a row, 0.92 and
    0.91 with one a group, 1.00 and 0.98 with one given; with the residual 0.97 to 0.99."""
    block_n = max(library.power_of_two(n_cols), span)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, rows=16)
    if block_n <= 256:
        return Config("tile", block_n, num_warps=4, rows=2048 // block_n)
    one_scale = span >= n_cols
    per_warp = target.warp_size // 32
    if block_n * itemsize <= (32768 if one_scale else 8192):
        warps = min(16, block_n // (1024 if block_n > 2048 else 512)) // per_warp
        return Config("tile", block_n, max(1, warps))
    return Config("loop", 4096 if one_scale else max(4096, span), 8 // per_warp)


@functools.cache
def _plan(
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    residual: bool,
    eps: float,
    offset: float,
    cast_first: bool,
    dtype: str,
    span: int,
    c: Config,
) -> launching.KernelLauncher:
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "N": n_cols,
        "HAS_RESIDUAL": residual,
        "HAS_WEIGHT": dtypes[1] is not None,
        "CAST_FIRST": cast_first,
        "FORMAT": dtype,
        "SPAN": span,
    }
    if c.kernel == "tile":
        return launching.KernelLauncher(
            _tile_kernel, {**constants, "ROWS": c.rows, "BLOCK_N": c.block_n}, num_warps=c.num_warps
        )
    return launching.KernelLauncher(_loop_kernel, {**constants, "BLOCK_N": c.block_n}, num_warps=c.num_warps)


def launch(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: str,
    per: str,
    group_size: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, u where there is a residual, and the scales, `(0,)` where the scale is given."""
    check(op, x, residual, weight, eps, offset, rounding)
    y, scales = quantize.empty(x, dtype, per, group_size)
    u = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else None
    if x.numel() == 0:
        return y, u, scales
    x = library.as_rows(x)
    residual = library.as_rows(residual) if residual is not None else None
    weight_dtype = None
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    span = quantize.span(n_cols, per, group_size)
    c = config(n_cols, x.element_size(), span, runtime.target(x.device))
    dtypes = (x.dtype, weight_dtype)
    has_residual, cast_first = residual is not None, rounding == "llama"
    plan = _plan(n_cols, dtypes, has_residual, eps, offset, cast_first, dtype, span, c)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    tensors = (x, residual, weight, quantize.writable(y), u, scales if scale is None else scale)
    launching.launch(plan, library.cdiv(n_rows, c.rows), tensors, strides, (n_rows,))
    return y, u, scales


# The ops. A scale that was given does not come back from them: an op may not return what it was called with.

_MODE = "float eps, float offset, str rounding, str dtype, str per, int group_size"


def _launch(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: str,
    per: str,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    mode = (eps, offset, rounding, dtype, per, group_size)
    y, _, scales = launch("rms_norm_quantized", x, None, weight, scale, *mode)
    return y, scales


def _fake(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: str,
    per: str,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    check("rms_norm_quantized", x, None, weight, eps, offset, rounding)
    return quantize.empty(x, dtype, per, group_size)


def _launch_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: str,
    per: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    mode = (eps, offset, rounding, dtype, per, group_size)
    y, u, scales = launch("add_rms_norm_quantized", x, residual, weight, scale, *mode)
    assert u is not None, "there is a residual"
    return y, u, scales


def _fake_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: str,
    per: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check("add_rms_norm_quantized", x, residual, weight, eps, offset, rounding)
    y, scales = quantize.empty(x, dtype, per, group_size)
    return y, torch.empty(x.shape, dtype=x.dtype, device=x.device), scales


_SCHEMA = f"rms_norm_quantized(Tensor x, Tensor? weight, Tensor? scale, {_MODE}) -> (Tensor, Tensor)"
_ADD_SCHEMA = (
    f"add_rms_norm_quantized(Tensor x, Tensor residual, Tensor? weight, Tensor? scale, {_MODE}) "
    "-> (Tensor, Tensor, Tensor)"
)
_op = library.define(_SCHEMA, launch=_launch, fake=_fake, autograd=quantize.refuse_gradients(_SCHEMA))
_add_op = library.define(
    _ADD_SCHEMA, launch=_launch_add, fake=_fake_add, autograd=quantize.refuse_gradients(_ADD_SCHEMA)
)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str, q: Quantize
) -> tuple[Tensor, Tensor]:
    y, scales = _op(x, weight, q.scale, eps, offset, rounding, q.dtype_name, q.per, q.group_size)
    return y, scales if q.scale is None else q.scale


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str, q: Quantize
) -> tuple[Tensor, Tensor, Tensor]:
    mode = (eps, offset, rounding, q.dtype_name, q.per, q.group_size)
    y, u, scales = _add_op(x, residual, weight, q.scale, *mode)
    return y, u, scales if q.scale is None else q.scale
