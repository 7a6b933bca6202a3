"""LayerNorm over the last dimension (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450).

    y = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps),   var = mean((x - mean)^2)

Bytes: the forward reads x and writes y. The backward reads dy and x and writes dx:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (x - mean) * rstd
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

If a gradient is needed, the forward keeps 12 bytes a row for the backward: mean, 1/std and rest/std. Recomputing them
would add two reductions a row, which cost at least a tenth of the speed on an H200.

Each program of a persistent grid accumulates dweight and dbias in float32 registers. The partial sums are added in a
fixed order, so the result is the same on every run.

The mean that a sum and a division give is off by a rounding of its own size. That matters where a row's mean is large
against its spread, and it moves a constant row off its bias. So the forward also sums what the mean has missed, `rest`,
together with the squares. This costs one addition an element and no further reduction:

    xhat = (x - mean) * rstd - rest * rstd

Kernels, chosen by the length of a row:

- forward tile: a program holds whole rows in registers and sums the squares about the mean;
- forward loop: a program reads its row twice, the second time from the L2. The first pass keeps a mean and an M2 for
  each column of a block (Welford 1962) and combines them at the end: two reductions a row, however long it is. The
  longest rows exceed the L2, so their first block stays in registers;
- backward tile: a program holds whole rows, prefetches the next ones into shared memory, and keeps its part of dweight
  and dbias in registers;
- backward split: several programs share a long row and exchange its two sums. Each keeps its columns' part of dweight
  and dbias in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.cta_exchange import gather, publish_pair, split, sum_pairs
from rooftile.primitives.partials import accumulate, prepare_sum
from rooftile.primitives.rows import RowConfig, row_launcher, stages_that_fit

import triton  # isort: skip
import triton.language as tl  # isort: skip

STATS = 3  # statistics kept of a row: mean, 1/std, rest/std
STRIDE = tl.constexpr(STATS)


@triton.jit
def centre(x, mask, count, AXIS: tl.constexpr):
    """The mean of the `count` elements of x in the mask, x minus the mean, `rest`, and the sum of squares about both.

    Reducing the second axis of a tile keeps that axis.
    """
    mean = tl.sum(x, axis=AXIS, keep_dims=AXIS == 1) / count
    centred = tl.where(mask, x - mean, 0.0)
    rest = tl.sum(centred, axis=AXIS, keep_dims=AXIS == 1) / count
    m2 = tl.sum(centred * centred, axis=AXIS, keep_dims=AXIS == 1) - count * rest * rest
    return mean, centred, rest, m2


@triton.jit
def combine(means, m2s, counts, N: tl.constexpr):
    """The statistics of a row from those of its parts, of any lengths (Chan, Golub and LeVeque 1983, eq. 2.1)."""
    mean = tl.sum(counts * means, axis=0) / N
    offsets = means - mean
    rest = tl.sum(counts * offsets, axis=0) / N
    m2 = tl.sum(m2s + counts * offsets * offsets, axis=0) - N * rest * rest
    return mean, rest, m2


@triton.jit
def inverse_std(m2, EPS: tl.constexpr, N: tl.constexpr):
    """1 / sqrt(var + eps). Rounding can make the sum of squares of a constant row slightly negative."""
    return tl.rsqrt(tl.where(m2 < 0.0, 0.0, m2) / N + EPS)


def check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 0.0) -> None:
    library.check_floating(op, x=x, weight=weight, bias=bias)
    library.check_numbers(op, eps=eps)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(vector.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
            )


# Forward


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
    # Not pipelined: Triton's pipelining through shared memory made rms_norm's loop a fifth slower on an H200.
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


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 (bf16) from some twenty configurations at each length.

    Fractions of a copy's speed: 0.97 at 1024 columns, 0.94 and 0.95 at 4096 and 8192, 0.91 at 16384, 0.78 at 65536 and
    0.75 at 131072. The longer a row, the larger the share of the L2's bandwidth that weight and bias take.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 512:
        return RowConfig("tile", block_n, num_warps=4, rows=2048 // block_n)
    if n_cols < 2048 and n_cols != 1024:
        return RowConfig("tile", block_n, num_warps=2)
    # 1024 threads, so an SM runs one program at a time. On gfx942 they would spill a thousand bytes.
    if n_cols * itemsize > 65536 and per_warp == 1:
        held = 1 if n_cols * itemsize <= 131072 else 0
        return RowConfig("loop", 32768 // itemsize, num_warps=32, held=held)
    longest = {1024: (512, 2), 3072: (1024, 4), 4095: (512, 4), 4096: (1024, 4), 8192: (4096, 8)}
    block, warps = next((longest[n] for n in longest if n_cols <= n), (4096, 16))
    return RowConfig("loop", block, num_warps=warps // per_warp)


@functools.cache
def _plan(
    n_cols: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    keeps_stats: bool,
    c: RowConfig,
) -> launching.KernelLauncher:
    return row_launcher(
        _tile_kernel if c.kernel == "tile" else _loop_kernel,
        c,
        EPS=eps,
        N=n_cols,
        HAS_WEIGHT=weight_dtype is not None,
        HAS_BIAS=bias_dtype is not None,
        KEEPS_STATS=keeps_stats,
    )


def prepare(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_stats: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives y and the statistics of the rows; the latter are empty unless they are kept."""
    check("layer_norm", x, weight, bias, eps)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device
    stats_shape = (x.numel() // x.shape[-1] if keeps_stats else 0, STATS)
    start = _start_forward(x, weight, bias, eps, keeps_stats) if x.numel() else library.start_nothing

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        stats = torch.empty_strided(stats_shape, (STATS, 1), dtype=torch.float32, device=device)
        start(x, weight, bias, y, stats if keeps_stats else None)
        return y, stats

    return run


def _start_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_stats: bool
) -> Callable[..., None]:
    copies: library.Copies = {}
    rows = library.rows_of(x, copies, 0)
    library.contiguous_of(weight, copies, 1)
    library.contiguous_of(bias, copies, 2)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    c = config(n_cols, x.element_size(), runtime.target(x.device))
    dtypes = (None if vector is None else vector.dtype for vector in (weight, bias))
    launcher = _plan(n_cols, x.dtype, *dtypes, eps, keeps_stats, c)
    programs = library.cdiv(n_rows, c.rows)
    return library.copying(launching.bind(launcher, programs, strides=(rows.stride(0),), numbers=(n_rows,)), copies)


def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_stats: bool) -> tuple[Tensor, Tensor]:
    check("layer_norm", x, weight, bias, eps)
    rows = x.numel() // x.shape[-1] if keeps_stats else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty((rows, STATS), dtype=torch.float32, device=x.device)


# Backward


@triton.jit
def _statistics(stats_ptr, row, mask):
    """mean, 1/std and rest/std, as the forward stored them."""
    stats_ptr += row * STRIDE
    mean = tl.load(stats_ptr, mask=mask, other=0.0)
    rstd = tl.load(stats_ptr + 1, mask=mask, other=0.0)
    return mean, rstd, tl.load(stats_ptr + 2, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_tile_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    partial_ptr,
    stride_dym,
    stride_xm,
    n_rows,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_N)[None, :]
    col_mask = cols < N
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    if NEEDS_DW:
        dw = tl.zeros((1, BLOCK_N), tl.float32)
    if NEEDS_DB:
        db = tl.zeros((1, BLOCK_N), tl.float32)

    for start in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start.to(tl.int64) + tl.arange(0, ROWS))[:, None]
        mask = (rows < n_rows) & col_mask
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        mean, rstd, shift = _statistics(stats_ptr, rows, rows < n_rows)
        dy = dy.to(tl.float32)
        # Past the last column dy is zero, and so is every term with xhat.
        xhat = (x.to(tl.float32) - mean) * rstd - shift
        g = dy
        if HAS_WEIGHT:
            g = dy * weight

        if NEEDS_DX:
            # Both sums before either is used, so that the warps synchronize once instead of twice.
            total = tl.sum(g, axis=1, keep_dims=True)
            along = tl.sum(g * xhat, axis=1, keep_dims=True)
            dx = rstd * (g - (total + xhat * along) / N)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            dw += tl.sum(dy * xhat, axis=0, keep_dims=True)
        if NEEDS_DB:
            db += tl.sum(dy, axis=0, keep_dims=True)

    partial_ptr += tl.program_id(0).to(tl.int64) * (NEEDS_DW + NEEDS_DB) * N
    if NEEDS_DW:
        tl.store(partial_ptr + cols, dw, mask=col_mask)
    if NEEDS_DB:
        tl.store(partial_ptr + NEEDS_DW * N + cols, db, mask=col_mask)


@triton.jit
def _publish_row(
    words_ptr, dy, x, mean, rstd, shift, weight_ptr, cols, mask, N: tl.constexpr, HAS_WEIGHT: tl.constexpr
):
    """The weight is read again for each row, from the L1: no registers are left to hold it."""
    g = dy.to(tl.float32)
    if HAS_WEIGHT:
        g *= tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    xhat = (x.to(tl.float32) - mean) * rstd - shift
    publish_pair(words_ptr, tl.sum(g, axis=0), tl.sum(g * xhat, axis=0), mask)


@triton.jit
def _load_row(dy_ptr, x_ptr, stats_ptr, stride_dym, stride_xm, row, cols, col_mask, n_rows):
    mask = col_mask & (row < n_rows)
    x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    mean, rstd, shift = _statistics(stats_ptr, row, row < n_rows)
    return dy, x, mean, rstd, shift


@triton.jit(do_not_specialize=["n_rows"])
def _backward_split_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    partial_ptr,
    words_ptr,
    stride_dym,
    stride_xm,
    n_rows,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    COMPENSATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    first = (tl.program_id(0) // SPLITS).to(tl.int64)
    step = tl.num_programs(0) // SPLITS
    cols = split * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    splits = tl.arange(0, BLOCK_S)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    dw_lost = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    db_lost = tl.zeros((BLOCK_N,), tl.float32)

    # Software pipeline: one row is finished, the next is published, and the one after it is being loaded.
    dy, x, mean, rstd, shift = _load_row(dy_ptr, x_ptr, stats_ptr, stride_dym, stride_xm, first, cols, col_mask, n_rows)
    dy1, x1, mean1, rstd1, shift1 = _load_row(
        dy_ptr, x_ptr, stats_ptr, stride_dym, stride_xm, first + step, cols, col_mask, n_rows
    )
    own = words_ptr + first * SPLITS + split
    _publish_row(own, dy, x, mean, rstd, shift, weight_ptr, cols, first < n_rows, N, HAS_WEIGHT)
    for r in tl.range(first, n_rows, step, num_stages=1):
        row = r.to(tl.int64)
        dy2, x2, mean2, rstd2, shift2 = _load_row(
            dy_ptr, x_ptr, stats_ptr, stride_dym, stride_xm, row + 2 * step, cols, col_mask, n_rows
        )
        own = words_ptr + (row + step) * SPLITS + split
        _publish_row(own, dy1, x1, mean1, rstd1, shift1, weight_ptr, cols, row + step < n_rows, N, HAS_WEIGHT)

        word_mask = splits < SPLITS
        words = tl.load(words_ptr + row * SPLITS + splits, mask=word_mask, other=-1, volatile=True)
        total, along = sum_pairs(gather(words, words_ptr + row * SPLITS + splits, word_mask), word_mask)
        xhat = (x.to(tl.float32) - mean) * rstd - shift
        g = dy.to(tl.float32)
        if NEEDS_DW:
            dw, dw_lost = accumulate(dw, dw_lost, g * xhat, COMPENSATED)
        if NEEDS_DB:
            db, db_lost = accumulate(db, db_lost, g, COMPENSATED)
        if NEEDS_DX:
            if HAS_WEIGHT:
                g *= tl.load(weight_ptr + cols, mask=col_mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dx = rstd * (g - (total + xhat * along) / N)
            tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=col_mask)
        dy = dy1
        x = x1
        mean = mean1
        rstd = rstd1
        shift = shift1
        dy1 = dy2
        x1 = x2
        mean1 = mean2
        rstd1 = rstd2
        shift1 = shift2

    partial_ptr += first * (NEEDS_DW + NEEDS_DB) * N
    if NEEDS_DW:
        tl.store(partial_ptr + cols, dw, mask=col_mask)
    if NEEDS_DB:
        tl.store(partial_ptr + NEEDS_DW * N + cols, db, mask=col_mask)


@functools.cache
def backward_config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 (bf16) from some twenty configurations at each length; three stages were always fastest.

    Fractions of a copy's speed: 0.93 at 1024 columns, 0.94 at 4096, 0.91 at 8192, 0.68 at 16384, 0.65 at 65536 and
    0.71 at 131072.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    if block_n <= 2048:
        rows = max(1, min(16, 8192 // itemsize // block_n))
        stages = stages_that_fit(2, rows * block_n * itemsize, 2, target)
        return RowConfig("tile", block_n, num_warps=4, rows=rows, stages=stages, per_sm=2)
    if block_n <= 8192:
        per_sm = 2 if block_n == 4096 and n_cols < 4096 else 1
        rows = max(1, 16384 // itemsize // block_n // per_sm)
        warps = 4 if per_sm == 2 else 8
        stages = stages_that_fit(2, rows * block_n * itemsize, per_sm, target)
        return RowConfig("tile", block_n, warps, rows=rows, stages=stages, per_sm=per_sm)
    registers = 128 if target.warp_size == 32 else None  # AMD's compiler has no such limit
    small = target.warp_size == 32 and target.shared_memory < 128 << 10  # sm_86 and sm_89 would spill 148 bytes
    return RowConfig("split", (4096 if small else 8192) // itemsize, 8, per_sm=2, max_registers=registers)


@functools.cache
def _backward_launcher(
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    needs: tuple[bool, bool, bool],
    c: RowConfig,
    splits: int,
) -> launching.KernelLauncher:
    return row_launcher(
        _backward_tile_kernel if c.kernel == "tile" else _backward_split_kernel,
        c,
        splits,
        N=n_cols,
        HAS_WEIGHT=dtypes[1] is not None,
        NEEDS_DX=needs[0],
        NEEDS_DW=needs[1],
        NEEDS_DB=needs[2],
        COMPENSATED=dtypes[0] is torch.float32,
    )


def prepare_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What gives dx, dweight and dbias; a gradient that is not needed is empty."""
    fake_backward(dy, x, weight, bias, stats, needs_dx, needs_dw, needs_db)
    if x.numel() == 0:
        return _empty_gradients
    copies: library.Copies = {}
    dy_rows, rows = library.rows_of(dy, copies, 0), library.rows_of(x, copies, 1)
    library.contiguous_of(weight, copies, 2)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    target = runtime.target(x.device)
    c = backward_config(n_cols, x.element_size(), target)
    programs = target.multiprocessors * c.per_sm
    if c.kernel == "tile":
        splits, lanes = 1, min(library.cdiv(n_rows, c.rows), programs)
    else:
        splits, lanes = split("layer_norm_backward", n_rows, n_cols, c.block_n, programs)
    weight_dtype = None if weight is None else weight.dtype
    launcher = _backward_launcher(n_cols, (x.dtype, weight_dtype), (needs_dx, needs_dw, needs_db), c, splits)
    strides = (dy_rows.stride(0), rows.stride(0))
    start = library.copying(launching.bind(launcher, splits * lanes, strides=strides, numbers=(n_rows,)), copies)
    dw_dtype, db_dtype = (x.dtype if vector is None else vector.dtype for vector in (weight, bias))
    dw_shape, db_shape = (n_cols if needs_dw else 0,), (n_cols if needs_db else 0,)
    needed = [kind for kind, needs in ((dw_dtype, needs_dw), (db_dtype, needs_db)) if needs]
    # A program's partial sums are adjacent, dweight first.
    partial_shape = (lanes if needed else 0, len(needed) * n_cols)
    add_up = prepare_sum(lanes, n_cols, *needed) if needed else library.start_nothing
    n_words = n_rows * splits if c.kernel == "split" else 0
    dx_shape = x.shape if needs_dx else (0,)
    dx_strides, dtype, device = library.contiguous_strides(dx_shape), x.dtype, x.device

    def run(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = torch.empty_strided(dx_shape, dx_strides, dtype=dtype, device=device)
        dw = torch.empty_strided(dw_shape, (1,), dtype=dw_dtype, device=device)
        db = torch.empty_strided(db_shape, (1,), dtype=db_dtype, device=device)
        partial = torch.empty_strided(partial_shape, (partial_shape[1], 1), dtype=torch.float32, device=device)
        if n_words:
            start(dy, x, weight, stats, dx, partial, torch.zeros(n_words, dtype=torch.int64, device=device))
        else:
            start(dy, x, weight, stats, dx, partial)
        if needs_dw:
            add_up(partial, dw, db if needs_db else None)
        elif needs_db:
            add_up(partial, db, None)
        return dx, dw, db

    return run


def _empty_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of no rows: those of weight and bias are zero."""
    dx, dw, db = fake_backward(*args)
    return dx, dw.zero_(), db.zero_()


def fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check("layer_norm_backward", x, weight, bias)
    library.check_same("layer_norm_backward", "dy", dy, "x", x)
    if stats.shape != (x.numel() // x.shape[-1], STATS):
        raise ValueError(
            f"layer_norm_backward: stats has shape {tuple(stats.shape)}, expected "
            f"{(x.numel() // x.shape[-1], STATS)}, the statistics of each row from the forward"
        )
    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    vectors = [
        torch.empty(x.shape[-1] if needed else 0, dtype=(x if vector is None else vector).dtype, device=x.device)
        for vector, needed in ((weight, needs_dw), (bias, needs_db))
    ]
    return dx, vectors[0], vectors[1]


# The bias is an argument only for its dtype.
_backward_op = library.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, "
    "bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    prepare=prepare_backward,
    fake=fake_backward,
)


# The op


def _save(ctx, inputs, outputs) -> None:
    x, weight, bias, _, keeps_stats = inputs
    if not keeps_stats:
        raise ValueError("layer_norm: keeps_stats is False, expected True for inputs that need a gradient")
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(x, weight, bias, outputs[1])


def _backward(ctx, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, bias, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:4]
    grads = _backward_op(dy, x, weight, bias, stats, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None, None


_op = library.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool keeps_stats) -> (Tensor, Tensor)",
    prepare=prepare,
    fake=fake,
    autograd=library.Autograd(_save, _backward),
    rows=library.Rows(("x",)),
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension: `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    `var` is the mean of squares about the mean, without Bessel's correction, as in `torch.nn.functional.layer_norm`.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only if the leading dimensions cannot be
            viewed as one, or if the last stride is not 1.
        weight: `(N,)` of any of the three dtypes, or None. A float32 weight with a 16-bit x is common.
        bias: `(N,)` of any of the three dtypes, or None; with or without a weight.
        eps: added to the variance.

    Returns:
        y with the shape and dtype of x, contiguous, rounded once. Statistics are float32. Autocast does not change the
        dtype.

    Raises:
        ValueError: the shape of weight or bias is not `(N,)`, devices differ, or a device is the CPU without the
            interpreter.
        TypeError: a dtype is not one of the three.
    """
    learns = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias))
    return _op(x, weight, bias, eps, learns)[0]
