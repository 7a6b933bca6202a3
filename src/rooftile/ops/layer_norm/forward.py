"""LayerNorm forward: two kernels, by the length of a row.

- tile: a program holds whole rows in registers, and takes the squares about a mean that it knows;
- loop: a program reads its row twice, the second time out of the L2. The first reading keeps mean and M2 for each
  column of a block (Welford 1962), which are combined at the end: two waits a row, however long it is. Of the longest
  rows, which are too much for the L2, it holds the first block in registers.

Where gradients will be asked for, each row's statistics are kept for the backward: mean, 1/std and `rest / std` (see
common.py), which saves it two waits a row for 12 bytes.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.layer_norm.common import STATS, STRIDE, centre, check, combine, inverse_std

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _keep(stats_ptr, row, mean, rest, rstd, mask):
    stats_ptr += row * STRIDE
    tl.store(stats_ptr, mean, mask=mask)
    tl.store(stats_ptr + 1, rstd, mask=mask)
    tl.store(stats_ptr + 2, rest * rstd, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    stride_xm,
    n_rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_STATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < N)

    x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)

    mean, centred, rest, m2 = centre(x, cols < N, N, 1)
    rstd = inverse_std(m2, EPS, N)
    if KEEPS_STATS:
        _keep(stats_ptr, rows, mean, rest, rstd, rows < n_rows)
    y = centred * rstd - rest * rstd
    if HAS_WEIGHT:
        y *= weight
    if HAS_BIAS:
        y += bias

    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    weight_ptr,
    bias_ptr,
    y_ptr,
    x,
    mean,
    rest,
    rstd,
    cols,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    y = (x.to(tl.float32) - mean) * rstd - rest * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    stride_xm,
    n_rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_STATS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HELD: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    block = tl.arange(0, BLOCK_N)

    held = ()
    for i in tl.static_range(HELD):
        first = tl.load(
            x_ptr + i * BLOCK_N + block, mask=i * BLOCK_N + block < N, other=0.0, eviction_policy="evict_first"
        )
        held += (first,)  # type: ignore[assignment]
    means = tl.zeros((BLOCK_N,), tl.float32)
    m2s = tl.zeros((BLOCK_N,), tl.float32)
    for i in tl.static_range(HELD):
        delta = held[i].to(tl.float32) - means
        if N < HELD * BLOCK_N:
            delta = tl.where(i * BLOCK_N + block < N, delta, 0.0)
        means += delta * (1.0 / (i + 1))
        m2s += delta * (held[i].to(tl.float32) - means)
    # Not pipelined: through shared memory, as Triton would have it, rms_norm's loop took a fifth longer on an H200.
    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        cols = start + block
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        delta = x - means
        if N % BLOCK_N != 0:
            delta = tl.where(cols < N, delta, 0.0)
        means += delta * (BLOCK_N / (start + BLOCK_N))
        m2s += delta * (x - means)
    counts = tl.where(block + (BLOCKS - 1) * BLOCK_N < N, BLOCKS, BLOCKS - 1).to(tl.float32)
    mean, rest, m2 = combine(means, m2s, counts, N)
    rstd = inverse_std(m2, EPS, N)
    if KEEPS_STATS:
        _keep(stats_ptr, row, mean, rest, rstd, True)

    for start in tl.range(HELD * BLOCK_N, N, BLOCK_N, num_stages=1):
        cols = start + block
        again = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        _finish(weight_ptr, bias_ptr, y_ptr, again, mean, rest, rstd, cols, N, HAS_WEIGHT, HAS_BIAS)
    for i in tl.static_range(HELD):
        _finish(weight_ptr, bias_ptr, y_ptr, held[i], mean, rest, rstd, i * BLOCK_N + block, N, HAS_WEIGHT, HAS_BIAS)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows of a tile; blocks of a row that the loop kernel holds."""

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    held: int = 0


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> Config:
    """Chosen on an H200 (bf16) from some twenty configurations at each length.

    Parts of a copy's speed: 0.97 at 1024 columns, 0.94 and 0.95 at 4096 and 8192, 0.91 at 16384, 0.78 at 65536 and 0.75
    at 131072. The longer a row, the more of the L2's speed goes into reading weight and bias with each.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 512:
        return Config("tile", block_n, num_warps=4, rows=2048 // block_n)
    if n_cols < 2048 and n_cols != 1024:
        return Config("tile", block_n, num_warps=2)
    # A thousand threads: a multiprocessor runs one program at a time. On gfx942 they would spill a thousand bytes.
    if n_cols * itemsize > 65536 and per_warp == 1:
        held = 1 if n_cols * itemsize <= 131072 else 0
        return Config("loop", 32768 // itemsize, num_warps=32, held=held)
    longest = {1024: (512, 2), 3072: (1024, 4), 4095: (512, 4), 4096: (1024, 4), 8192: (4096, 8)}
    block, warps = next((longest[n] for n in longest if n_cols <= n), (4096, 16))
    return Config("loop", block, num_warps=warps // per_warp)


@functools.cache
def _plan(
    n_cols: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    keeps_stats: bool,
    c: Config,
) -> launching.KernelLauncher:
    flags = {
        "EPS": eps,
        "N": n_cols,
        "HAS_WEIGHT": weight_dtype is not None,
        "HAS_BIAS": bias_dtype is not None,
        "KEEPS_STATS": keeps_stats,
    }
    if c.kernel == "tile":
        return launching.KernelLauncher(
            _tile_kernel, {**flags, "ROWS": c.rows, "BLOCK_N": c.block_n}, num_warps=c.num_warps
        )
    return launching.KernelLauncher(
        _loop_kernel, {**flags, "BLOCK_N": c.block_n, "HELD": c.held}, num_warps=c.num_warps
    )


def launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_stats: bool
) -> tuple[Tensor, Tensor]:
    """y, and the statistics of the rows; empty where they are not kept."""
    y, stats = fake(x, weight, bias, eps, keeps_stats)
    if x.numel() == 0:
        return y, stats
    x = library.as_rows(x)
    weight_dtype = bias_dtype = None
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
    if bias is not None:
        bias, bias_dtype = bias.contiguous(), bias.dtype
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    c = config(n_cols, x.element_size(), runtime.target(x.device))
    plan = _plan(n_cols, x.dtype, weight_dtype, bias_dtype, eps, keeps_stats, c)
    tensors = (x, weight, bias, y, stats if keeps_stats else None)
    launching.launch(plan, library.cdiv(n_rows, c.rows), tensors, (x.stride(0),), (n_rows,))
    return y, stats


def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_stats: bool) -> tuple[Tensor, Tensor]:
    check("layer_norm", x, weight, bias, eps)
    rows = x.numel() // x.shape[-1] if keeps_stats else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty((rows, STATS), dtype=torch.float32, device=x.device)
