"""LayerNorm backward: two kernels, by the length of a row, and the sum of their partial parameter gradients.

- tile: a grid that stays on the chip; a program holds whole rows, the next ones on their way into shared memory, and
  its part of dweight and dbias in registers;
- split: a row is held by several programs, each with its columns' part of dweight and dbias in registers, which
  exchange the two sums of a row: longer rows.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.layer_norm.common import STATS, STRIDE, check
from rooftile.primitives.cta_exchange import gather, publish_pair, resident, split, sum_pairs
from rooftile.primitives.partials import accumulate, sum_partials

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _statistics(stats_ptr, row, mask):
    """mean, 1/std and rest/std, as the forward kept them."""
    stats_ptr += row * STRIDE
    mean = tl.load(stats_ptr, mask=mask, other=0.0)
    rstd = tl.load(stats_ptr + 1, mask=mask, other=0.0)
    return mean, rstd, tl.load(stats_ptr + 2, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
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
        # Past the last column dy is zero, and with it all that xhat goes into.
        xhat = (x.to(tl.float32) - mean) * rstd - shift
        g = dy
        if HAS_WEIGHT:
            g = dy * weight

        if NEEDS_DX:
            # Both sums before either is used: one wait for the other warps instead of two.
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
    """The weight is read for each row anew, out of the L1: there are no registers left to hold it in."""
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
def _split_kernel(
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

    # One row is finished while the next has been published and the one after it is on its way.
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


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel, the rows and columns of its tile, warps, programs a multiprocessor, and pipeline stages.

    `max_registers` is what a thread of the split kernel may have for that many programs to fit.
    """

    kernel: str
    block_n: int
    num_warps: int
    per_multiprocessor: int
    rows: int = 1
    stages: int = 1
    max_registers: int | None = None


def _stages(tile_bytes: int, per_multiprocessor: int, target: runtime.Target) -> int:
    """Three stages keep two tiles of dy and x in shared memory; fewer where the chip has no room for them."""
    room = target.shared_memory // per_multiprocessor - 2048
    return 1 + min(2, room // (2 * tile_bytes))


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> Config:
    """Chosen on an H200 (bf16) from some twenty configurations at each length; three stages always won.

    Parts of a copy's speed: 0.93 at 1024 columns, 0.94 at 4096, 0.91 at 8192, 0.68 at 16384, 0.65 at 65536 and 0.71 at
    131072.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, per_multiprocessor=1, rows=16)
    if block_n <= 2048:
        rows = max(1, min(16, 8192 // itemsize // block_n))
        return Config("tile", block_n, 4, 2, rows, _stages(rows * block_n * itemsize, 2, target))
    if block_n <= 8192:
        per_multiprocessor = 2 if block_n == 4096 and n_cols < 4096 else 1
        rows = max(1, 16384 // itemsize // block_n // per_multiprocessor)
        warps = 4 if per_multiprocessor == 2 else 8
        stages = _stages(rows * block_n * itemsize, per_multiprocessor, target)
        return Config("tile", block_n, warps, per_multiprocessor, rows, stages)
    registers = 128 if target.warp_size == 32 else None  # AMD's compiler takes no such limit
    small = target.warp_size == 32 and target.shared_memory < 128 << 10  # sm_86 and sm_89 would spill 148 bytes
    return Config("split", (4096 if small else 8192) // itemsize, 8, 2, max_registers=registers)


@functools.cache
def _plan(
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    needs: tuple[bool, bool, bool],
    c: Config,
    splits: int,
) -> launching.KernelLauncher:
    flags = {
        "N": n_cols,
        "HAS_WEIGHT": dtypes[1] is not None,
        "NEEDS_DX": needs[0],
        "NEEDS_DW": needs[1],
        "NEEDS_DB": needs[2],
    }
    if c.kernel == "tile":
        tile = {"ROWS": c.rows, "BLOCK_N": c.block_n, "STAGES": c.stages}
        return launching.KernelLauncher(_tile_kernel, {**flags, **tile}, num_warps=c.num_warps)
    sizes = {
        "COMPENSATED": dtypes[0] is torch.float32,
        "SPLITS": splits,
        "BLOCK_N": c.block_n,
        "BLOCK_S": library.power_of_two(splits),
    }
    return launching.KernelLauncher(
        _split_kernel, {**flags, **sizes}, num_warps=c.num_warps, **resident(c.max_registers)
    )


def launch(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; one that is not needed comes back empty."""
    dx, dw, db = fake(dy, x, weight, bias, stats, needs_dx, needs_dw, needs_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    dy, x = library.as_rows(dy), library.as_rows(x)
    weight_dtype = None
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    target = runtime.target(x.device)
    c = config(n_cols, x.element_size(), target)
    programs = target.multiprocessors * c.per_multiprocessor
    if c.kernel == "tile":
        splits, lanes = 1, min(library.cdiv(n_rows, c.rows), programs)
    else:
        splits, lanes = split("layer_norm_backward", n_rows, n_cols, c.block_n, programs)
    vectors = int(needs_dw) + int(needs_db)  # a program's partial sums lie next to each other, dweight first
    partial = torch.empty((lanes if vectors else 0, vectors * n_cols), dtype=torch.float32, device=x.device)
    plan = _plan(n_cols, (x.dtype, weight_dtype), (needs_dx, needs_dw, needs_db), c, splits)
    tensors: tuple[Tensor | None, ...] = (dy, x, weight, stats, dx, partial)
    if c.kernel == "split":
        tensors += (torch.zeros(n_rows * splits, dtype=torch.int64, device=x.device),)
    launching.launch(plan, splits * lanes, tensors, (dy.stride(0), x.stride(0)), (n_rows,))
    if vectors:
        sum_partials(partial, *(d for d, needed in ((dw, needs_dw), (db, needs_db)) if needed))
    return dx, dw, db


def fake(
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
            f"{(x.numel() // x.shape[-1], STATS)}: what the forward kept of each row"
        )
    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    vectors = [
        torch.empty(x.shape[-1] if needed else 0, dtype=(x if vector is None else vector).dtype, device=x.device)
        for vector, needed in ((weight, needs_dw), (bias, needs_db))
    ]
    return dx, vectors[0], vectors[1]


# The bias is there for its dtype alone.
op = library.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, "
    "bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    launch=launch,
    fake=fake,
)
