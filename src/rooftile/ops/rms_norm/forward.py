"""RMSNorm forward: two kernels, by the length of a row.

- tile: a program holds whole rows in registers: short rows;
- loop: a program reads its row twice, the second time out of the L2, which holds the rows in flight. The longest rows
  are too much for it: of them a program holds the first blocks in registers, and is so large that a multiprocessor
  runs one alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.rms_norm.common import check, scale

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
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
        y = scale(y, weight, OFFSET, y_ptr.dtype.element_ty, CAST_FIRST)

    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


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
def _finish(
    weight_ptr,
    y_ptr,
    u,
    rstd,
    cols,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):
    y = u.to(tl.float32) * rstd
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = scale(y, weight, OFFSET, y_ptr.dtype.element_ty, CAST_FIRST)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HELD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if HAS_RESIDUAL:
        residual_ptr += row * stride_rm
        u_ptr += row * N
    block = tl.arange(0, BLOCK_N)

    held = ()
    for i in tl.static_range(HELD):
        first = _sum(x_ptr, residual_ptr, u_ptr, i * BLOCK_N + block, N, HAS_RESIDUAL, "evict_first")
        held += (first,)  # type: ignore[assignment]
    # Not pipelined: through shared memory, as Triton would have it, it took a fifth longer on an H200.
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        u = _sum(x_ptr, residual_ptr, u_ptr, start + block, N, HAS_RESIDUAL, "evict_last").to(tl.float32)
        squares += u * u
    for i in tl.static_range(HELD):
        squares += held[i].to(tl.float32) * held[i].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + EPS)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # what is read below was written above, by other threads perhaps
        x_ptr = u_ptr

    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        cols = start + block
        again = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        _finish(weight_ptr, y_ptr, again, rstd, cols, OFFSET, N, HAS_WEIGHT, CAST_FIRST)
    for i in tl.static_range(HELD):
        _finish(weight_ptr, y_ptr, held[i], rstd, i * BLOCK_N + block, OFFSET, N, HAS_WEIGHT, CAST_FIRST)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows of a tile; blocks of a row that the loop kernel holds."""

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    held: int = 0


@functools.cache
def config(n_cols: int, itemsize: int, residual: bool, target: runtime.Target) -> Config:
    """Chosen on an H200 from some hundred configurations at each length, in bf16 and the longest in float32 too.

    Parts of a copy's speed, bf16, alone and with the residual: 0.97 and 0.97 at 16384 columns, 0.96 and 0.94 at 65536,
    0.91 and 0.88 at 131072, where the rows in flight are 35 MB less what is held.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 2048:
        return Config("tile", block_n, num_warps=block_n // 256 if block_n > 1024 else 4, rows=max(2, 2048 // block_n))
    if residual and 3072 < n_cols < 4096:  # 3584: a loop's last block would be half empty
        return Config("tile", 4096, num_warps=4)
    if n_cols <= 4096:
        return Config("loop", 1024 if residual and n_cols < 4096 else 2048, num_warps=8 if n_cols == 4096 else 4)
    if n_cols * itemsize <= 65536:
        return Config("loop", 4096 if n_cols <= 8192 else 8192, num_warps=16 // per_warp)
    # A thousand threads: a multiprocessor runs one program at a time, and the rows in flight fit the L2.
    if itemsize == 4:
        held = 3 if n_cols <= 65536 else 4
    else:
        held = 1 if residual else 2 if n_cols <= 65536 else 3
    return Config("loop", 32768 // itemsize, num_warps=32 // per_warp, held=held)


@functools.cache
def _launcher(
    n_cols: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    residual: bool,
    eps: float,
    offset: float,
    cast_first: bool,
    c: Config,
) -> launching.KernelLauncher:
    flags = {
        "EPS": eps,
        "OFFSET": offset,
        "N": n_cols,
        "HAS_RESIDUAL": residual,
        "HAS_WEIGHT": weight_dtype is not None,
        "CAST_FIRST": cast_first,
    }
    if c.kernel == "tile":
        return launching.KernelLauncher(
            _tile_kernel, {**flags, "ROWS": c.rows, "BLOCK_N": c.block_n}, num_warps=c.num_warps
        )
    return launching.KernelLauncher(
        _loop_kernel, {**flags, "BLOCK_N": c.block_n, "HELD": c.held}, num_warps=c.num_warps
    )


def prepare(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Callable[..., None]:
    """What writes y, and u where there is a residual: called with x, residual, weight, y, u."""
    check(op, x, residual, weight, eps, offset, rounding)
    if x.numel() == 0:
        return library.start_nothing
    copies: library.Copies = {}
    rows = library.rows_of(x, copies, 0)
    stride_r = 0 if residual is None else library.rows_of(residual, copies, 1).stride(0)
    library.contiguous_of(weight, copies, 2)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    c = config(n_cols, x.element_size(), residual is not None, runtime.target(x.device))
    weight_dtype = None if weight is None else weight.dtype
    launcher = _launcher(n_cols, x.dtype, weight_dtype, residual is not None, eps, offset, rounding == "llama", c)
    programs = library.cdiv(n_rows, c.rows)
    start = launching.bind(launcher, programs, strides=(rows.stride(0), stride_r), numbers=(n_rows,))
    return library.copying(start, copies)


def launch(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor | None]:
    """y, and u where there is a residual."""
    start = prepare(op, x, residual, weight, eps, offset, rounding)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    u = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    start(x, residual, weight, y, u)
    return y, u
