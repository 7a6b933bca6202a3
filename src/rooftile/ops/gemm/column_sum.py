"""Besides the GEMMs of a backward: sums over rows, and an activation with its residual.

Sums are float32 and in a fixed order: the result is the same on every run.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.activations import activate
from rooftile.primitives.partials import accumulate, sum_partials

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _column_sum_kernel(
    x_ptr,
    out_ptr,
    stride_xm,
    stride_xn,
    n_rows,
    n_cols,
    COMPENSATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program has its columns, and every so many-th tile of rows; neighbours have neighbouring columns."""
    blocks = tl.cdiv(n_cols, BLOCK_N)
    lane = tl.program_id(0) // blocks
    step = tl.num_programs(0) // blocks * ROWS
    cols = ((tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    col_offsets = cols.to(tl.int64) * stride_xn
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    lost = tl.zeros((ROWS, BLOCK_N), tl.float32)

    for start in tl.range(lane * ROWS, n_rows, step, num_stages=1):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        x = tl.load(x_ptr + rows * stride_xm + col_offsets, mask=mask, other=0.0)
        acc, lost = accumulate(acc, lost, x.to(tl.float32), COMPENSATED)

    total = tl.sum(acc, axis=0, keep_dims=True)
    out_ptrs = out_ptr + lane.to(tl.int64) * n_cols + cols
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _activate_add_kernel(
    z_ptr,
    residual_ptr,
    out_ptr,
    stride_rm,
    n_rows,
    n_cols,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = act(z) + residual."""
    blocks = tl.cdiv(n_cols, BLOCK_N)
    rows = ((tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = ((tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < n_rows) & (cols < n_cols)

    z = tl.load(z_ptr + rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)

    out = activate(z, ACTIVATION) + residual

    tl.store(out_ptr + rows * n_cols + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class ColumnSumConfig:
    """The tile of a step of a program, its warps, and the programs an SM where rows are shared out."""

    rows: int
    block_n: int
    num_warps: int
    per_sm: int = 1


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> ColumnSumConfig:
    """16 bytes a thread, as `bias_gelu`'s sum over rows has them, of which these are the sizes."""
    if target is runtime.INTERPRETER:
        return ColumnSumConfig(rows=16, block_n=min(4096, library.power_of_two(n_cols)), num_warps=4)
    block_n = max(32, min(1024 // itemsize, library.power_of_two(n_cols)))
    return ColumnSumConfig(rows=max(1, 8192 // itemsize // block_n), block_n=block_n, num_warps=4, per_sm=4)


@functools.cache
def _sum_plan(dtypes: tuple[torch.dtype, torch.dtype], c: ColumnSumConfig) -> launching.KernelLauncher:
    constants = {"COMPENSATED": dtypes[0] is torch.float32, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.KernelLauncher(_column_sum_kernel, constants, num_warps=c.num_warps)


# Over so many columns a row of partial sums is no longer small, and there are programs enough without.
_SHARED_COLUMNS = 1 << 20


def column_sum(x: Tensor, out: Tensor) -> None:
    """`out`, `(N,)` and contiguous, becomes the sum over the rows of x, `(M, N)` of any strides."""
    n_rows, n_cols = x.shape
    if tuple(out.shape) != (n_cols,):
        raise ValueError(f"column_sum: out has shape {tuple(out.shape)}, expected ({n_cols},) to match x's columns")
    if n_cols == 0:
        return
    target = runtime.target(x.device)
    c = config(min(4096, int(n_cols)), x.element_size(), target)
    blocks = library.cdiv(n_cols, c.block_n)
    lanes = 1
    if n_cols <= _SHARED_COLUMNS:
        lanes = max(1, min(target.multiprocessors * c.per_sm // blocks, library.cdiv(n_rows, 4 * c.rows)))
    to = out if lanes == 1 else torch.empty((lanes, n_cols), dtype=torch.float32, device=x.device)
    plan = _sum_plan((x.dtype, to.dtype), c)
    launching.launch(plan, blocks * lanes, (x, to), (x.stride(0), x.stride(1)), (n_rows, n_cols))
    if lanes > 1:
        sum_partials(to, out)


@functools.cache
def _add_plan(dtypes: tuple[torch.dtype, ...], activation: str, c: ColumnSumConfig) -> launching.KernelLauncher:
    constants = {"ACTIVATION": activation, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.KernelLauncher(_activate_add_kernel, constants, num_warps=c.num_warps)


def activate_add(z: Tensor, residual: Tensor, out: Tensor, activation: str) -> None:
    """`out = act(z) + residual`: all `(M, N)`, z and out contiguous, residual with a last stride of 1."""
    n_rows, n_cols = z.shape
    c = config(min(4096, int(n_cols)), z.element_size(), runtime.target(z.device))
    plan = _add_plan((z.dtype, residual.dtype, out.dtype), activation, c)
    programs = library.cdiv(n_rows, c.rows) * library.cdiv(n_cols, c.block_n)
    launching.launch(plan, programs, (z, residual, out), (residual.stride(0),), (n_rows, n_cols))
