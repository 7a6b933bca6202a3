"""A tensor in 8 bits, with its scales: `scale = max(|x|) / largest`, `q = round(x / scale)`.

    row       a scale for each row            activations and weights of a row-wise matrix product
    group     one for every 128 columns       activations of a block-wise one
    block     one for 128 x 128 elements      its weights
    tensor    one, given or the tensor's own  a tensor-wise one

Bytes: x is read, a byte written for each element, and four for each scale. A tensor's own scale takes two kernels: the
first leaves a maximum for each of its programs, the second, which reads x again, takes the maximum of those. A maximum
is the same in any order, so the result is the same on every run.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import quantize
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.quantize import BLOCK, Quantize, check_quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _tile(tile, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile; neighbours have neighbouring columns."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = (tile // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tile % BLOCKS) * BLOCK_N
    return rows[:, None], first, first + tl.arange(0, BLOCK_N)[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def _most_kernel(
    x_ptr, most_ptr, stride_xm, n_rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):
    """The largest magnitude in each program's tiles, as an integer."""
    tiles = tl.cdiv(n_rows, ROWS) * ((N + BLOCK_N - 1) // BLOCK_N)
    most = tl.zeros((ROWS, BLOCK_N), tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows, _, cols = _tile(tile, N, ROWS, BLOCK_N)
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
    """MOST: the scale is that of the maxima at most_ptr, padded to so many; 0 where it is not."""
    rows, first, cols = _tile(tl.program_id(0), N, ROWS, BLOCK_N)
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
def _row_kernel(x_ptr, y_ptr, scale_ptr, stride_xm, N: tl.constexpr, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr):
    """A row that is too long for registers: read twice, the second time out of the L2."""
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
    rows, _, cols = _tile(tl.program_id(0), N, EDGE, EDGE)
    mask = (rows < n_rows) & (cols < N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)

    scale = scale_of(tl.max(tl.max(magnitude(x), axis=1), axis=0), FORMAT)

    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(y_ptr + rows * N + cols, rounded(x * (1.0 / scale), FORMAT, True, y_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows of a tile; of the maximum: programs a multiprocessor, stages."""

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    per_multiprocessor: int = 4
    stages: int = 2


@functools.cache
def config(n_cols: int, itemsize: int, per: str, span: int, target: runtime.Target) -> Config:
    """Tiles as silu_mul's quantised result has them, which is the same but for one input more."""
    if per == "block":
        return Config("block", BLOCK, num_warps=8 * 32 // target.warp_size)
    whole = max(library.power_of_two(n_cols), span)
    if target is runtime.INTERPRETER:
        return Config("tile", max(min(4096, whole), span), num_warps=4, rows=16)
    if span * itemsize > 32768 and per == "row":
        return Config("row", 4096, num_warps=16 * 32 // target.warp_size)
    block_n = max(min(2048, whole), span)
    return Config("tile", block_n, min(32, max(8, block_n // 512)) * 32 // target.warp_size, max(1, 2048 // block_n))


@functools.cache
def _plan(
    n_cols: int, input_dtype: torch.dtype, dtype: str, span: int, most: int, c: Config
) -> launching.KernelLauncher:
    constants = {"N": n_cols, "FORMAT": dtype}
    if c.kernel == "block":
        return launching.KernelLauncher(_block_kernel, {**constants, "EDGE": c.block_n}, num_warps=c.num_warps)
    if c.kernel == "row":
        return launching.KernelLauncher(_row_kernel, {**constants, "BLOCK_N": c.block_n}, num_warps=c.num_warps)
    tile = {"SPAN": span, "MOST": most, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.KernelLauncher(_tile_kernel, {**constants, **tile}, num_warps=c.num_warps)


@functools.cache
def _most_plan(n_cols: int, input_dtype: torch.dtype, c: Config) -> launching.KernelLauncher:
    constants = {"N": n_cols, "ROWS": c.rows, "BLOCK_N": c.block_n, "STAGES": c.stages}
    return launching.KernelLauncher(_most_kernel, constants, num_warps=c.num_warps)


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


def launch(x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    """q and its scales, of an x that was checked."""
    q, scales = outputs(x, scale, dtype, per, group_size)
    if q.numel() == 0:
        return q, scales.fill_(2.0**-126)  # what has no elements has a scale all the same
    x = library.as_rows(x)
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    target = runtime.target(x.device)
    span = 0 if per in ("tensor", "block") else quantize.span(n_cols, per, group_size)
    c = config(n_cols, x.element_size(), per, span, target)
    tiles = library.cdiv(n_rows, BLOCK if per == "block" else c.rows) * library.cdiv(n_cols, c.block_n)
    tensors = (x, quantize.writable(q), scales if scale is None else scale)
    if c.kernel == "block":
        launching.launch(_plan(n_cols, x.dtype, dtype, span, 0, c), tiles, tensors, (x.stride(0),), (n_rows,))
        return q, scales
    if c.kernel == "row":
        launching.launch(_plan(n_cols, x.dtype, dtype, span, 0, c), n_rows, tensors, (x.stride(0),))
        return q, scales
    programs = most = 0
    part = None
    if per == "tensor" and scale is None:
        programs = target.multiprocessors * c.per_multiprocessor
        most = library.power_of_two(programs)
        if isinstance(tiles, int):  # in a graph for any length it is a symbol, on which nothing may depend
            programs = min(programs, tiles)
        part = torch.empty(programs, dtype=torch.int32, device=x.device)
        launching.launch(_most_plan(n_cols, x.dtype, c), programs, (x, part), (x.stride(0),), (n_rows,))
    plan = _plan(n_cols, x.dtype, dtype, span, most, c)
    launching.launch(plan, tiles, (*tensors, part), (x.stride(0),), (n_rows, programs))
    return q, scales


def _launch(x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    check("quantize_tensor", x, per)
    return launch(x, scale, dtype, per, group_size)


def _fake(x: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    check("quantize_tensor", x, per)
    return outputs(x, scale, dtype, per, group_size)


_SCHEMA = "quantize_tensor(Tensor x, Tensor? scale, str dtype, str per, int group_size) -> (Tensor, Tensor)"
_op = library.define(_SCHEMA, launch=_launch, fake=_fake, autograd=quantize.refuse_gradients(_SCHEMA))


def quantize_tensor(x: Tensor, quantize: Quantize | None = None) -> tuple[Tensor, Tensor]:
    """x in 8 bits and its scales; `quantize.dequantize(q, scale)` gives x back, but for the rounding.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16; `(M, N)` for `per="block"`. Any strides; copied only where the
            leading dimensions can't be taken as one, or the last stride is not 1.
        quantize: format and what shares a scale (`rooftile.Quantize`); by default float8_e4m3fn by row. Here
            `per="tensor"` without a scale takes the tensor's own maximum, and `per="block"` is known too.

    Returns:
        q with the shape of x, contiguous, and the float32 scales: `(..., 1)` by row, `(..., ceil(N / group_size))` by
        group, `(ceil(M / 128), ceil(N / 128))` by block, `(1,)` for the tensor's own, and the one that was given.

    Raises:
        ValueError: x has no dimension, or by block not two, or requires grad; a device is the CPU without the
            interpreter, or devices differ.
        TypeError: x's dtype is not one of those, or `quantize` is no `Quantize`.
    """
    quantize = Quantize() if quantize is None else quantize
    check_quantize("quantize_tensor", quantize, fused=False)
    q, scales = _op(x, quantize.scale, quantize.dtype_name, quantize.per, quantize.group_size)
    return q, scales if quantize.scale is None else quantize.scale
