"""Softmax backward, `dx = scale * y * (dy - sum(dy * y))`: three kernels, by the length of a row.

- tile: a program holds whole rows of dy and y in registers;
- loop: a program reads its row twice, the second time from the L2; the first blocks of long rows stay in registers;
- split: several programs share a row and exchange their sums. It serves the longest rows, and long rows that are fewer
  than the SMs.

A dropped element has y = 0 and so dx = 0, whatever the mask was. The columns that a causal row drops are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.softmax.forward import (
    as_float32,
    check,
    inside,
    kept_columns,
    narrowed,
    read_columns,
    split_config,
    unrolled,
)
from rooftile.primitives.cta_exchange import gather, publish, split, sum_words
from rooftile.primitives.rows import RowConfig, row_launcher, row_length

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows", "seq_len"])
def _tile_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    stride_dym,
    stride_ym,
    n_cols,
    n_rows,
    seq_len,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & inside(cols, n_cols, EVEN)
    read = mask
    if CAUSAL:
        read &= cols < read_columns(kept_columns(narrowed(rows, n_rows), seq_len, n_cols))

    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=read, other=0.0, eviction_policy="evict_first")
    y = tl.load(y_ptr + rows * stride_ym + cols, mask=read, other=0.0, eviction_policy="evict_first")
    dy = dy.to(tl.float32)
    y = y.to(tl.float32)

    dx = SCALE * y * (dy - tl.sum(dy * y, axis=1, keep_dims=True))

    tl.store(dx_ptr + rows * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _read(dy_ptr, y_ptr, cols, stop, n_cols, CAUSAL: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """dy and y at these columns. A causal row is read before `stop` only."""
    mask = inside(cols, n_cols, EVEN)
    if CAUSAL:
        mask &= cols < stop
    dy = tl.load(dy_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY)
    return dy, tl.load(y_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["n_rows", "seq_len"])
def _loop_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    stride_dym,
    stride_ym,
    n_cols,
    n_rows,
    seq_len,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
):
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * stride_dym
    y_ptr += row * stride_ym
    dx_ptr += row * n_cols
    stop = n_cols
    if CAUSAL:
        stop = read_columns(kept_columns(narrowed(row, n_rows), seq_len, n_cols))
    elif CHUNKS > 0:  # a short loop is unrolled, so that all its loads are in flight at once
        stop = CHUNKS * BLOCK_N
    block = tl.arange(0, BLOCK_N)

    held = ()
    for i in tl.static_range(HELD):
        pair = _read(dy_ptr, y_ptr, i * BLOCK_N + block, stop, n_cols, CAUSAL, EVEN, "evict_first")
        held += (pair,)  # type: ignore[assignment]
    along = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(HELD * BLOCK_N, stop, BLOCK_N, num_stages=1, loop_unroll_factor=CHUNKS):
        dy, y = _read(dy_ptr, y_ptr, start + block, stop, n_cols, CAUSAL, EVEN, "evict_last")
        along += dy.to(tl.float32) * y.to(tl.float32)
    for i in tl.static_range(HELD):
        along += held[i][0].to(tl.float32) * held[i][1].to(tl.float32)
    total = tl.sum(along, axis=0)

    for start in tl.range(HELD * BLOCK_N, stop, BLOCK_N, num_stages=1, loop_unroll_factor=CHUNKS):
        cols = start + block
        dy, y = _read(dy_ptr, y_ptr, cols, stop, n_cols, CAUSAL, EVEN, "evict_first")
        dx = SCALE * y.to(tl.float32) * (dy.to(tl.float32) - total)
        tl.store(dx_ptr + cols, dx.to(DTYPE), mask=inside(cols, n_cols, EVEN), cache_modifier=".cs")
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        dx = SCALE * held[i][1].to(tl.float32) * (held[i][0].to(tl.float32) - total)
        tl.store(dx_ptr + cols, dx.to(DTYPE), mask=inside(cols, n_cols, EVEN), cache_modifier=".cs")
    if CAUSAL:
        zeros = tl.zeros((BLOCK_N,), tl.float32) * total  # NaN in a row of NaN
        written = tl.maximum(tl.cdiv(stop, BLOCK_N), HELD) * BLOCK_N
        for start in tl.range(written, n_cols, BLOCK_N, num_stages=1):
            cols = start + block
            tl.store(dx_ptr + cols, zeros.to(DTYPE), mask=cols < n_cols, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows", "seq_len"])
def _split_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    words_ptr,
    stride_dym,
    stride_ym,
    n_cols,
    n_rows,
    seq_len,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    split = tl.program_id(0) % SPLITS
    first = tl.program_id(0) // SPLITS
    step = tl.num_programs(0) // SPLITS
    cols = split * BLOCK_N + tl.arange(0, BLOCK_N)
    splits = tl.arange(0, BLOCK_S)
    mask = inside(cols, n_cols, EVEN)

    # A row is finished two steps after it was read: by then the other programs have published their sums.
    dy1 = tl.zeros((BLOCK_N,), DTYPE)
    dy2 = tl.zeros((BLOCK_N,), DTYPE)
    y1 = tl.zeros((BLOCK_N,), DTYPE)
    y2 = tl.zeros((BLOCK_N,), DTYPE)
    for r in tl.range(first, n_rows + 2 * step, step, num_stages=STAGES):
        row = r.to(tl.int64)
        done = row - 2 * step
        word_mask = (done >= 0) & (splits < SPLITS)
        words = tl.load(words_ptr + done * SPLITS + splits, mask=word_mask, other=-1, volatile=True)

        read = mask & (row < n_rows)
        if CAUSAL:
            read &= cols < read_columns(kept_columns(narrowed(row, n_rows), seq_len, n_cols))
        dy = tl.load(dy_ptr + row * stride_dym + cols, mask=read, other=0.0, eviction_policy="evict_first")
        y = tl.load(y_ptr + row * stride_ym + cols, mask=read, other=0.0, eviction_policy="evict_first")
        along = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=0)
        publish(words_ptr + row * SPLITS + split, along, row < n_rows)

        if done >= 0:
            total = sum_words(gather(words, words_ptr + done * SPLITS + splits, word_mask), word_mask)
            dx = SCALE * y2.to(tl.float32) * (dy2.to(tl.float32) - total)
            tl.store(dx_ptr + done * n_cols + cols, dx.to(DTYPE), mask=mask)

        # Adding zero: Triton does not pipeline a loop that carries a value unchanged over two iterations.
        dy2 = dy1 + 0
        dy1 = dy
        y2 = y1 + 0
        y1 = y


@functools.cache
def config(n_cols: int, itemsize: int, few: bool, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 (bf16) from some ten configurations at each length. `few`: fewer rows than SMs.

    Fractions of a copy's speed: 1.01 to 1.04 from 1024 to 16384 columns, 0.96 at 65536, 0.92 at 131072.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 512:
        return RowConfig("tile", block_n, num_warps=4, rows=2048 // block_n)
    if n_cols * itemsize > (32768 if few else 131072):
        c = split_config(n_cols, itemsize, target)
        if c is not None:
            return c
    if n_cols * itemsize <= 65536:
        longest = {1536: (512, 4), 2048: (2048, 8), 4095: (1024, 8), 4096: (2048, 8), 8192: (4096, 16)}
        block, warps = next((longest[n] for n in longest if n_cols <= n), (8192, 32))
        return RowConfig("loop", block, num_warps=warps // per_warp)
    # 1024 threads, so an SM runs one program at a time.
    return RowConfig("loop", 16384 // itemsize, num_warps=32 // per_warp, held=2)


@functools.cache
def _launcher(
    dtype: torch.dtype, scale: float, causal: bool, even: bool, c: RowConfig, chunks: int = 0, splits: int = 1
) -> launching.KernelLauncher:
    kernel = {"tile": _tile_kernel, "loop": _loop_kernel, "split": _split_kernel}[c.kernel]
    scale = as_float32(scale)[0]
    return row_launcher(kernel, c, splits, SCALE=scale, CAUSAL=causal, EVEN=even, CHUNKS=chunks)


def prepare(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Callable[..., Tensor]:
    """What gives dx of such dy and y."""
    fake(dy, y, scale, causal)
    n_cols = row_length(y)
    shape, strides, dtype, device = y.shape, library.contiguous_strides(y.shape), y.dtype, y.device
    start, n_words = library.start_nothing, 0
    if y.numel():
        start, n_words = _prepare_start(dy, y, n_cols, scale, causal)

    def run(dy: Tensor, y: Tensor, *_: object) -> Tensor:
        dx = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if n_words:
            start(dy, y, dx, torch.zeros(n_words, dtype=torch.int32, device=device))
        else:
            start(dy, y, dx)
        return dx

    return run


def _prepare_start(dy: Tensor, y: Tensor, n_cols: int, scale: float, causal: bool) -> tuple[Callable[..., None], int]:
    """The launch over dy, y and dx, and how many words it takes through which programs share rows."""
    copies: library.Copies = {}
    dy_rows, rows = library.rows_of(dy, copies, 0), library.rows_of(y, copies, 1)
    n_rows = rows.shape[0]
    target = runtime.target(y.device)
    few = bool(n_rows < target.multiprocessors)  # symbolic in a traced graph; no cache may keep a symbol
    c = config(n_cols, y.element_size(), few, target)
    even = n_cols % c.block_n == 0
    mode = (y.dtype, float(scale), causal)
    n_words = 0
    if c.kernel == "tile":
        launcher, programs = _launcher(*mode, even, c), library.cdiv(n_rows, c.rows)
    elif c.kernel == "loop":
        launcher, programs = _launcher(*mode, even, c, unrolled(n_cols, c, causal)), n_rows
    else:
        most = target.multiprocessors * c.per_sm
        splits, lanes = split("softmax_backward", n_rows, n_cols, c.block_n, most)
        launcher, programs, n_words = _launcher(*mode, even, c, splits=splits), splits * lanes, n_rows * splits
    strides, numbers = (dy_rows.stride(0), rows.stride(0), n_cols), (n_rows, y.shape[-2] if causal else 1)
    return library.copying(launching.bind(launcher, programs, strides=strides, numbers=numbers), copies), n_words


def fake(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    check("softmax_backward", "y", y, None, scale, causal)
    library.check_same("softmax_backward", "dy", dy, "y", y)
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


op = library.define(
    "softmax_backward(Tensor dy, Tensor y, float scale, bool causal) -> Tensor", prepare=prepare, fake=fake
)
