"""A tensor in 8 bits, with its scales: `scale = max(|x|) / largest`, `q = round(x / scale)`.

    row       a scale for each row            activations and weights of a row-wise GEMM
    group     one for every 128 columns       activations of a block-wise GEMM
    block     one for 128 x 128 elements      weights of a block-wise GEMM
    tensor    one, given or the tensor's own  both of a tensor-wise GEMM

Bytes: x is read, and one byte is written for each element and four for each scale. A tensor's own scale takes two
kernels: the first stores a maximum for each of its programs; the second reads x again and takes the maximum of those. A
maximum is the same in any order, so the result is the same on every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gated import quantized_config
from rooftile.primitives import quantize
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.primitives.rows import RowConfig, row_launcher
from rooftile.primitives.tiles import tile_of, tiles
from rooftile.quantize import BLOCK, Quantize, check_quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _most_kernel(
    x_ptr, most_ptr, stride_xm, n_rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):
    """Store the largest magnitude in each program's tiles, as an integer."""
    tiles = tl.cdiv(n_rows, ROWS) * ((N + BLOCK_N - 1) // BLOCK_N)
    most = tl.zeros((ROWS, BLOCK_N), tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows, _, cols = tile_of(tile, N, ROWS, BLOCK_N)
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=(rows < n_rows) & (cols < N), other=0.0)
        most = tl.maximum(most, magnitude(x.to(tl.float32)))
    tl.store(most_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_rows", "n_most"])
def _tile_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    most_ptr,
    stride_xm,
    n_rows,
    n_most,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """With MOST > 0 the scale is that of the maxima at most_ptr, padded to MOST."""
    rows, first, cols = tile_of(tl.program_id(0), N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)

    if MOST > 0:
        parts = tl.arange(0, MOST)
        most = tl.max(tl.load(most_ptr + parts, mask=parts < n_most, other=0), axis=0)
        scale = scale_of(most, FORMAT)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
        y = x * (1.0 / scale)
    else:
        y = divide(x, scale_ptr, rows, rows < n_rows, first, None, N, SPAN, FORMAT)

    tl.store(y_ptr + rows * N + cols, rounded(y, FORMAT, SPAN > 0 or MOST > 0, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _loop_kernel(x_ptr, y_ptr, scale_ptr, stride_xm, N: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program quantizes one row that is too long for registers; it reads it twice, the second time from the L2."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    block = tl.arange(0, BLOCK_N)

    most = tl.zeros((BLOCK_N,), tl.int32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
        most = tl.maximum(most, magnitude(x.to(tl.float32)))
    scale = scale_of(tl.max(most, axis=0), FORMAT)
    tl.store(scale_ptr + row, scale)

    inverse = 1.0 / scale
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = rounded(x * inverse, FORMAT, True, y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + cols, y, mask=cols < N)


@triton.jit(do_not_specialize=["n_rows"])
def _block_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    stride_xm,
    n_rows,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    EDGE: tl.constexpr,
):
    rows, _, cols = tile_of(tl.program_id(0), N, EDGE, EDGE)
    mask = (rows < n_rows) & (cols < N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)

    scale = scale_of(tl.max(tl.max(magnitude(x), axis=1), axis=0), FORMAT)

    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(y_ptr + rows * N + cols, rounded(x * (1.0 / scale), FORMAT, True, y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def config(n_cols: int, itemsize: int, per: str, span: int, target: runtime.Target) -> RowConfig:
    """The tiles of silu_mul's quantized result, which only has one input more."""
    if per == "block":
        return RowConfig("block", BLOCK, num_warps=8 * 32 // target.warp_size)
    return dataclasses.replace(quantized_config(n_cols, itemsize, span, target), stages=2, per_sm=4)


@functools.cache
def _launcher(
    n_cols: int, input_dtype: torch.dtype, dtype: str, span: int, most: int, c: RowConfig
) -> launching.KernelLauncher:
    kernel = {"block": _block_kernel, "loop": _loop_kernel, "tile": _tile_kernel}[c.kernel]
    return row_launcher(kernel, c, N=n_cols, FORMAT=dtype, SPAN=span, MOST=most, EDGE=c.block_n)


@functools.cache
def _most_launcher(n_cols: int, input_dtype: torch.dtype, c: RowConfig) -> launching.KernelLauncher:
    return row_launcher(_most_kernel, c, N=n_cols)


def check(op: str, x: Tensor, per: str) -> None:
    library.check_floating(op, x=x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    if per == "block" and x.dim() != 2:
        raise ValueError(f'{op}: x has shape {tuple(x.shape)}, expected two dimensions for per="block"')


def outputs(x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Fresh q and scales; where the scale is given, `(0,)` for the scales."""
    if per in ("row", "group") or scale is not None:
        return quantize.empty(x, dtype, per, group_size)
    shape = (1,) if per == "tensor" else tuple(library.cdiv(n, BLOCK) for n in x.shape)
    q = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def prepare(
    x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives q and its scales of a checked x and the given scale or None."""
    allocate = quantize.allocator(*outputs(x, scale, dtype, per, group_size))
    if x.numel() == 0:
        return lambda *_: _of_nothing(*allocate())
    copies: library.Copies = {}
    rows = library.rows_of(x, copies, 0)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    target, device = runtime.target(x.device), x.device
    span = 0 if per in ("tensor", "block") else quantize.span(n_cols, per, group_size)
    c = config(n_cols, x.element_size(), per, span, target)
    programs = n_tiles = tiles(n_rows, n_cols, BLOCK if per == "block" else c.rows, c.block_n)
    strides = (rows.stride(0),)
    numbers: tuple[int, ...] = (n_rows,)
    n_most = most = 0
    find_most = None
    if per == "tensor" and scale is None:
        n_most = target.multiprocessors * c.per_sm
        most = library.power_of_two(n_most)
        if isinstance(n_tiles, int):  # symbolic in a graph for any length; nothing may depend on it
            n_most = min(n_most, n_tiles)
        find_most = launching.bind(_most_launcher(n_cols, x.dtype, c), n_most, strides=strides, numbers=numbers)
    if c.kernel == "tile":
        numbers = (n_rows, n_most)
    elif c.kernel == "loop":
        programs, numbers = n_rows, ()
    launcher = _launcher(n_cols, x.dtype, dtype, span, most, c)
    start = launching.bind(launcher, programs, strides=strides, numbers=numbers)

    def run(x: Tensor, scale: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        q, written, scales = allocate()
        if copies:
            x = library.as_rows(x)
        if find_most is not None:
            part = torch.empty(n_most, dtype=torch.int32, device=device)
            find_most(x, part)
            start(x, written, scales, part)
        elif c.kernel == "tile":
            start(x, written, scales if scale is None else scale, None)
        else:
            start(x, written, scales)
        return q, scales

    return run


def _of_nothing(q: Tensor, _: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return q, scales.fill_(2.0**-126)  # an empty tensor has a scale too


def launch(x: Tensor, scale: Tensor | None, *quantized: Any) -> tuple[Tensor, Tensor]:
    """q and its scales, of a checked x."""
    return prepare(x, scale, *quantized)(x, scale)


def _prepare(
    x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    check("quantize_tensor", x, per)
    return prepare(x, scale, dtype, per, group_size)


def _fake(x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    check("quantize_tensor", x, per)
    return outputs(x, scale, dtype, per, group_size)


_op = library.define(
    "quantize_tensor(Tensor x, Tensor? scale, str dtype, str per, int group_size) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
)


def quantize_tensor(x: Tensor, quantize: Quantize | None = None) -> tuple[Tensor, Tensor]:
    """x in 8 bits and its scales; `quantize.dequantize(q, scale)` is x up to rounding.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16; `(M, N)` for `per="block"`. Any strides; copied only if the
            leading dimensions cannot be viewed as one, or if the last stride is not 1.
        quantize: the format and its scales, see `rooftile.Quantize`; float8_e4m3fn by row by default. Here
            `per="tensor"` without a scale takes the tensor's own maximum, and `per="block"` is accepted.

    Returns:
        q with the shape of x, contiguous, and the float32 scales: `(..., 1)` by row, `(..., ceil(N / group_size))` by
        group, `(ceil(M / 128), ceil(N / 128))` by block, `(1,)` for the tensor's own, and the one that was given.

    Raises:
        ValueError: x has no dimension, or not two for `per="block"`, or requires grad; devices differ, or a device is
            the CPU without the interpreter.
        TypeError: x's dtype is not one of those, or `quantize` is not a `Quantize`.
    """
    quantize = Quantize() if quantize is None else quantize
    check_quantize("quantize_tensor", quantize, fused=False)
    q, scales = _op(x, quantize.scale, quantize.dtype_name, quantize.per, quantize.group_size)
    return q, scales if quantize.scale is None else quantize.scale
