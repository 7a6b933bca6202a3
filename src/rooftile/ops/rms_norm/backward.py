"""RMSNorm backward: two kernels, by the length of a row, and the sum of their partial weight gradients.

Both are bound by memory, and persistent: a program keeps its part of dweight in registers over all of its rows.

- tile: a program holds whole rows, and loads the next ones into shared memory meanwhile (1024 to 8192 columns: 0.92 to
  0.96 of a copy's speed in bf16 on an H200);
- split: several programs share a row, each with some of its columns, and exchange the row's two sums through memory
  (`primitives.cta_exchange`; 16384 to 131072 columns: 0.79 to 0.80 of a copy's speed; a step waits for the slowest
  program).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.rms_norm.forward import check
from rooftile.primitives.cta_exchange import gather, publish_pair, split, sum_pairs
from rooftile.primitives.partials import accumulate, prepare_sum
from rooftile.primitives.rows import RowConfig, row_launcher, stages_that_fit

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    dy_ptr,
    du_ptr,
    u_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    stride_dym,
    stride_dum,
    stride_um,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_DU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_N)[None, :]
    col_mask = cols < N
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + OFFSET
    if NEEDS_DW:
        dw = tl.zeros((1, BLOCK_N), tl.float32)

    for start in tl.range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start.to(tl.int64) + tl.arange(0, ROWS))[:, None]
        mask = (rows < n_rows) & col_mask
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_ptr + rows * stride_um + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        if HAS_DU:
            du = tl.load(du_ptr + rows * stride_dum + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        dy = dy.to(tl.float32)
        u = u.to(tl.float32)
        g = dy
        if HAS_WEIGHT:
            g = dy * weight

        # Both sums before either is used, so that the warps synchronize once instead of twice.
        squares = tl.sum(u * u, axis=1, keep_dims=True)
        along = tl.sum(g * u, axis=1, keep_dims=True)
        rstd = tl.rsqrt(squares / N + EPS)
        if ROWS > 1:
            rstd = tl.where(
                rows < n_rows, rstd, 0.0
            )  # with eps = 0 it is infinite past the last row, which makes dw NaN
        xhat = u * rstd
        if NEEDS_DX:
            dx = rstd * (g - xhat * (along * rstd / N))
            if HAS_DU:
                dx += du.to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            if CAST_FIRST:
                xhat = xhat.to(u_ptr.dtype.element_ty).to(tl.float32)
            dw += tl.sum(dy * xhat, axis=0, keep_dims=True)

    if NEEDS_DW:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + cols, dw, mask=col_mask)


@triton.jit
def _publish_row(
    words_ptr, dy, u, weight, OFFSET: tl.constexpr, row, n_rows, split, HAS_WEIGHT: tl.constexpr, SPLITS: tl.constexpr
):
    u = u.to(tl.float32)
    g = dy.to(tl.float32)
    if HAS_WEIGHT:
        g *= weight.to(tl.float32) + OFFSET
    publish_pair(words_ptr + row * SPLITS + split, tl.sum(u * u, axis=0), tl.sum(g * u, axis=0), row < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _split_kernel(
    dy_ptr,
    du_ptr,
    u_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    words_ptr,
    stride_dym,
    stride_dum,
    stride_um,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_DU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
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
    weight = None
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
    if NEEDS_DW:
        dw = tl.zeros((BLOCK_N,), tl.float32)
        lost = tl.zeros((BLOCK_N,), tl.float32)

    # Software pipeline: one row is finished, the next is published, and the one after it is being loaded.
    mask = col_mask & (first < n_rows)
    u = tl.load(u_ptr + first * stride_um + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    dy = tl.load(dy_ptr + first * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    mask = col_mask & (first + step < n_rows)
    u1 = tl.load(u_ptr + (first + step) * stride_um + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    dy1 = tl.load(dy_ptr + (first + step) * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    _publish_row(words_ptr, dy, u, weight, OFFSET, first, n_rows, split, HAS_WEIGHT, SPLITS)
    for r in tl.range(first, n_rows, step, num_stages=1):
        row = r.to(tl.int64)
        mask = col_mask & (row + 2 * step < n_rows)
        u2 = tl.load(u_ptr + (row + 2 * step) * stride_um + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        dy2 = tl.load(
            dy_ptr + (row + 2 * step) * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        if HAS_DU:
            du = tl.load(du_ptr + row * stride_dum + cols, mask=col_mask, other=0.0, eviction_policy="evict_first")
        _publish_row(words_ptr, dy1, u1, weight, OFFSET, row + step, n_rows, split, HAS_WEIGHT, SPLITS)

        word_mask = splits < SPLITS
        words = tl.load(words_ptr + row * SPLITS + splits, mask=word_mask, other=-1, volatile=True)
        squares, along = sum_pairs(gather(words, words_ptr + row * SPLITS + splits, word_mask), word_mask)
        rstd = tl.rsqrt(squares / N + EPS)
        xhat = u.to(tl.float32) * rstd
        g = dy.to(tl.float32)
        if NEEDS_DX:
            dx = g
            if HAS_WEIGHT:
                dx = g * (weight.to(tl.float32) + OFFSET)  # type: ignore[union-attr]
            dx = rstd * (dx - xhat * (along * rstd / N))
            if HAS_DU:
                dx += du.to(tl.float32)
            tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=col_mask)
        if NEEDS_DW:
            if CAST_FIRST:
                xhat = xhat.to(u_ptr.dtype.element_ty).to(tl.float32)
            dw, lost = accumulate(dw, lost, g * xhat, COMPENSATED)
        u = u1
        dy = dy1
        u1 = u2
        dy1 = dy2

    if NEEDS_DW:
        tl.store(partial_ptr + first * N + cols, dw, mask=col_mask)


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 (bf16) from some hundred configurations at each length; three stages were always fastest."""
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    if block_n <= 2048:
        rows = max(1, min(16, 8192 // itemsize // block_n))
        stages = stages_that_fit(3, rows * block_n * itemsize, 2, target)
        return RowConfig("tile", block_n, num_warps=4, rows=rows, stages=stages, per_sm=2)
    if block_n <= 8192:
        rows = max(1, 16384 // itemsize // block_n)
        stages = stages_that_fit(3, rows * block_n * itemsize, 1, target)
        return RowConfig("tile", block_n, num_warps=8, rows=rows, stages=stages)
    registers = 128 if target.warp_size == 32 else None  # AMD's compiler has no such limit
    if n_cols * itemsize <= 32768:
        return RowConfig("split", 16384 // itemsize, num_warps=16, max_registers=registers)
    return RowConfig("split", 8192 // itemsize, num_warps=8, per_sm=2, max_registers=registers)


@functools.cache
def _launcher(
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    du: bool,
    eps: float,
    offset: float,
    cast_first: bool,
    needs: tuple[bool, bool],
    c: RowConfig,
    splits: int,
) -> launching.KernelLauncher:
    return row_launcher(
        _tile_kernel if c.kernel == "tile" else _split_kernel,
        c,
        splits,
        EPS=eps,
        OFFSET=offset,
        N=n_cols,
        HAS_DU=du,
        HAS_WEIGHT=dtypes[1] is not None,
        CAST_FIRST=cast_first,
        NEEDS_DX=needs[0],
        NEEDS_DW=needs[1],
        COMPENSATED=dtypes[0] is torch.float32,
    )


def _prepare(
    dy: Tensor,
    du: Tensor | None,
    u: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    needs_dx: bool,
    needs_dw: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives dx and dweight; a gradient that is not needed is empty."""
    fake(dy, du, u, weight, eps, offset, rounding, needs_dx, needs_dw)
    if u.numel() == 0:
        return _empty_gradients
    copies: library.Copies = {}
    dy_rows, rows = library.rows_of(dy, copies, 0), library.rows_of(u, copies, 2)
    stride_du = 0 if du is None else library.rows_of(du, copies, 1).stride(0)
    library.contiguous_of(weight, copies, 3)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    target = runtime.target(u.device)
    c = config(n_cols, u.element_size(), target)
    programs = target.multiprocessors * c.per_sm
    if c.kernel == "tile":
        splits, lanes = 1, min(library.cdiv(n_rows, c.rows), programs)
    else:
        splits, lanes = split("rms_norm_backward", n_rows, n_cols, c.block_n, programs)
    weight_dtype = None if weight is None else weight.dtype
    mode = (eps, offset, rounding == "llama", (needs_dx, needs_dw))
    launcher = _launcher(n_cols, (u.dtype, weight_dtype), du is not None, *mode, c, splits)
    strides = (dy_rows.stride(0), stride_du, rows.stride(0))
    start = library.copying(launching.bind(launcher, splits * lanes, strides=strides, numbers=(n_rows,)), copies)
    dx_shape = u.shape if needs_dx else (0,)
    dx_strides, dtype, device = library.contiguous_strides(dx_shape), u.dtype, u.device
    dw_dtype, dw_size = weight_dtype or dtype, n_cols if needs_dw else 0
    partial_shape = (lanes if needs_dw else 0, n_cols)
    add_up = prepare_sum(lanes, n_cols, dw_dtype) if needs_dw else library.start_nothing
    n_words = n_rows * splits if c.kernel == "split" else 0

    def run(dy: Tensor, du: Tensor | None, u: Tensor, weight: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        dx = torch.empty_strided(dx_shape, dx_strides, dtype=dtype, device=device)
        dw = torch.empty_strided((dw_size,), (1,), dtype=dw_dtype, device=device)
        partial = torch.empty_strided(partial_shape, (n_cols, 1), dtype=torch.float32, device=device)
        if n_words:
            start(dy, du, u, weight, dx, partial, torch.zeros(n_words, dtype=torch.int64, device=device))
        else:
            start(dy, du, u, weight, dx, partial)
        add_up(partial, dw, None)
        return dx, dw

    return run


def _empty_gradients(*args: Any) -> tuple[Tensor, Tensor]:
    """Of no rows: the weight's is zero."""
    dx, dw = fake(*args)
    return dx, dw.zero_()


launch = library.Prepared(_prepare)


def fake(
    dy: Tensor,
    du: Tensor | None,
    u: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:
    check("rms_norm_backward", u, None, weight, eps, offset, rounding)
    library.check_same("rms_norm_backward", "dy", dy, "u", u)
    if du is not None:
        library.check_same("rms_norm_backward", "du", du, "u", u)
    dtype = u.dtype if weight is None else weight.dtype
    dx = torch.empty(u.shape if needs_dx else (0,), dtype=u.dtype, device=u.device)
    return dx, torch.empty(u.shape[-1] if needs_dw else 0, dtype=dtype, device=u.device)


# add_rms_norm shares it: du is the gradient that reaches u from its other uses.
op = library.define(
    "rms_norm_backward(Tensor dy, Tensor? du, Tensor u, Tensor? weight, float eps, float offset, str rounding, "
    "bool needs_dx, bool needs_dw) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=fake,
)
