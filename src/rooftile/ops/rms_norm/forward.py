"""RMSNorm forward: two kernels, by the length of a row, each with the residual add and with the quantized result.

- tile: a program holds whole rows in registers: short rows;
- loop: a program reads its row twice, the second time from the L2, which holds the rows in flight. The longest rows
  exceed the L2: a program then holds its first blocks in registers, and is so large that an SM runs one at a time. A
  quantized result with one scale for the row takes a third pass, which finds the largest element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import quantize
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.primitives.rows import RowConfig, row_launcher

import triton  # isort: skip
import triton.language as tl  # isort: skip

Rounding = Literal["llama", "gemma", "none"]
ROUNDINGS = ("llama", "gemma", "none")


@triton.jit
def _scale(xhat, weight, OFFSET: tl.constexpr, DTYPE: tl.constexpr, CAST_FIRST: tl.constexpr):
    """xhat * (weight + offset). CAST_FIRST: xhat is rounded to the model's dtype first, as Llama does."""
    if CAST_FIRST:
        xhat = xhat.to(DTYPE).to(tl.float32)
    if OFFSET != 0.0:  # the compiler may not drop a sum with zero, which turns -0 into 0
        weight += OFFSET
    return xhat * weight


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
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
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
        y = _scale(y, weight, OFFSET, x_ptr.dtype.element_ty, CAST_FIRST)

    y = divide(y, scale_ptr, rows, rows < n_rows, 0, None, N, SPAN, FORMAT)
    tl.store(y_ptr + rows * N + cols, rounded(y, FORMAT, SPAN > 0, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
    x_ptr,
    residual_ptr,
    u_ptr,
    cols,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    POLICY: tl.constexpr,
):
    """u at those columns: x, or the rounded sum of x and the residual, which is stored."""
    u = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy=POLICY)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        u = (u.to(tl.float32) + residual.to(tl.float32)).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + cols, u, mask=cols < N)
    return u


@triton.jit
def _result(
    u,
    weight_ptr,
    rstd,
    cols,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The float32 result at those columns."""
    y = u.to(tl.float32) * rstd
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = _scale(y, weight, OFFSET, DTYPE, CAST_FIRST)
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
    HELD: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    RESULT: tl.constexpr = y_ptr.dtype.element_ty
    ROW_SCALE: tl.constexpr = FORMAT is not None and SPAN >= N
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if HAS_RESIDUAL:
        residual_ptr += row * stride_rm
        u_ptr += row * N
    block = tl.arange(0, BLOCK_N)[None, :]

    held = ()
    for i in tl.static_range(HELD):
        first = _sum(x_ptr, residual_ptr, u_ptr, i * BLOCK_N + block, N, HAS_RESIDUAL, "evict_first")
        held += (first,)  # type: ignore[assignment]
    # Not pipelined: Triton's pipelining through shared memory made it a fifth slower on an H200.
    squares = tl.zeros((1, BLOCK_N), tl.float32)
    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        u = _sum(x_ptr, residual_ptr, u_ptr, start + block, N, HAS_RESIDUAL, "evict_last").to(tl.float32)
        squares += u * u
    for i in tl.static_range(HELD):
        squares += held[i].to(tl.float32) * held[i].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + EPS)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # other threads may have written what is read below
        x_ptr = u_ptr

    inverse = None
    if ROW_SCALE:
        most = tl.zeros((1, BLOCK_N), tl.int32)
        for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
            cols = start + block
            again = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
            y = _result(again, weight_ptr, rstd, cols, OFFSET, N, HAS_WEIGHT, CAST_FIRST, DTYPE)
            most = tl.maximum(most, magnitude(y))
        for i in tl.static_range(HELD):
            cols = i * BLOCK_N + block
            y = _result(held[i], weight_ptr, rstd, cols, OFFSET, N, HAS_WEIGHT, CAST_FIRST, DTYPE)
            most = tl.maximum(most, magnitude(y))
        row_scale = scale_of(tl.max(most, axis=1), FORMAT)
        tl.store(scale_ptr + row + tl.arange(0, 1), row_scale)
        inverse = (1.0 / row_scale)[:, None]

    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        cols = start + block
        again = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        y = _result(again, weight_ptr, rstd, cols, OFFSET, N, HAS_WEIGHT, CAST_FIRST, DTYPE)
        y = divide(y, scale_ptr, row, True, start, inverse, N, SPAN, FORMAT)
        tl.store(y_ptr + cols, rounded(y, FORMAT, SPAN > 0, RESULT), mask=cols < N, cache_modifier=".cs")
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        y = _result(held[i], weight_ptr, rstd, cols, OFFSET, N, HAS_WEIGHT, CAST_FIRST, DTYPE)
        y = divide(y, scale_ptr, row, True, i * BLOCK_N, inverse, N, SPAN, FORMAT)
        tl.store(y_ptr + cols, rounded(y, FORMAT, SPAN > 0, RESULT), mask=cols < N, cache_modifier=".cs")


@functools.cache
def config(n_cols: int, itemsize: int, residual: bool, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 from some hundred configurations at each length, in bf16 and for the longest in float32 too.

    Fractions of a copy's speed, bf16, without and with the residual: 0.97 and 0.97 at 16384 columns, 0.96 and 0.94 at
    65536, 0.91 and 0.88 at 131072, where the rows in flight are 35 MB, less the held blocks.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 2048:
        warps = block_n // 256 if block_n > 1024 else 4
        return RowConfig("tile", block_n, warps, rows=max(2, 2048 // block_n))
    if residual and 3072 < n_cols < 4096:  # 3584: the last block of a loop would be half empty
        return RowConfig("tile", 4096, num_warps=4)
    if n_cols <= 4096:
        block_n = 1024 if residual and n_cols < 4096 else 2048
        return RowConfig("loop", block_n, num_warps=8 if n_cols == 4096 else 4)
    if n_cols * itemsize <= 65536:
        return RowConfig("loop", 4096 if n_cols <= 8192 else 8192, num_warps=16 // per_warp)
    # 1024 threads, so an SM runs one program at a time and the rows in flight fit the L2.
    if itemsize == 4:
        held = 3 if n_cols <= 65536 else 4
    else:
        held = 1 if residual else 2 if n_cols <= 65536 else 3
    return RowConfig("loop", 32768 // itemsize, num_warps=32 // per_warp, held=held)


@functools.cache
def quantized_config(n_cols: int, itemsize: int, span: int, target: runtime.Target) -> RowConfig:
    """On an H200 (bf16, fractions of a copy's speed) 0.94 at 4096 columns and 0.91 at 8192 with a scale for each row,
    0.92 and 0.91 with one for each group, 1.00 and 0.98 with a given one; with the residual 0.97 to 0.99."""
    block_n = max(library.power_of_two(n_cols), span)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    if block_n <= 256:
        return RowConfig("tile", block_n, num_warps=4, rows=2048 // block_n)
    row_scale = span >= n_cols
    per_warp = target.warp_size // 32
    if block_n * itemsize <= (32768 if row_scale else 8192):
        warps = min(16, block_n // (1024 if block_n > 2048 else 512)) // per_warp
        return RowConfig("tile", block_n, max(1, warps))
    return RowConfig("loop", 4096 if row_scale else max(4096, span), 8 // per_warp)


@functools.cache
def _launcher(
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    residual: bool,
    eps: float,
    offset: float,
    cast_first: bool,
    result_format: str | None,
    span: int,
    c: RowConfig,
) -> launching.KernelLauncher:
    return row_launcher(
        _tile_kernel if c.kernel == "tile" else _loop_kernel,
        c,
        EPS=eps,
        OFFSET=offset,
        N=n_cols,
        HAS_RESIDUAL=residual,
        HAS_WEIGHT=dtypes[1] is not None,
        CAST_FIRST=cast_first,
        FORMAT=result_format,
        SPAN=span,
    )


def check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
) -> None:
    """Raise unless the arguments of an op are valid."""
    library.check_floating(op, x=x, weight=weight)
    library.check_numbers(op, eps=eps, offset=offset)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    if residual is not None:
        library.check_same(op, "residual", residual, "x", x)
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
        )
    if weight is None and offset != 0.0:
        raise ValueError(f"{op}: offset is {offset}, expected 0 without a weight to add it to")
    check_rounding(op, rounding)


def check_rounding(op: str, rounding: str) -> None:
    """Raise ValueError unless it is one of `ROUNDINGS`."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op}: rounding is {rounding!r}, expected one of {', '.join(ROUNDINGS)}")


def prepare(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    quantized: tuple[str, str, int] | None = None,
) -> Callable[..., None]:
    """A launch, called with x, residual, weight, y, u, scales; u is None without a residual.

    `quantized` is dtype, per and group_size of a `rooftile.Quantize`. Without it the scales are None.
    """
    check(op, x, residual, weight, eps, offset, rounding)
    if x.numel() == 0:
        return library.start_nothing
    copies: library.Copies = {}
    rows = library.rows_of(x, copies, 0)
    stride_r = 0 if residual is None else library.rows_of(residual, copies, 1).stride(0)
    library.contiguous_of(weight, copies, 2)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    target = runtime.target(x.device)
    if quantized is None:
        result_format, span = None, 0
        c = config(n_cols, x.element_size(), residual is not None, target)
    else:
        result_format, span = quantized[0], quantize.span(n_cols, *quantized[1:])
        c = quantized_config(n_cols, x.element_size(), span, target)
    dtypes = (x.dtype, None if weight is None else weight.dtype)
    cast_first = rounding == "llama"
    launcher = _launcher(n_cols, dtypes, residual is not None, eps, offset, cast_first, result_format, span, c)
    programs = library.cdiv(n_rows, c.rows)
    start = launching.bind(launcher, programs, strides=(rows.stride(0), stride_r), numbers=(n_rows,))
    return library.copying(start, copies)


def _prepare_launch(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    start = prepare(op, x, residual, weight, eps, offset, rounding)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device

    def run(
        op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, *_: object
    ) -> tuple[Tensor, Tensor | None]:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        u = None if residual is None else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, residual, weight, y, u, None)
        return y, u

    return run


# y and u, for other ops that norm; u is None without a residual.
launch = library.Prepared(_prepare_launch)


def _called(residual: Tensor | None) -> str:
    """The public function that was called, for errors."""
    return "rms_norm" if residual is None else "add_rms_norm"


def _prepare_quantized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    *quantized: Any,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    start = prepare(_called(residual), x, residual, weight, eps, offset, rounding, quantized)
    allocate = quantize.allocator(*quantize.empty(x, *quantized))
    u_shape = (0,) if residual is None else x.shape

    def run(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, scale: Tensor | None, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, written, scales = allocate()
        u = torch.empty(u_shape, dtype=x.dtype, device=x.device)
        start(x, residual, weight, written, None if residual is None else u, scales if scale is None else scale)
        return y, u, scales

    return run


def _fake_quantized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    *quantized: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    check(_called(residual), x, residual, weight, eps, offset, rounding)
    y, scales = quantize.empty(x, *quantized)
    return y, torch.empty((0,) if residual is None else x.shape, dtype=x.dtype, device=x.device), scales


# add_rms_norm shares it. u is `(0,)` without a residual, and the scales are if the scale is given: an op may not return
# one of its arguments.
quantized_op = library.define(
    "rms_norm_quantized(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, float eps, float offset, "
    "str rounding, str dtype, str per, int group_size) -> (Tensor, Tensor, Tensor)",
    prepare=_prepare_quantized,
    fake=_fake_quantized,
    called=lambda args: _called(args[1]),
)
